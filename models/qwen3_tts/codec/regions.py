"""The codec's regions: plain functions of modules, slot state and tensors, as in `models.stages.regions`."""

from typing import cast

from torch import Tensor

from models.qwen3_tts.codec.decoder import SpeechDecoder
from models.qwen3_tts.codec.speaker_encoder import SpeakerEncoder
from models.qwen3_tts.codec.speech_encoder import SpeechEncoder
from models.qwen3_tts.codec.state import CodecState


def begin_sound(state: CodecState, slots: Tensor) -> None:
    """Set `slots` [B] to the start of a stream."""
    state.reset(slots)


def decode_frames(decoder: SpeechDecoder, state: CodecState, slots: Tensor, codes: Tensor, n_frames: Tensor) -> Tensor:
    """Sound [B, 1920 * T] of the next frames of each slot; arguments as `SpeechDecoder.forward`."""
    return cast(Tensor, decoder(state, slots, codes, n_frames))


def encode_sound(encoder: SpeechEncoder, waves: Tensor, n_samples: Tensor) -> Tensor:
    """Codes [B, T, 16] of whole sounds; arguments as `SpeechEncoder.forward`."""
    return cast(Tensor, encoder(waves, n_samples))


def describe_speaker(encoder: SpeakerEncoder, waves: Tensor, n_samples: Tensor) -> Tensor:
    """Speaker vectors [B, dim] of whole sounds; arguments as `SpeakerEncoder.forward`."""
    return cast(Tensor, encoder(waves, n_samples))
