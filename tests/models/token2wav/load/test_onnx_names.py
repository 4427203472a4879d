"""The mapping from the arrays of exported networks to weights, for any names by the exporter."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from assets.build_tiny_vocoder import SPEAKER_CONFIG, TOKENIZER_CONFIG, plain_weights, speaker_graph, tokenizer_graph
from models.errors import CheckpointError
from models.layers.weights import on_meta, tensor_shapes
from models.token2wav.load.onnx_container import OnnxGraph, OnnxNode, read_onnx
from models.token2wav.load.onnx_names import first_norm_eps, speaker_tensors, tokenizer_tensors
from models.token2wav.prompt.campplus import CampPlus, fold_batch_norms
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer

# Content of the released speaker encoder: number of arrays and types of nodes.
N_SPEAKER_ARRAYS, N_NORMS = 617, 56


def without_data(kind: type[nn.Module], config: object) -> nn.Module:
    with on_meta():
        return kind(config)


@pytest.fixture(scope="module")
def speaker() -> OnnxGraph:
    nodes, arrays = speaker_graph(without_data(CampPlus, SPEAKER_CONFIG))
    return OnnxGraph(tuple(nodes), arrays)


@pytest.fixture(scope="module")
def tokenizer() -> OnnxGraph:
    weights = plain_weights("tokenizer", without_data(S3Tokenizer, TOKENIZER_CONFIG))
    nodes, arrays = tokenizer_graph(weights, TOKENIZER_CONFIG)
    return OnnxGraph(tuple(nodes), arrays)


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(got[name], expected[name])]
    assert not different, f"expected equal tensors, got differences in {different}"


def without_paths(graph: OnnxGraph) -> OnnxGraph:
    return replace(graph, nodes=tuple(replace(node, name="") for node in graph.nodes))


def with_names_of(graph: OnnxGraph, names: dict[str, str]) -> OnnxGraph:
    nodes = tuple(replace(n, inputs=tuple(names.get(name, name) for name in n.inputs)) for n in graph.nodes)
    return OnnxGraph(nodes, {names.get(name, name): array for name, array in graph.initializers.items()})


def test_tiny_speaker_graph_has_the_structure_of_the_released_one(speaker: OnnxGraph) -> None:
    assert len(speaker.initializers) == N_SPEAKER_ARRAYS
    assert sum(node.op_type == "BatchNormalization" for node in speaker.nodes) == N_NORMS
    names = {node.name for node in speaker.nodes}
    assert "/head/layer1/layer1.0/shortcut/shortcut.0/Conv" in names
    assert "/xvector/block1/tdnnd1/nonlinear1/batchnorm/BatchNormalization" in names


def test_speaker_tensors_match_the_module(speaker: OnnxGraph) -> None:
    got = shapes(fold_batch_norms(speaker_tensors(speaker)))
    assert got == tensor_shapes(without_data(CampPlus, SPEAKER_CONFIG))


def test_anonymous_arrays_are_identified_by_path(speaker: OnnxGraph) -> None:
    got = speaker_tensors(speaker)
    by_node = {node.name: node for node in speaker.nodes}
    node = by_node["/xvector/block2/tdnnd7/linear1/Conv"]
    assert node.inputs[1].startswith("onnx::Conv_")
    for kind, source in zip(("weight", "bias"), node.inputs[1:], strict=True):
        expected = torch.from_numpy(speaker.initializers[source])
        assert torch.equal(got[f"xvector.block2.tdnnd7.linear1.{kind}"], expected)


def test_convolutions_without_paths_are_identified_by_order(speaker: OnnxGraph) -> None:
    same(speaker_tensors(without_paths(speaker)), speaker_tensors(speaker))


def test_names_take_precedence_over_order(speaker: OnnxGraph) -> None:
    mirrored = replace(speaker, nodes=speaker.nodes[::-1])
    same(speaker_tensors(mirrored), speaker_tensors(speaker))


def test_ignores_paths_as_names_of_arrays(speaker: OnnxGraph) -> None:
    names = {name: f"/head/layer1/layer1.0/{i}" for i, name in enumerate(speaker.initializers) if "onnx::" in name}
    renamed = with_names_of(speaker, names)
    same(speaker_tensors(replace(renamed, nodes=renamed.nodes[::-1])), speaker_tensors(speaker))


def test_unfused_export(speaker: OnnxGraph) -> None:
    """All norms in the file and each convolution under its own name: without the exporter's folding."""
    trained = speaker_tensors(speaker)
    scale = torch.linspace(0.5, 2.0, SPEAKER_CONFIG.front_channels)
    arrays, nodes = dict(speaker.initializers), []
    for node in speaker.nodes:
        if node.name != "/head/conv1/Conv":
            nodes.append(node)
            continue
        for source in node.inputs[1:]:
            del arrays[source]
        weight, bias = trained["head.conv1.weight"], trained["head.conv1.bias"]
        stored = {
            "head.conv1.weight": weight / scale.view(-1, 1, 1, 1),
            "head.bn1.weight": scale,
            "head.bn1.bias": bias + 3 * scale,
            "head.bn1.running_mean": torch.full_like(scale, 3.0),
            "head.bn1.running_var": torch.full_like(scale, 1 - 1e-5),
        }
        arrays |= {name: tensor.numpy() for name, tensor in stored.items()}
        names = tuple(stored)
        nodes.append(OnnxNode("Conv", "", ("input", names[0]), ("c",)))
        nodes.append(OnnxNode("BatchNormalization", "", ("c", *names[1:]), ("n",)))
    got = fold_batch_norms(speaker_tensors(OnnxGraph(tuple(nodes), arrays)))
    for name, expected in fold_batch_norms(trained).items():
        difference = (got[name] - expected).abs().max()
        assert difference < 1e-5, f"{name}: expected under 1e-5, got {difference}"


