"""Writes ONNX files of weights: nodes with the names of their arrays, and the arrays. Field numbers are of onnx.proto.

The files suit readers of weights only: without input shapes and node attributes, no runtime can execute them.
"""

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from models.token2wav.load.onnx_container import OnnxNode

DATA_TYPES = {"float32": 1, "int8": 3, "int64": 7, "float16": 10, "float64": 11}


def write_onnx(path: Path, nodes: Iterable[OnnxNode], initializers: dict[str, np.ndarray]) -> None:
    """Write one graph with these nodes in this order; data is raw and little-endian."""
    stored = b"".join(_field(5, tensor_bytes(name, array)) for name, array in initializers.items())
    graph = b"".join(_field(1, _node_bytes(node)) for node in nodes) + _field(2, b"weights") + stored
    opset = _field(8, _number(2, 17))
    path.write_bytes(_number(1, 8) + opset + _field(7, graph))


def tensor_bytes(name: str, array: np.ndarray) -> bytes:
    """A TensorProto with raw data."""
    dims = b"".join(_number(1, size) for size in array.shape)
    little_endian = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    data_type = _number(2, DATA_TYPES[array.dtype.name])
    return dims + data_type + _field(8, name.encode()) + _field(9, little_endian.tobytes())


def _node_bytes(node: OnnxNode) -> bytes:
    ends = b"".join(_field(1, name.encode()) for name in node.inputs)
    ends += b"".join(_field(2, name.encode()) for name in node.outputs)
    attributes = b"".join(_field(5, _float_bytes(name, value)) for name, value in node.floats.items())
    attributes += b"".join(_field(5, _integer_bytes(name, value)) for name, value in node.integers.items())
    return ends + _field(3, node.name.encode()) + _field(4, node.op_type.encode()) + attributes


def _float_bytes(name: str, value: float) -> bytes:
    """An AttributeProto of type FLOAT."""
    return _field(1, name.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", value) + _number(20, 1)


def _integer_bytes(name: str, value: int) -> bytes:
    """An AttributeProto of type INT."""
    return _field(1, name.encode()) + _number(3, value) + _number(20, 2)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])
