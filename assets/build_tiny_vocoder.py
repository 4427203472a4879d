"""Builds `assets/tiny/assets/token2wav`: a vocoder folder in the released layout and formats with random weights.

Run `python -m assets.build_tiny_vocoder` from the root. The values depend only on this file, `draw`, `random_weights`
and the module trees. The vocoder's output is not speech, but sound whose pitch follows the speech tokens.

The ONNX files have the node and array names and the order of the released ones, without nodes that have no weights.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from assets.draw import draw
from assets.onnx_writer import write_onnx
from models.layers.weights import tensor_shapes
from models.token2wav.flow.flow import Flow
from models.token2wav.hift.hift import Hift
from models.token2wav.load.flow_yaml import TAGS
from models.token2wav.load.onnx_container import OnnxNode
from models.token2wav.load.onnx_names import PROJECTION, PROJECTION_BIAS
from models.token2wav.load.parts import FLOW, FLOW_YAML, HIFT, SPEAKER_ENCODER, SPEECH_TOKENIZER
from models.token2wav.load.random_weights import mean_and_std
from models.token2wav.prompt.campplus import Affine, CampPlus
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer
from models.token2wav.settings import (
    CampPlusConfig,
    DiTConfig,
    EncoderConfig,
    FlowConfig,
    HiftConfig,
    S3TokenizerConfig,
)

HERE = Path(__file__).parent
SPEAKER_DIM = 24

FLOW_CONFIG = FlowConfig(
    speaker_dim=SPEAKER_DIM,
    encoder=EncoderConfig(width=32, heads=4, inner=64, n_layers=2, n_up_layers=2),
    estimator=DiTConfig(width=32, heads=3, head_dim=16, depth=2, mlp_ratio=2.0),
)
HIFT_CONFIG = HiftConfig(base_channels=32, f0_channels=16)
SPEAKER_CONFIG = CampPlusConfig(embedding=SPEAKER_DIM, growth=4, bottleneck=2, channels=8, front_channels=4)
TOKENIZER_CONFIG = S3TokenizerConfig(width=64, n_layers=2, first_norm_eps=1e-6)

# Mean and standard deviation where they differ from `random_weights.mean_and_std`.
SPREAD = {
    "f0_predictor.classifier.weight": (0.0, 2.5),
    "f0_predictor.classifier.bias": (235.0, 0.0),
}


def main(out: Path) -> None:
    """Write all files; files of an earlier build are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    (out / FLOW_YAML).write_text(flow_yaml(FLOW_CONFIG), encoding="utf-8")
    torch.save(plain_weights("flow", on_meta(Flow, FLOW_CONFIG)), out / FLOW)
    torch.save(hift_weights(on_meta(Hift, HIFT_CONFIG)), out / HIFT)
    write_onnx(out / SPEAKER_ENCODER, *speaker_graph(on_meta(CampPlus, SPEAKER_CONFIG)))
    tokenizer = plain_weights("tokenizer", on_meta(S3Tokenizer, TOKENIZER_CONFIG))
    write_onnx(out / SPEECH_TOKENIZER, *tokenizer_graph(tokenizer, TOKENIZER_CONFIG))


