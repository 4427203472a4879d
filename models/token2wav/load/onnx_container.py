"""The weights and nodes of an ONNX file.

Contains the protobuf wire format and the ONNX fields that describe stored data. Does not contain the networks and
executes nothing. The `onnx` package would copy a 0.5 GB file into memory two to three times; here it stays mapped.
Field numbers: onnx.proto of the ONNX project.
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from models.errors import CheckpointError

# TensorProto.data_type -> NumPy type of the values in raw_data.
DTYPES = {1: "<f4", 3: "<i1", 7: "<i8", 10: "<f2", 11: "<f8"}
# Field number and NumPy type of values that are not in raw_data; None = varints. Halves are stored as integers.
TYPED_FIELDS = {1: (4, "<f4"), 3: (5, None), 7: (7, None), 10: (5, None), 11: (10, "<f8")}
DEQUANTIZE = "DequantizeLinear"  # the operation that multiplies stored int8 values by their scales

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class OnnxNode:
    """One operation: its type, its path in the exported module tree, its input and output values."""

    op_type: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    floats: dict[str, float] = field(default_factory=dict)  # attributes with a single float value
    integers: dict[str, int] = field(default_factory=dict)  # those with a single integer


@dataclass(frozen=True)
class OnnxGraph:
    """Nodes in graph order, and stored arrays by name.

    The arrays are read-only views of the mapped file, possibly unaligned. Arrays stored as int8 values and scales are
    here in float32 under the name of their product.
    """

    nodes: tuple[OnnxNode, ...]
    initializers: dict[str, np.ndarray]


class _Malformed(Exception):
    """Expected and actual content; converted to a CheckpointError with the file's name."""

    def __init__(self, expected: str, got: object):
        self.expected, self.got = expected, got
        super().__init__(f"expected {expected}, got {got}")


