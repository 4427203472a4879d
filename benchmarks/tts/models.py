"""The networks of both speech systems with random weights, at the released sizes or at tiny ones."""

from typing import Any, Literal

import torch

from models.qwen3_tts.codec.config import SpeechDecoderConfig, SpeechEncoderConfig, SpeechTokenizerConfig
from models.qwen3_tts.codec.load import SpeechTokenizer
from models.qwen3_tts.codec.random_weights import RELEASED_TOKENIZER, random_codec
from models.qwen3_tts.config import Qwen3TTSConfig, parse_qwen3_tts_config
from models.qwen3_tts.model import Qwen3TTS
from models.qwen3_tts.random_weights import random_qwen3_tts, released_config
from models.token2wav.s3gen.model import S3Gen
from models.token2wav.s3gen.random_weights import random_s3gen
from models.token2wav.s3gen.random_weights import released_config as released_s3gen
from models.token2wav.settings import (
    CampPlusConfig,
    EncoderConfig,
    HiftConfig,
    S3FlowConfig,
    S3GenConfig,
    S3TokenizerConfig,
    UNetConfig,
)

SEED = 1
Size = Literal["1b7", "0b6", "tiny"]


def qwen3_tts(size: Size, device: torch.device, dtype: torch.dtype) -> tuple[Qwen3TTS, SpeechTokenizer]:
    """Language models and codec."""
    language = _tiny_language() if size == "tiny" else released_config(size)
    tokenizer = _tiny_tokenizer() if size == "tiny" else RELEASED_TOKENIZER
    model = random_qwen3_tts(language, device=device, dtype=dtype, seed=SEED)
    return model, random_codec(tokenizer, device=device, dtype=dtype, seed=SEED)[0]


def s3gen(size: Size, device: torch.device, dtype: torch.dtype, *, meanflow: bool = False) -> S3Gen:
    """S3Gen; it has one released size."""
    config = _tiny_s3gen(meanflow) if size == "tiny" else released_s3gen(meanflow=meanflow)
    return random_s3gen(config, device=device, dtype=dtype, seed=SEED)


def _tiny_language() -> Qwen3TTSConfig:
    raw: dict[str, Any] = released_config("0b6").model_dump()
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    raw["talker_config"] |= {**small, "num_hidden_layers": 2, "text_hidden_size": 32}
    raw["talker_config"]["code_predictor_config"] |= {**small, "num_hidden_layers": 1}
    return parse_qwen3_tts_config(raw)


def _tiny_tokenizer() -> SpeechTokenizerConfig:
    heads = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    encoder = SpeechEncoderConfig(
        num_filters=4,
        hidden_size=48,
        intermediate_size=64,
        num_quantizers=16,
        codebook_size=2048,
        codebook_dim=16,
        **heads,
    )
    decoder = SpeechDecoderConfig(
        latent_dim=48,
        codebook_dim=32,
        codebook_size=2048,
        decoder_dim=64,
        hidden_size=32,
        intermediate_size=48,
        **heads,
    )
    return SpeechTokenizerConfig(encoder_config=encoder, decoder_config=decoder)


def _tiny_s3gen(meanflow: bool) -> S3GenConfig:
    n_mels = 16
    estimator = UNetConfig(
        in_channels=4 * n_mels, out_channels=n_mels, channels=8, heads=1, blocks=1, mid_blocks=1, meanflow=meanflow
    )
    encoder = EncoderConfig(width=16, heads=2, inner=24, n_layers=1, n_up_layers=1)
    return S3GenConfig(
        flow=S3FlowConfig(vocab_size=40, n_mels=n_mels, speaker_dim=8, encoder=encoder, estimator=estimator),
        vocoder=HiftConfig(n_mels=n_mels, base_channels=8, f0_channels=4),
        speaker_encoder=CampPlusConfig(n_mels=16, embedding=8, growth=2, bottleneck=2, channels=8, front_channels=4),
        tokenizer=S3TokenizerConfig(n_mels=16, width=64, n_layers=1),
    )
