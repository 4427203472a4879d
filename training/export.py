"""Trained modules to a folder `assets/token2wav` in the released layout and formats.

The folder passes the strict loader unchanged. Matrices are stored as int8 or in half precision, and the rest in half
precision, which the loader converts, except weights that determine pitch and phase.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from assets.build_tiny_vocoder import WeightGraph, flow_yaml, tokenizer_graph
from assets.onnx_writer import write_onnx
from models.checkpoint.quantized import is_matrix, quantize
from models.quantize import write_packed_pt
from models.token2wav.flow.flow import Flow
from models.token2wav.hift.hift import Hift
from models.token2wav.load.onnx_container import DEQUANTIZE, OnnxNode
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
    *,
    int8: bool = False,
) -> None:
    """Write all files of the folder; files of an earlier export are replaced.

    Args:
        out: folder, made if missing.
        flow: tokens to mel.
        hift: mel to sound.
        speaker_encoder: makes speaker vectors.
        tokenizer: makes speech tokens.
        int8: store matrices as int8, except those of FULL_PRECISION and of the tokenizer, whose tokens would change.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / FLOW_YAML).write_text(flow_yaml(flow.config), encoding="utf-8")
    for file, tensors in ((FLOW, stored(flow)), (HIFT, weight_normed(stored(hift)))):
        if int8:
            write_packed_pt(out / file, halved(tensors), FULL_PRECISION)
        else:
            torch.save(halved(tensors), out / file)
    for file, (nodes, arrays) in (
        (SPEAKER_ENCODER, speaker_graph(speaker_encoder)),
        (SPEECH_TOKENIZER, tokenizer_graph(halved(stored(tokenizer)), tokenizer.config)),
    ):
        is_int8 = int8 and file != SPEECH_TOKENIZER
        write_onnx(out / file, *(int8_graph(nodes, arrays) if is_int8 else (nodes, arrays)))


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


def int8_graph(nodes: list[OnnxNode], arrays: dict[str, np.ndarray]) -> tuple[list[OnnxNode], dict[str, np.ndarray]]:
    """The graph with kernels as int8 values and a scale for each output, which a node before the reader multiplies."""
    found: list[OnnxNode] = []
    left = dict(arrays)
    for node in nodes:
        for name in node.inputs:
            if node.op_type != "Conv" or name not in left or not is_matrix(kernel := torch.from_numpy(arrays[name])):
                continue
            packed = quantize(kernel)
            del left[name]
            left |= {f"{name}_quantized": packed.values.numpy(), f"{name}_scale": packed.scale.numpy()}
            inputs = (f"{name}_quantized", f"{name}_scale")
            found.append(OnnxNode(DEQUANTIZE, f"{node.name}_dequantize", inputs, (name,), {}, {"axis": 0}))
        found.append(node)
    return found, left


def _identity_statistics(name: str, channels: int) -> dict[str, Tensor]:
    """Mean and variance with which a batch norm multiplies by its weight and adds its bias."""
    variance = torch.full((channels,), 1 - BATCH_NORM_EPS)
    return {f"{name}.running_mean": torch.zeros(channels), f"{name}.running_var": variance}
