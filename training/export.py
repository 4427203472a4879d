"""Trained modules to a folder `assets/token2wav` in the released layout and formats.

The folder passes the strict loader unchanged. Weights are stored in half precision, which the loader converts, except
those that determine pitch and phase.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from assets.build_tiny_vocoder import WeightGraph, flow_yaml, tokenizer_graph
from assets.onnx_writer import write_onnx
from models.token2wav.flow.flow import Flow
from models.token2wav.hift.hift import Hift
from models.token2wav.load.onnx_container import OnnxNode
from models.token2wav.load.parts import FLOW, FLOW_YAML, HIFT, SPEAKER_ENCODER, SPEECH_TOKENIZER
from models.token2wav.prompt.campplus import BATCH_NORM_EPS, Affine, CampPlus
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer

FULL_PRECISION = ("f0_predictor.", "m_source.", "conv_post.", "quantizer.")


def write_vocoder(
    out: Path,
    flow: Flow,
    hift: Hift,
    speaker_encoder: CampPlus,
    tokenizer: S3Tokenizer,
) -> None:
    """Write all files of the folder; files of an earlier export are replaced.

    Args:
        out: folder, made if missing.
        flow: tokens to mel.
        hift: mel to sound.
        speaker_encoder: makes speaker vectors.
        tokenizer: makes speech tokens.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / FLOW_YAML).write_text(flow_yaml(flow.config), encoding="utf-8")
    torch.save(halved(stored(flow)), out / FLOW)
    torch.save(halved(weight_normed(stored(hift))), out / HIFT)
    for file, (nodes, arrays) in (
        (SPEAKER_ENCODER, speaker_graph(speaker_encoder)),
        (SPEECH_TOKENIZER, tokenizer_graph(halved(stored(tokenizer)), tokenizer.config)),
    ):
        write_onnx(out / file, nodes, arrays)


def stored(module: nn.Module) -> dict[str, Tensor]:
    """The module's weights on the CPU in float32."""
    return {name: tensor.detach().cpu().float().contiguous() for name, tensor in module.state_dict().items()}


def halved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights in half precision, except those that determine pitch and phase."""
    return {name: tensor if name.startswith(FULL_PRECISION) else tensor.half() for name, tensor in tensors.items()}


def weight_normed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """HiFT's weights; those of layers with weight norm as norm (original0) and direction (original1)."""
    pairs = {}
    for name, tensor in tensors.items():
        if tensor.ndim < 3 or name.startswith("source_downs."):
            pairs[name] = tensor
            continue
        stem = f"{name.removesuffix('.weight')}.parametrizations.weight.original"
        pairs[f"{stem}0"] = tensor.double().flatten(1).norm(dim=1).view(-1, 1, 1).float()
        pairs[f"{stem}1"] = tensor
    return pairs


def speaker_graph(encoder: CampPlus) -> tuple[list[OnnxNode], dict[str, np.ndarray]]:
    """Nodes and arrays of a speaker encoder whose affine maps become batch norms."""
    graph = WeightGraph(4422)
    tensors = stored(encoder)
    for name, part in encoder.named_modules():
        if isinstance(part, nn.Conv1d | nn.Conv2d | Affine):
            kinds = [suffix for suffix in ("weight", "bias") if f"{name}.{suffix}" in tensors]
            arrays = {f"{name}.{suffix}": tensors[f"{name}.{suffix}"] for suffix in kinds}
            if isinstance(part, Affine):
                arrays |= _identity_statistics(name, len(part.weight))
            graph.add("BatchNormalization" if isinstance(part, Affine) else "Conv", name, arrays)
    return graph.nodes, graph.arrays


def _identity_statistics(name: str, channels: int) -> dict[str, Tensor]:
    """Mean and variance with which a batch norm multiplies by its weight and adds its bias."""
    variance = torch.full((channels,), 1 - BATCH_NORM_EPS)
    return {f"{name}.running_mean": torch.zeros(channels), f"{name}.running_var": variance}