def test_tokenizer_tensors_match_the_module(tokenizer: OnnxGraph) -> None:
    assert shapes(tokenizer_tensors(tokenizer)) == tensor_shapes(without_data(S3Tokenizer, TOKENIZER_CONFIG))


def test_matrices_are_transposed_and_kernels_are_not(tokenizer: OnnxGraph) -> None:
    got = tokenizer_tensors(tokenizer)
    by_node = {node.name: node for node in tokenizer.nodes}
    query = tokenizer.initializers[by_node["/blocks.1/attn/query/MatMul"].inputs[1]]
    assert torch.equal(got["encoder.blocks.1.attn.query.weight"], torch.from_numpy(query).T)
    second = tokenizer.initializers[by_node["/blocks.0/mlp/mlp.2/MatMul"].inputs[1]]
    assert torch.equal(got["encoder.blocks.0.mlp.2.weight"], torch.from_numpy(second).T)
    memory = tokenizer.initializers["blocks.0.attn.fsmn_block.weight"]
    assert torch.equal(got["encoder.blocks.0.attn.fsmn_block.weight"], torch.from_numpy(memory))
    stem = tokenizer.initializers[by_node["/conv2/Conv"].inputs[1]]
    assert torch.equal(got["encoder.conv2.weight"], torch.from_numpy(stem))


def test_ignores_numbers_in_names(tokenizer: OnnxGraph) -> None:
    other = {name: f"onnx::X_{i}" for i, name in enumerate(tokenizer.initializers) if name.startswith("onnx::")}
    same(tokenizer_tensors(with_names_of(tokenizer, other)), tokenizer_tensors(tokenizer))


def test_omits_constants_of_the_arithmetic(tokenizer: OnnxGraph) -> None:
    constants = {"onnx::Reshape_1": np.array([1, -1, 64]), "onnx::Mul_2": np.full((1, 64), 0.5, np.float32)}
    nodes = (
        OnnxNode("Reshape", "/blocks.0/attn/Reshape", ("q", "onnx::Reshape_1"), ("r",)),
        OnnxNode("Mul", "/blocks.0/attn/Mul", ("r", "onnx::Mul_2"), ("m",)),
        OnnxNode("Add", "/blocks.0/attn/Add", ("m", "onnx::Mul_2"), ("a",)),
        OnnxNode("MatMul", "/quantizer/MatMul", ("a", "onnx::Mul_2"), ("b",)),
    )
    more = OnnxGraph(tokenizer.nodes + nodes, tokenizer.initializers | constants)
    same(tokenizer_tensors(more), tokenizer_tensors(tokenizer))


def test_refuses_two_arrays_for_one_weight(speaker: OnnxGraph, tokenizer: OnnxGraph) -> None:
    twin = replace(speaker.nodes[0], inputs=("x", *speaker.nodes[1].inputs[1:]))
    with pytest.raises(CheckpointError, match=r"one array for each weight.*head\.conv1\.weight as"):
        speaker_tensors(replace(speaker, nodes=(*speaker.nodes, twin)))
    query = next(node for node in tokenizer.nodes if node.name.endswith("query/MatMul"))
    key = next(node for node in tokenizer.nodes if node.name.endswith("key/MatMul"))
    with pytest.raises(CheckpointError, match=r"encoder\.blocks\.0\.attn\.query\.weight as"):
        tokenizer_tensors(replace(tokenizer, nodes=(*tokenizer.nodes, replace(query, inputs=key.inputs))))


def test_accepts_one_array_with_two_readers(speaker: OnnxGraph) -> None:
    same(speaker_tensors(replace(speaker, nodes=(*speaker.nodes, speaker.nodes[0]))), speaker_tensors(speaker))


def test_reads_the_first_norm_eps_from_the_file(tokenizer: OnnxGraph, tiny: Path) -> None:
    assert first_norm_eps(tokenizer) == TOKENIZER_CONFIG.first_norm_eps == 1e-6
    assert first_norm_eps(read_onnx(tiny / "assets/token2wav/speech_tokenizer_v2_25hz.onnx")) == 1e-6
    bare = replace(tokenizer, nodes=tuple(replace(node, floats={}) for node in tokenizer.nodes))
    assert first_norm_eps(bare) == 1e-5, "expected ONNX's default where the file leaves it out"
