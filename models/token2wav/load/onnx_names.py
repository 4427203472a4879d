"""The mapping from the arrays of an ONNX file to the weights of the networks.

Contains the naming of the two released exports: some arrays have their module's name, others are named after the
operation and a number (`onnx::Conv_2216`). For the latter, the path of the node that reads them gives the module
(`/head/layer1/layer1.0/conv1/Conv`). Does not check names or shapes against the networks; the loader does.
"""

import numpy as np
import torch
from torch import Tensor

from models.errors import CheckpointError
from models.token2wav.load.onnx_container import OnnxGraph, OnnxNode
from models.token2wav.prompt.campplus import conv_order

PROJECTION = "quantizer._codebook.project_down"
PROJECTION_BIAS = "quantizer.project_in.bias"  # the array that identifies the projection among other arithmetic

_NORM_INPUTS = ("weight", "bias", "running_mean", "running_var")


def speaker_tensors(graph: OnnxGraph) -> dict[str, Tensor]:
    """The speaker encoder's weights under their names in training; batch norms are folded where the file folds them.

    A convolution is identified by the name of its weight, else by the path of its node, else by its position in the
    execution order. Float arrays that belong to no convolution or norm keep their names, so the loader reports them.
    Raises: CheckpointError if two arrays map to one name.
    """
    order = conv_order()
    known = set(order)
    names = _Names(graph)
    turn = 0
    for node in graph.nodes:
        if node.op_type == "Conv":
            module = _module(node, 1)
            if module not in known and turn < len(order):
                module = order[turn]
            names.take(node, {1: f"{module}.weight", 2: f"{module}.bias"})
            turn += 1
        elif node.op_type == "BatchNormalization":
            # A norm without weights has constants as inputs, which are not stored arrays.
            module = _module(node, 3)
            names.take(node, {i: f"{module}.{name}" for i, name in enumerate(_NORM_INPUTS, start=1)})
    taken = set(names.sources.values())
    left = {name: array for name, array in graph.initializers.items() if name not in taken and array.dtype.kind == "f"}
    return {name: _tensor(array) for name, array in left.items()} | names.tensors("speaker encoder")


def tokenizer_tensors(graph: OnnxGraph) -> dict[str, Tensor]:
    """The speech tokenizer's weights under the names of the public PyTorch port.

    Arrays that only reshape, index or scale are constants, not weights, and are omitted.
    Raises: CheckpointError if two arrays map to one name.
    """
    names = _Names(graph)
    makers = {output: node for node in graph.nodes for output in node.outputs}
    products: set[str] = set()  # modules that multiply by a stored matrix; an array that they add is a bias
    stems = 0
    for node in graph.nodes:
        module = _module(node)
        in_block = module.startswith("blocks.")
        module = f"encoder.{module}"
        if node.op_type == "Conv" and in_block:
            names.take(node, {1: f"{module}.weight", 2: f"{module}.bias"})
        elif node.op_type == "Conv":
            stems += 1
            names.take(node, {1: f"encoder.conv{stems}.weight", 2: f"encoder.conv{stems}.bias"})
        elif node.op_type == "LayerNormalization":
            names.take(node, {1: f"{module}.weight", 2: f"{module}.bias"})
        elif node.op_type == "MatMul" and in_block:
            if names.take(node, {1: f"{module}.weight"}, transposed=True):
                products.add(module)
        elif node.op_type == "Add" and PROJECTION_BIAS in node.inputs:
            names.take(node, {0: f"{PROJECTION}.bias", 1: f"{PROJECTION}.bias"})
            for maker in (makers[name] for name in node.inputs if name in makers):
                names.take(maker, {1: f"{PROJECTION}.weight"}, transposed=True)
        elif node.op_type == "Add" and module in products:
            names.take(node, {0: f"{module}.bias", 1: f"{module}.bias"})
    return names.tensors("speech tokenizer")


def first_norm_eps(graph: OnnxGraph) -> float:
    """The epsilon of the speech tokenizer's first norm, which differs between public ports."""
    for node in graph.nodes:
        if node.op_type == "LayerNormalization" and _module(node).endswith("blocks.0.attn_ln"):
            return float(f"{node.floats.get('epsilon', 1e-5):.6g}")  # the decimal value before rounding to float32
    return 1e-5


class _Names:
    """Arrays of a graph under the names of the weights."""

    def __init__(self, graph: OnnxGraph):
        self.graph = graph
        self.found: dict[str, Tensor] = {}
        self.sources: dict[str, str] = {}
        self.clashes: list[str] = []

    def take(self, node: OnnxNode, wanted: dict[int, str], *, transposed: bool = False) -> bool:
        """Assign names to those inputs of a node that are stored arrays.

        Args:
            node: the reader of the arrays.
            wanted: input position -> name.
            transposed: the file stores matrices transposed.
        Returns: whether any of the inputs is a stored array.
        """
        any_stored = False
        for position, name in wanted.items():
            source = node.inputs[position] if position < len(node.inputs) else ""
            array = self.graph.initializers.get(source)
            if array is None:
                continue
            any_stored = True
            if self.sources.get(name) == source:
                continue
            if name in self.sources:
                self.clashes.append(f"{name} as {self.sources[name]} and {source}")
                continue
            self.sources[name] = source
            self.found[name] = _tensor(array.T if transposed and array.ndim == 2 else array)
        return any_stored

    def tensors(self, what: str) -> dict[str, Tensor]:
        if self.clashes:
            raise CheckpointError(what, expected="one array for each weight", got=", ".join(self.clashes))
        return self.found


def _tensor(array: np.ndarray) -> Tensor:
    """A float32 copy, because the array is a read-only view of the file, possibly unaligned."""
    return torch.from_numpy(np.array(array, np.float32, order="C"))


def _module(node: OnnxNode, named_input: int | None = None) -> str:
    """Name of the module of a node: from the name of its input `named_input` if that has one, else from its path."""
    if named_input is not None and named_input < len(node.inputs):
        source = node.inputs[named_input]
        if "." in source and "/" not in source:
            return source.rpartition(".")[0]
    place: list[str] = []
    for step in node.name.strip("/").split("/")[:-1]:
        if place and step.startswith(f"{place[-1]}."):
            place[-1] = step  # the path repeats a list's name before its children: layer1/layer1.0
        else:
            place.append(step)
    return ".".join(place)