def read_onnx(path: str | Path) -> OnnxGraph:
    """Nodes and initializers of a file: float16/32/64, int64, or int8 with scales.

    Raises: CheckpointError if the file is missing or truncated, is not an ONNX file, or stores data in another file.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(str(path), expected="a readable ONNX file", got=error) from None
    try:
        graphs = [value for number, value in _fields(data) if number == 7]
        if len(graphs) != 1 or not isinstance(graphs[0], memoryview):
            raise _Malformed("one graph", len(graphs))
        return _read_graph(graphs[0])
    except _Malformed as error:
        expected = f"a complete ONNX file with {error.expected}"
        raise CheckpointError(str(path), expected=expected, got=error.got) from None


def _read_graph(data: memoryview) -> OnnxGraph:
    nodes: list[OnnxNode] = []
    initializers: dict[str, np.ndarray] = {}
    for number, value in _fields(data):
        if number == 1:
            nodes.append(_read_node(_part(value, "a node")))
        elif number == 5:
            name, array = _read_tensor(_part(value, "an initializer"))
            if name in initializers:
                raise _Malformed("each initializer once", f"{name} twice")
            initializers[name] = array
    if not nodes or not initializers:
        raise _Malformed("nodes and initializers", f"{len(nodes)} nodes and {len(initializers)} initializers")
    return _dequantized(nodes, initializers)


def _dequantized(nodes: list[OnnxNode], initializers: dict[str, np.ndarray]) -> OnnxGraph:
    """The graph with the products of int8 values and scales in place of these and of the nodes that multiply them."""
    left = []
    for node in nodes:
        values = initializers.get(node.inputs[0]) if node.inputs else None
        if node.op_type != DEQUANTIZE or values is None:
            left.append(node)
            continue
        output, scale = "".join(node.outputs), initializers.get("".join(node.inputs[1:]))
        axis = node.integers.get("axis", 1)
        if values.dtype != np.int8 or not 0 <= axis < values.ndim:
            raise _Malformed(f"int8 values with an axis {axis} for {output}", f"{values.dtype} {list(values.shape)}")
        expected = f"{values.shape[axis]} finite float32 scales for {output}"
        if scale is None or scale.dtype != np.float32 or scale.shape != (values.shape[axis],):
            got = "none" if scale is None else f"{scale.dtype} {list(scale.shape)}"
            raise _Malformed(expected, got)
        if not (np.isfinite(scale) & (scale >= 0)).all():
            raise _Malformed(expected, scale[~(np.isfinite(scale) & (scale >= 0))][0])
        del initializers[node.inputs[0]], initializers[node.inputs[1]]
        shape = [-1 if dim == axis else 1 for dim in range(values.ndim)]
        initializers[output] = values.astype(np.float32) * scale.reshape(shape)
    if plain := [name for name, array in initializers.items() if array.dtype == np.int8]:
        raise _Malformed(f"a node {DEQUANTIZE} for int8 values", f"{plain[0]} without one")
    return OnnxGraph(tuple(left), initializers)


def _read_node(data: memoryview) -> OnnxNode:
    texts: dict[int, list[str]] = {1: [], 2: [], 3: [], 4: []}
    floats: dict[str, float] = {}
    integers: dict[str, int] = {}
    for number, value in _fields(data):
        if number in texts:
            texts[number].append(_text(value))
        elif number == 5:
            attribute = dict(_fields(_part(value, "an attribute")))
            number_bytes, integer = attribute.get(2), attribute.get(3)
            if isinstance(number_bytes, memoryview):
                floats[_text(attribute.get(1, 0))] = _float(number_bytes)
            elif integer is not None:
                integers[_text(attribute.get(1, 0))] = _integers([integer])[0]
    name, op_type = "".join(texts[3][-1:]), "".join(texts[4][-1:])
    return OnnxNode(op_type, name, tuple(texts[1]), tuple(texts[2]), floats, integers)


def _read_tensor(data: memoryview) -> tuple[str, np.ndarray]:
    dims: list[int] = []
    data_type, name, external = 0, "", False
    raw: memoryview | None = None
    typed: dict[int, list[int | memoryview]] = {4: [], 5: [], 7: [], 10: []}
    for number, value in _fields(data):
        if number == 1:
            dims += _integers([value])
        elif number == 2 and isinstance(value, int):
            data_type = value
        elif number == 8:
            name = _text(value)
        elif number == 9:
            raw = _part(value, "raw data")
        elif number == 13 or (number == 14 and value != 0):
            external = True
        elif number in typed:
            typed[number].append(value)
    if external:
        raise _Malformed("all data inside", f"{name} in another file")
    if data_type not in DTYPES:
        raise _Malformed(f"tensors of types {sorted(DTYPES)}", f"{name} of type {data_type}")
    dtype = np.dtype(DTYPES[data_type])
    if raw is None:
        array = _typed_array(data_type, typed)
    elif len(raw) % dtype.itemsize:
        raise _Malformed(f"{name} in whole {dtype.name} values", f"{len(raw)} bytes")
    else:
        array = np.frombuffer(raw, dtype)
    if min(dims, default=0) < 0 or prod(dims) != array.size:
        raise _Malformed(f"{name} with {dims} values", array.size)
    return name, array.reshape(dims)


def _typed_array(data_type: int, typed: dict[int, list[int | memoryview]]) -> np.ndarray:
    number, layout = TYPED_FIELDS[data_type]
    values = typed[number]
    if layout is None:
        numbers = _integers(values)
        if data_type == 7:
            return np.array(numbers, "<i8")
        if data_type == 3:
            if min(numbers, default=0) < -128 or max(numbers, default=0) > 127:
                raise _Malformed("int8 values", f"{min(numbers)} to {max(numbers)}")
            return np.array(numbers, "<i1")
        if min(numbers, default=0) < 0 or max(numbers, default=0) > 0xFFFF:
            raise _Malformed("halves as 16-bit patterns", f"{min(numbers)} to {max(numbers)}")
        return np.array(numbers, "<u2").view("<f2")
    joined = b"".join(_part(value, "packed values") for value in values)
    if len(joined) % np.dtype(layout).itemsize:
        raise _Malformed("whole values", f"{len(joined)} bytes")
    return np.frombuffer(joined, layout)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Field numbers with their values: an integer for a varint, else bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise _Malformed("protobuf fields", f"wire type {wire}")
        if at + size > len(data):
            raise _Malformed(f"{size} bytes of field {number}", f"{len(data) - at}")
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise _Malformed("the end of a number", "the end of the data")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _Malformed("numbers of at most 10 bytes", "a longer one")


def _integers(values: list[int | memoryview]) -> list[int]:
    """Signed 64-bit values of a repeated field, packed or one by one."""
    numbers: list[int] = []
    for value in values:
        if isinstance(value, int):
            numbers.append(value)
            continue
        at = 0
        while at < len(value):
            number, at = _varint(value, at)
            numbers.append(number)
    # Negative numbers are stored as 64-bit two's complement; higher bits are not valid.
    numbers = [number & (2**64 - 1) for number in numbers]
    return [number - 2**64 if number >> 63 else number for number in numbers]


def _float(value: memoryview) -> float:
    if len(value) != 4:
        raise _Malformed("a float of 4 bytes", f"{len(value)} bytes")
    return float(np.frombuffer(value, "<f4")[0])


def _part(value: int | memoryview, what: str) -> memoryview:
    if isinstance(value, int):
        raise _Malformed(what, "a number")
    return value


def _text(value: int | memoryview) -> str:
    try:
        return str(_part(value, "a name"), "utf-8")
    except UnicodeDecodeError:
        raise _Malformed("names in UTF-8", "other bytes") from None
