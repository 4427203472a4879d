"""Modules that prepare voices, with random weights of the vocoder's scales."""

import torch

from models.layers.weights import on_meta
from models.token2wav.load.parts import VoiceParts
from models.token2wav.load.random_weights import filled
from models.token2wav.prompt.campplus import CampPlus
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer
from models.token2wav.settings import CampPlusConfig, S3TokenizerConfig


def random_voice_parts(
    speaker_encoder: CampPlusConfig, speech_tokenizer: S3TokenizerConfig, seed: int = 0
) -> VoiceParts:
    """Modules of these sizes on the CPU in float32."""
    with on_meta():
        parts = CampPlus(speaker_encoder), S3Tokenizer(speech_tokenizer)
    generator = torch.Generator().manual_seed(seed)
    return VoiceParts(
        filled(parts[0], generator, "cpu", lambda _: torch.float32),
        filled(parts[1], generator, "cpu", lambda _: torch.float32),
    )