def flow_yaml(config: FlowConfig) -> str:
    """`flow.yaml` with every key of the released one, and the solver steps if they are others."""
    encoder, estimator = config.encoder, config.estimator
    usual = FlowConfig.model_fields["n_timesteps"].default
    steps = "" if config.n_timesteps == usual else f"        n_timesteps: {config.n_timesteps}\n"
    return f"""\
flow: {TAGS["flow"]}
    input_size: {encoder.width}
    output_size: {config.n_mels}
    spk_embed_dim: {config.speaker_dim}
    output_type: 'mel'
    vocab_size: {config.vocab_size}
    encoder: {TAGS["flow.encoder"]}
        input_size: {encoder.width}
        output_size: {encoder.width}
        input_layer: 'linear'
        pre_lookahead_len: {encoder.lookahead}
        num_blocks: {encoder.n_layers}
        num_up_blocks: {encoder.n_up_layers}
        up_stride: 2
        up_scale_factor: 2
        attention_heads: {encoder.heads}
        pos_enc_layer_type: 'rel_pos_espnet'
        selfattention_layer_type: 'rel_selfattn'
        key_bias: true
        linear_units: {encoder.inner}
        dropout_rate: 0.1
        positional_dropout_rate: 0.1
        attention_dropout_rate: 0.1
        normalize_before: true
    decoder: {TAGS["flow.decoder"]}
        inference_cfg_rate: {config.cfg_rate}
{steps}        estimator: {TAGS["flow.decoder.estimator"]}
            in_channels: {4 * config.n_mels}
            out_channels: {config.n_mels}
            mlp_ratio: {estimator.mlp_ratio}
            depth: {estimator.depth}
            num_heads: {estimator.heads}
            head_dim: {estimator.head_dim}
            hidden_size: {estimator.width}
"""


def plain_weights(part: str, module: nn.Module) -> dict[str, Tensor]:
    return {name: _draw(part, name, shape) for name, shape in tensor_shapes(module).items()}


def hift_weights(module: nn.Module) -> dict[str, Tensor]:
    """HiFT's weights; those of weight-normed layers as norm (original0) and direction (original1)."""
    tensors = {}
    for name, shape in tensor_shapes(module).items():
        if len(shape) < 3 or name.startswith("source_downs."):
            tensors[name] = _draw("hift", name, shape)
            continue
        stem = f"{name.removesuffix('.weight')}.parametrizations.weight.original"
        length = mean_and_std(name, shape)[1] * math.sqrt(math.prod(shape[1:]))
        tensors[f"{stem}0"] = draw(f"hift.{stem}0", (shape[0], 1, 1), 0.1 * length, length)
        tensors[f"{stem}1"] = draw(f"hift.{stem}1", shape, 1.0)
    return tensors


class WeightGraph:
    """A chain of nodes, and their arrays."""

    def __init__(self, first_number: int):
        self.number = first_number
        self.nodes: list[OnnxNode] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.last = "input"

    def add(self, op_type: str, module: str, stored: dict[str, Tensor], **floats: float) -> None:
        """Append a node of a module; inputs are the previous output and the arrays, which come first in sums."""
        name = f"/{'/'.join(_place(module))}/{op_type}"
        inputs = (*stored, self.last) if op_type == "Add" else (self.last, *stored)
        if op_type == "BatchNormalization" and len(stored) == 2:
            inputs = (self.last, f"{name}_weight_constant", f"{name}_bias_constant", *stored)
        self.arrays |= {key: tensor.numpy() for key, tensor in stored.items()}
        self.last = f"{name}_output_0"
        self.nodes.append(OnnxNode(op_type, name, inputs, (self.last,), floats))

    def anonymous(self, op_type: str) -> str:
        """The name that the exporter gives to the next computed array."""
        self.number += 1
        return f"onnx::{op_type}_{self.number}"


def speaker_graph(module: nn.Module) -> tuple[list[OnnxNode], dict[str, np.ndarray]]:
    """Nodes and arrays of the speaker encoder. Norms are folded into convolutions, whose arrays are unnamed."""
    graph = WeightGraph(4422)
    for name, part in module.named_modules():
        if isinstance(part, nn.Conv1d | nn.Conv2d):
            shape = tuple(part.weight.shape)
            weight = _draw("speaker", f"{name}.weight", shape)
            if name == "xvector.dense.linear":
                graph.add("Conv", name, {f"{name}.weight": weight})
                norm = "xvector.dense.nonlinear.batchnorm"
                graph.add("BatchNormalization", norm, _norm(norm, shape[0], names=("running_mean", "running_var")))
                continue
            stored = {f"{name}.weight": weight}
            if part.bias is not None:
                stored[f"{name}.bias"] = _draw("speaker", f"{name}.bias", shape[:1])
                if ".cam_layer." not in name:
                    stored = {graph.anonymous("Conv"): tensor for tensor in stored.values()}
            graph.add("Conv", name, stored)
        elif isinstance(part, Affine):
            graph.add("BatchNormalization", name, _norm(name, len(part.weight)))
    return graph.nodes, graph.arrays


