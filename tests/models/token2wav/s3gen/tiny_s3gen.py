"""A small S3Gen with random weights, and its tensors in the format of a checkpoint."""

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.layers.weights import assign_weights, on_meta
from models.token2wav.prompt.campplus import BATCH_NORM_EPS
from models.token2wav.s3gen.model import S3Gen, S3Voice
from models.token2wav.settings import (
    CampPlusConfig,
    EncoderConfig,
    HiftConfig,
    S3FlowConfig,
    S3GenConfig,
    S3TokenizerConfig,
    UNetConfig,
)

N_MELS, SPEAKER_DIM, VOCAB = 10, 6, 40
ALL_TOKENS = 6561  # of the tokenizer


def config(*, meanflow: bool = False, vocab: int = VOCAB) -> S3GenConfig:
    estimator = UNetConfig(
        in_channels=4 * N_MELS, out_channels=N_MELS, channels=8, heads=1, blocks=1, mid_blocks=1, meanflow=meanflow
    )
    encoder = EncoderConfig(width=16, heads=2, inner=24, n_layers=1, n_up_layers=2, lookahead=3)
    return S3GenConfig(
        flow=S3FlowConfig(
            vocab_size=vocab, n_mels=N_MELS, speaker_dim=SPEAKER_DIM, encoder=encoder, estimator=estimator
        ),
        vocoder=HiftConfig(n_mels=N_MELS, base_channels=8, f0_channels=4),
        speaker_encoder=CampPlusConfig(
            n_mels=16, embedding=SPEAKER_DIM, growth=2, bottleneck=2, channels=8, front_channels=4
        ),
        tokenizer=S3TokenizerConfig(n_mels=16, width=64, n_layers=1),
    )


def random_tensors(settings: S3GenConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights under the module's names, large enough that each of them affects the output."""
    with on_meta():
        shapes = S3Gen(settings).state_dict()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, meta in shapes.items():
        narrow = meta.ndim == 1
        tensor = torch.randn(meta.shape, generator=generator)
        tensor *= 0.1 if narrow else 1 / math.sqrt(math.prod(meta.shape[1:]))
        tensors[name] = tensor + 1 if narrow and not name.endswith("bias") else tensor
    # A pitch of 200 Hz and a sound below the limit, neither silent nor clipped.
    tensors["mel2wav.f0_predictor.classifier.bias"].fill_(200.0)
    tensors["mel2wav.conv_post.weight"] *= 0.1
    return tensors


def make(*, meanflow: bool = False, seed: int = 0, vocab: int = VOCAB) -> S3Gen:
    settings = config(meanflow=meanflow, vocab=vocab)
    with on_meta():
        model = S3Gen(settings)
    return assign_weights(model, random_tensors(settings, seed), "cpu", torch.float32)


def as_trained(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights as in a checkpoint: with a weight norm, a batch norm, a counter and a stored constant."""
    stored = dict(tensors)
    for name, gain in (("mel2wav.conv_pre", "parametrizations.weight.original0"), ("mel2wav.ups.1", "weight_g")):
        direction = gain.replace("original0", "original1").replace("_g", "_v")
        weight = stored.pop(f"{name}.weight")
        stored[f"{name}.{gain}"] = weight.flatten(1).norm(dim=1).view(-1, *[1] * (weight.ndim - 1))
        stored[f"{name}.{direction}"] = 3 * weight
    norm = "speaker_encoder.head.bn1"
    bias = stored.pop("speaker_encoder.head.conv1.bias")
    stored[f"{norm}.weight"], stored[f"{norm}.bias"] = torch.ones_like(bias), bias
    stored[f"{norm}.running_mean"] = torch.zeros_like(bias)
    stored[f"{norm}.running_var"] = torch.full_like(bias, 1 - BATCH_NORM_EPS)
    stored[f"{norm}.num_batches_tracked"] = torch.tensor(7)
    stored["tokenizer.window"] = torch.ones(400)
    return stored


def write(folder: Path) -> Path:
    """A checkpoint file of a model that speaks all tokens."""
    path = folder / "s3gen.safetensors"
    save_file(as_trained(random_tensors(config(vocab=ALL_TOKENS))), path)
    return path


def voice(n_speech_tokens: int, n_frames: int, seed: int = 0) -> S3Voice:
    generator = torch.Generator().manual_seed(seed)
    return S3Voice(
        torch.randint(VOCAB, (n_speech_tokens,), generator=generator),
        torch.randn(n_frames, N_MELS, generator=generator),
        torch.randn(SPEAKER_DIM, generator=generator),
    )
