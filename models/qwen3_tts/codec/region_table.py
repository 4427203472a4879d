"""The codec's table of regions: bucket sizes, example inputs and the compile targets.

Does not contain slots' owners, nor how a region is compiled or captured (`models.graphs.region_graphs`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from models.graphs.captured import Bucket, Example
from models.graphs.region_graphs import Region, RegionTable
from models.graphs.shape_table import ShapeTable
from models.qwen3_tts.codec import regions
from models.qwen3_tts.codec.config import CODE_GROUPS, FRAME_SAMPLES
from models.qwen3_tts.codec.decoder import FrameTransformerLayer, SnakeBeta, SpeechDecoder
from models.qwen3_tts.codec.speaker_encoder import SpeakerEncoder
from models.qwen3_tts.codec.speech_encoder import SoundLayer, SpeechEncoder
from models.qwen3_tts.codec.state import CodecState


@dataclass(frozen=True)
class CodecShapes(ShapeTable):
    """Bucket sizes of the codec's axes."""

    batch: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # streams decoded at once
    frames: tuple[int, ...] = (1, 2, 4, 8)  # of one chunk
    sounds: tuple[int, ...] = (1,)  # reference sounds encoded at once
    sound_frames: tuple[int, ...] = (50, 125, 250, 400)  # of a reference sound: 4, 10, 20 and 32 s


class CodecParts(nn.Module):
    """The networks under the names of the compile targets. speaker: None = the checkpoint is no Base model."""

    def __init__(self, decoder: SpeechDecoder, encoder: SpeechEncoder, speaker: SpeakerEncoder | None):
        super().__init__()
        self.decoder, self.encoder, self.speaker = decoder, encoder, speaker


class CodecRegions(RegionTable):
    """All regions of the codec over its slots."""

    # The decoder runs best if compiled as a whole. Smaller parts make the start shorter.
    stacks: ClassVar = {
        "decoder": ((SnakeBeta, ("forward",)), (FrameTransformerLayer, ("forward",))),
        "encoder": ((SoundLayer, ("forward",)),),
    }

    def __init__(self, parts: CodecParts, state: CodecState, shapes: CodecShapes):
        """
        Args:
            parts: the networks.
            state: slots of the decoder.
            shapes: bucket sizes.
        """
        self.state = state
        super().__init__(parts, _regions(parts, state), shapes, device=parts.decoder.device)

    def clear_scratch(self) -> None:
        self.state.reset(torch.tensor([self.state.scratch], device=self._device))


@dataclass(frozen=True)
class _Examples:
    """Inputs of the regions at a bucket, on the scratch slot."""

    state: CodecState
    codebook_size: int
    device: torch.device

    def begin(self, bucket: Bucket) -> Example:
        return (self._full(bucket["batch"], self.state.scratch),), {}

    def decode(self, bucket: Bucket) -> Example:
        n, frames = bucket["batch"], bucket["frames"]
        codes = torch.randint(0, self.codebook_size, (n, frames, CODE_GROUPS), device=self.device)
        return (self._full(n, self.state.scratch), codes, self._full(n, frames)), {}

    def sound(self, bucket: Bucket) -> Example:
        n, n_samples = bucket["sounds"], FRAME_SAMPLES * bucket["sound_frames"]
        waves = 0.1 * torch.randn(n, n_samples, device=self.device)
        return (waves, self._full(n, n_samples)), {}

    def _full(self, n: int, value: int) -> Tensor:
        return torch.full((n,), value, dtype=torch.int64, device=self.device)


def _regions(parts: CodecParts, state: CodecState) -> Iterator[Region]:
    decoder = parts.decoder
    examples = _Examples(state, decoder.config.codebook_size, decoder.device)
    yield Region("codec_begin", "state", regions.begin_sound, (state,), {"batch": "batch"}, examples.begin)
    axes = {"batch": "batch", "frames": "frames"}
    yield Region("codec_decode", "decoder", regions.decode_frames, (decoder, state), axes, examples.decode)
    axes = {"sounds": "sounds", "sound_frames": "sound_frames"}
    yield Region("codec_encode", "encoder", regions.encode_sound, (parts.encoder,), axes, examples.sound)
    if parts.speaker is not None:
        yield Region("codec_speaker", "speaker", regions.describe_speaker, (parts.speaker,), axes, examples.sound)
