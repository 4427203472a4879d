"""Language models with random weights, drawn on the target device: for measurements at the released sizes."""

import math

import torch

from models.layers.weights import assign_weights, on_meta
from models.qwen3_tts.config import Qwen3TTSConfig, parse_qwen3_tts_config
from models.qwen3_tts.model import Qwen3TTS

WIDTHS = {"0b6": (1024, 3072), "1b7": (2048, 6144)}  # hidden, intermediate


def released_config(size: str) -> Qwen3TTSConfig:
    """The released CustomVoice model of a size, 0b6 or 1b7, with one speaker and one language."""
    hidden, inner = WIDTHS[size]
    shared = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "num_code_groups": 16}
    predictor = {**shared, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5, "vocab_size": 2048}
    talker = {
        **shared,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 28,
        "vocab_size": 3072,
        "text_vocab_size": 151936,
        "text_hidden_size": 2048,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_think_id": 2154,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "codec_language_id": {"english": 2050},
        "spk_id": {"ryan": 3061},
        "code_predictor_config": predictor,
    }
    return parse_qwen3_tts_config({"tts_model_type": "custom_voice", "tts_model_size": size, "talker_config": talker})


def random_qwen3_tts(
    config: Qwen3TTSConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Qwen3TTS:
    """Language models in eval mode with every weight drawn on `device` as `dtype`; the scale keeps activations finite.

    The same seed, device and dtype give the same weights.
    """
    with on_meta():
        model = Qwen3TTS(config)
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, meta in model.state_dict().items():
        is_scale = meta.ndim == 1 and not name.endswith("bias")
        std = 0.02 if meta.ndim == 1 else 1 / math.sqrt(meta.shape[1])
        weight = torch.empty(meta.shape, dtype=dtype, device=device)
        weights[name] = weight.normal_(1.0 if is_scale else 0.0, std, generator=generator)
    return assign_weights(model, weights, device, dtype)
