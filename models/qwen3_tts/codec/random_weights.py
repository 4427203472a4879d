"""Codec with random weights, created on the target device: for measurements at the released sizes.

Contains the scale of each weight, chosen so that the sound is neither silent nor clipped.
"""

import math

import torch
from torch import Tensor

from models.layers.weights import Tree, assign_weights, on_meta, tensor_shapes
from models.qwen3_tts.codec.config import (
    SpeakerEncoderConfig,
    SpeechDecoderConfig,
    SpeechEncoderConfig,
    SpeechTokenizerConfig,
)
from models.qwen3_tts.codec.load import SpeechTokenizer, weight_dtype
from models.qwen3_tts.codec.speaker_encoder import SpeakerEncoder

RELEASED_TOKENIZER = SpeechTokenizerConfig(
    encoder_config=SpeechEncoderConfig(
        num_filters=64,
        hidden_size=512,
        intermediate_size=2048,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        num_hidden_layers=8,
        num_quantizers=32,
        codebook_size=2048,
        codebook_dim=256,
    ),
    decoder_config=SpeechDecoderConfig(
        latent_dim=1024,
        codebook_dim=512,
        codebook_size=2048,
        decoder_dim=1536,
        hidden_size=512,
        intermediate_size=1024,
        head_dim=64,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_hidden_layers=8,
    ),
)
RELEASED_SPEAKER = SpeakerEncoderConfig(enc_dim=1024)


def random_codec(
    config: SpeechTokenizerConfig = RELEASED_TOKENIZER,
    speaker: SpeakerEncoderConfig = RELEASED_SPEAKER,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[SpeechTokenizer, SpeakerEncoder]:
    """Speech tokenizer and speaker encoder of these sizes. Equal seed, device and type give equal weights."""
    with on_meta():
        parts = SpeechTokenizer(config), SpeakerEncoder(speaker)
    generator = torch.Generator(device).manual_seed(seed)
    return _filled(parts[0], generator, device, dtype), _filled(parts[1], generator, device, dtype)


def _filled(tree: Tree, generator: torch.Generator, device: torch.device | str, dtype: torch.dtype) -> Tree:
    """The tree from the meta device with random weights."""

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        mean, std = mean_and_std(name, shape)
        weight = torch.empty(shape, dtype=weight_dtype(name, dtype), device=device)
        return weight.normal_(mean, std, generator=generator)

    tensors = {name: drawn(name, shape) for name, shape in tensor_shapes(tree).items()}
    return assign_weights(tree, tensors, device, dtype)


def mean_and_std(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a weight."""
    match name.split("."):
        case [*_, "cluster_usage"]:
            return 1.0, 0.1
        case [*_, "embedding_sum" | "embed_sum"]:
            return 0.0, 1.0
        case [*_, "alpha" | "beta"]:
            return 0.0, 0.1
        case [*_, "scale" | "gamma"]:
            return 0.3, 0.05
        case ["decoder", "decoder", _, "block", "1", "conv", "weight"]:
            return 0.0, 1 / math.sqrt(2 * shape[0])  # of a transposed convolution, whose columns read two taps
        case ["decoder", "upsample", _, "0", "conv", "weight"]:
            return 0.0, 1 / math.sqrt(shape[0])
        case ["decoder", "decoder", _, "block", _, "conv2", "conv", "weight"]:
            return 0.0, 0.3 / math.sqrt(shape[1])  # added to the residual stream
        case ["decoder", "decoder", "6", "conv", "weight"]:
            return 0.0, 0.05 / math.sqrt(math.prod(shape[1:]))
    if len(shape) == 1:
        return (0.0, 0.1) if name.endswith("bias") else (1.0, 0.1)
    return 0.0, 1 / math.sqrt(math.prod(shape[1:]))
