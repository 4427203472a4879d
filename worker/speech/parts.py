"""Loads a Qwen3-TTS checkpoint, and allocates its slots."""

from dataclasses import dataclass
from pathlib import Path

import torch

from models.errors import ConfigError
from models.qwen3_tts.codec.codec import SpeechCodec
from models.qwen3_tts.codec.load import TOKENIZER_FOLDER, load_speaker_encoder, load_speech_tokenizer
from models.qwen3_tts.config import Qwen3TTSConfig, load_qwen3_tts_config
from models.qwen3_tts.load import load_qwen3_tts
from models.qwen3_tts.region_table import TalkerShapes
from models.qwen3_tts.runner import TalkerRunner
from models.qwen3_tts.settings import FrameSampling, load_sampling
from models.qwen3_tts.streams import SpeechStreams
from models.qwen3_tts.text import PromptTokenizer
from worker.assembly.backend_flags import apply_backend_flags, uses_kernels
from worker.assembly.parts import pick_dtype
from worker.config.session import EngineConfig


@dataclass(frozen=True)
class SpeechParts:
    """A speech model with its slots.

    Attributes:
        folder: of the checkpoint.
        sampling: that the checkpoint states.
        n_bytes: of all weights.
    """

    folder: Path
    config: Qwen3TTSConfig
    tokenizer: PromptTokenizer
    sampling: FrameSampling
    streams: SpeechStreams
    n_bytes: int

    @property
    def runner(self) -> TalkerRunner:
        return self.streams.runner

    @property
    def n_slots(self) -> int:
        return self.runner.n_slots


def build_speech(folder: Path, config: EngineConfig, device: torch.device) -> SpeechParts:
    """The speech model of a checkpoint folder.

    Raises: CheckpointError, ConfigError, TokenError for files that do not fit.
    """
    dtype = pick_dtype(config.dtype, device)
    model_config = load_qwen3_tts_config(folder)
    model = load_qwen3_tts(folder, device=device, dtype=dtype, config=model_config)
    codec_parts = load_speech_tokenizer(folder / TOKENIZER_FOLDER, device=device, dtype=dtype)
    n_codes = codec_parts.config.decoder_config.codebook_size
    if n_codes != model_config.talker_config.n_codes:
        expected = f"{model_config.talker_config.n_codes}, the codes of the talker"
        raise ConfigError(f"{folder}: codebook_size", expected=expected, got=n_codes)
    speaker = None
    if model_config.tts_model_type == "base":
        speaker = load_speaker_encoder(folder, device=device, dtype=torch.float32)
    modules = [model, codec_parts, *([] if speaker is None else [speaker])]
    n_bytes = sum(weight.nbytes for module in modules for weight in module.parameters())
    by_kernels = uses_kernels(config.compile, device)
    apply_backend_flags(config.compile, device)  # beside the omni model they are the same, of the same settings
    if by_kernels:
        model.use_kernels(True)
    n_slots = config.speech_slots(device.type)
    # Kernels read only the valid rows, so one size is enough.
    shapes = TalkerShapes(kv=(config.speech_rows,)) if by_kernels else None
    runner = TalkerRunner(model, n_slots=n_slots, max_len=config.speech_rows, shapes=shapes)
    streams = SpeechStreams(runner, SpeechCodec(codec_parts, speaker, n_slots=n_slots))
    tokenizer = PromptTokenizer.load(folder, model_config)
    return SpeechParts(folder, model_config, tokenizer, load_sampling(folder), streams, n_bytes)