def tokenizer_graph(
    tensors: dict[str, Tensor], config: S3TokenizerConfig
) -> tuple[list[OnnxNode], dict[str, np.ndarray]]:
    """Nodes and arrays of the tokenizer. Matrices are transposed, biases separate nodes, and few arrays named."""
    graph = WeightGraph(2215)

    def linear(name: str, place: str) -> None:
        bias = tensors.get(f"{name}.bias")
        bias_name = graph.anonymous("Add") if bias is not None else ""
        graph.add("MatMul", place, {graph.anonymous("MatMul"): tensors[f"{name}.weight"].T.contiguous()})
        if bias is not None:
            graph.add("Add", place, {bias_name: bias})

    def norm(name: str, place: str, epsilon: float) -> None:
        stored = {graph.anonymous("LayerNormalization"): tensors[f"{name}.{kind}"] for kind in ("weight", "bias")}
        graph.add("LayerNormalization", place, stored, epsilon=epsilon)

    for conv in ("conv1", "conv2"):
        stored = {graph.anonymous("Conv"): tensors[f"encoder.{conv}.{kind}"] for kind in ("weight", "bias")}
        graph.add("Conv", conv, stored)
    for i in range(config.n_layers):
        block, place = f"encoder.blocks.{i}", f"blocks.{i}"
        norm(f"{block}.attn_ln", f"{place}.attn_ln", config.first_norm_eps)
        for part in ("query", "key", "value"):
            linear(f"{block}.attn.{part}", f"{place}.attn.{part}")
        memory = f"{place}.attn.fsmn_block"
        graph.add("Conv", memory, {f"{memory}.weight": tensors[f"{block}.attn.fsmn_block.weight"]})
        linear(f"{block}.attn.out", f"{place}.attn.out")
        norm(f"{block}.mlp_ln", f"{place}.mlp_ln", 1e-5)
        for part in ("0", "2"):
            linear(f"{block}.mlp.{part}", f"{place}.mlp.{part}")
    place = "quantizer.project_in"
    graph.add("MatMul", place, {graph.anonymous("MatMul"): tensors[f"{PROJECTION}.weight"].T.contiguous()})
    graph.add("Add", place, {PROJECTION_BIAS: tensors[f"{PROJECTION}.bias"]})
    return graph.nodes, graph.arrays


def _norm(
    name: str, channels: int, names: tuple[str, ...] = ("weight", "bias", "running_mean", "running_var")
) -> dict[str, Tensor]:
    means = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}
    return {f"{name}.{kind}": draw(f"speaker.{name}.{kind}", (channels,), 0.2, means[kind]) for kind in names}


def _draw(part: str, name: str, shape: tuple[int, ...]) -> Tensor:
    mean, std = SPREAD.get(name) or mean_and_std(name, shape)
    return draw(f"{part}.{name}", shape, std, mean)


def _place(module: str) -> list[str]:
    """Scope of a module in an export: a child of a list repeats the name of the list."""
    steps: list[str] = []
    for step in module.split("."):
        if step.isdigit() and steps[-1] != "blocks":
            steps.append(f"{steps[-1]}.{step}")
        elif step.isdigit():
            steps[-1] += f".{step}"
        else:
            steps.append(step)
    return steps


def on_meta(kind: type[nn.Module], config: object) -> nn.Module:
    with torch.device("meta"):
        return kind(config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "tiny" / "assets" / "token2wav")
    main(parser.parse_args().out)
