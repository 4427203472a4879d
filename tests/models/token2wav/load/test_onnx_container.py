"""ONNX files: arrays and nodes are read back unchanged, and damage raises CheckpointError only."""

import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assets.onnx_writer import tensor_bytes, write_onnx
from models.errors import CheckpointError
from models.token2wav.load.onnx_container import OnnxGraph, OnnxNode, read_onnx

NODES = (
    OnnxNode("Conv", "/head/conv1/Conv", ("x", "a"), ("y",)),
    OnnxNode("LayerNormalization", "/ln/LayerNormalization", ("y", "b"), ("z",), {"epsilon": 0.5}),
)


def read_back(folder: Path, arrays: dict[str, np.ndarray]) -> OnnxGraph:
    write_onnx(folder / "a.onnx", NODES, arrays)
    return read_onnx(folder / "a.onnx")


def varint(value: int) -> bytes:
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def field(number: int, data: bytes | int) -> bytes:
    if isinstance(data, int):
        return varint(number << 3) + varint(data)
    return varint(number << 3 | 2) + varint(len(data)) + data


def model(*tensors: bytes) -> bytes:
    """The bytes of a file with one node and these TensorProtos."""
    return field(7, field(1, field(4, b"Conv")) + b"".join(field(5, tensor) for tensor in tensors))


def error_of(folder: Path, data: bytes) -> CheckpointError:
    path = folder / "bad.onnx"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_onnx(path)
    assert str(path) in str(caught.value)
    return caught.value


def single(folder: Path, tensor: bytes) -> np.ndarray:
    path = folder / "one.onnx"
    path.write_bytes(model(tensor))
    (array,) = read_onnx(path).initializers.values()
    return array


@given(
    kind=st.sampled_from(["float32", "float16", "float64", "int64"]),
    shape=st.lists(st.integers(0, 4), max_size=4),
    name=st.text(min_size=1, max_size=40).filter(lambda s: not any(0xD800 <= ord(c) < 0xE000 for c in s)),
)
def test_reads_arrays_back(tmp_path_factory: pytest.TempPathFactory, kind: str, shape: list[int], name: str) -> None:
    values = np.random.default_rng(len(name)).integers(-1000, 1000, shape).astype(kind)
    other = np.arange(3, dtype=np.float32)
    graph = read_back(tmp_path_factory.mktemp("o"), {name: values, name + "'": other})
    assert list(graph.initializers) == [name, name + "'"]
    got = graph.initializers[name]
    assert got.dtype == values.dtype
    assert got.shape == values.shape
    assert np.array_equal(got, values), f"expected {values}, got {got}"


def quantized(folder: Path, axis: int, *names: str, **changes: np.ndarray) -> OnnxGraph:
    """A file with int8 values [2, 3] and scales, whose product is the weight `a`."""
    arrays = {"values": np.array([[1, -2, 3], [127, -127, 0]], np.int8), "scale": np.array([0.5, 2.0], np.float32)}
    inputs = names or ("values", "scale")
    product = OnnxNode("DequantizeLinear", "/head/DequantizeLinear", inputs, ("a",), {}, {"axis": axis})
    write_onnx(folder / "q.onnx", [product, *NODES], arrays | changes)
    return read_onnx(folder / "q.onnx")


def test_int8_values_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    graph = quantized(tmp_path, 0)
    assert graph.nodes == NODES and list(graph.initializers) == ["a"]
    assert graph.initializers["a"].tolist() == [[0.5, -1, 1.5], [254, -254, 0]]
    scale = np.array([1, 10, 100], np.float32)
    assert quantized(tmp_path, 1, scale=scale).initializers["a"].tolist() == [[1, -20, 300], [127, -1270, 0]]


@pytest.mark.parametrize(
    ("axis", "names", "changes", "expected"),
    [
        (1, (), {}, "3 finite float32 scales for a, got float32 [2]"),
        (0, (), {"scale": np.ones(2, np.float16)}, "2 finite float32 scales for a, got float16 [2]"),
        (0, (), {"scale": np.array([1, np.nan], np.float32)}, "2 finite float32 scales for a, got nan"),
        (0, (), {"scale": np.array([1, -1], np.float32)}, "2 finite float32 scales for a, got -1.0"),
        (0, ("values",), {}, "2 finite float32 scales for a, got none"),
        (0, ("values", "scale", "zero"), {"zero": np.zeros(2, np.int8)}, "2 finite float32 scales for a, got none"),
        (2, (), {}, "int8 values with an axis 2 for a, got int8 [2, 3]"),
        (0, (), {"values": np.ones((2, 3), np.float32)}, "int8 values with an axis 0 for a, got float32 [2, 3]"),
        (0, (), {"more": np.ones(2, np.int8)}, "a node DequantizeLinear for int8 values, got more without one"),
    ],
)
def test_int8_values_without_fitting_scales_are_refused(
    tmp_path: Path, axis: int, names: tuple[str, ...], changes: dict[str, np.ndarray], expected: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        quantized(tmp_path, axis, *names, **changes)
    assert expected in str(caught.value)


def test_reads_nodes_in_order(tmp_path: Path) -> None:
    assert read_back(tmp_path, {"a": np.zeros(1, np.float32)}).nodes == NODES


def test_data_is_not_copied(tmp_path: Path) -> None:
    got = read_back(tmp_path, {"a": np.zeros(1000, np.float32)}).initializers["a"]
    assert not got.flags.owndata
    assert not got.flags.writeable


@pytest.mark.parametrize("packed", [True, False])
def test_reads_typed_data(tmp_path: Path, packed: bool) -> None:
    def typed(data_type: int, number: int, parts: list[bytes], wire: int) -> bytes:
        data = field(number, b"".join(parts)) if packed else b"".join(varint(number << 3 | wire) + p for p in parts)
        return field(1, len(parts)) + field(2, data_type) + field(8, b"t") + data

    floats = [1.5, -2.25, 3e30]
    cases = (
        (typed(1, 4, [struct.pack("<f", x) for x in floats], 5), np.array(floats, np.float32)),
        (typed(11, 10, [struct.pack("<d", x) for x in floats], 1), np.array(floats)),
        (typed(7, 7, [varint(x % 2**64) for x in (5, -3, -(2**63))], 0), np.array([5, -3, -(2**63)])),
        (typed(10, 5, [varint(x) for x in (0x3C00, 0xC000)], 0), np.array([1, -2], np.float16)),
    )
    for tensor, expected in cases:
        got = single(tmp_path, tensor)
        assert got.dtype == expected.dtype
        assert np.array_equal(got, expected), f"expected {expected}, got {got}"


def test_reads_packed_dims(tmp_path: Path) -> None:
    raw = field(2, 1) + field(8, b"t") + field(9, bytes(24))
    assert single(tmp_path, field(1, bytes([2, 3])) + raw).shape == (2, 3)
    assert single(tmp_path, field(1, 3) + field(1, 2) + raw).shape == (3, 2)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (field(1, 2) + field(2, 1) + field(8, b"t") + field(9, bytes(4)), "t with [2] values"),
        (field(1, 2**64 - 1) + field(2, 1) + field(8, b"t") + field(9, bytes(4)), "t with [-1] values"),
        (field(1, 2**64 - 1) * 2 + field(2, 1) + field(8, b"t") + field(9, bytes(4)), "t with [-1, -1] values"),
        (field(1, 1) + field(2, 1) + field(8, b"t") + field(9, bytes(3)), "whole float32 values"),
        (field(1, 1) + field(2, 1) + field(8, b"t") + field(4, bytes(3)), "whole values"),
        (field(1, 1) + field(2, 6) + field(8, b"t") + field(9, bytes(4)), "tensors of types"),
        (field(1, 1) + field(8, b"t") + field(9, bytes(4)), "tensors of types"),
        (field(1, 1) + field(2, 1) + field(8, b"t") + field(13, b"\n\x08location"), "all data inside"),
        (field(1, 1) + field(2, 1) + field(8, b"t") + field(14, 1) + field(9, bytes(4)), "all data inside"),
        (field(1, 1) + field(2, 10) + field(8, b"t") + field(5, 70_000), "16-bit patterns"),
        (field(1, 1) + field(2, 1) + field(8, b"\xff") + field(9, bytes(4)), "UTF-8"),
        (field(1, 1) + field(2, 1) + field(8, 3) + field(9, bytes(4)), "a name"),
        (field(2, 1) + field(8, b"t") + field(9, 5), "raw data"),
    ],
)
def test_refuses_unsupported_tensors(tmp_path: Path, tensor: bytes, expected: str) -> None:
    assert expected in str(error_of(tmp_path, model(tensor)).expected)


def test_refuses_repeated_names(tmp_path: Path) -> None:
    tensor = tensor_bytes("t", np.zeros(1, np.float32))
    assert "t twice" in str(error_of(tmp_path, model(tensor, tensor)).got)


def test_refuses_truncated_files(tmp_path: Path) -> None:
    write_onnx(tmp_path / "a.onnx", NODES, {"a": np.arange(20, dtype=np.float32), "b": np.arange(3)})
    data = (tmp_path / "a.onnx").read_bytes()
    for size in range(len(data)):
        error_of(tmp_path, data[:size])


@given(st.data())
def test_damage_raises_nothing_but_checkpoint_errors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("d")
    write_onnx(folder / "a.onnx", NODES, {"a": np.arange(5, dtype=np.float32), "b": np.arange(3)})
    content = bytearray((folder / "a.onnx").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / "a.onnx").write_bytes(content)
    with contextlib.suppress(CheckpointError):  # any other error fails the test
        read_onnx(folder / "a.onnx")


@given(st.binary(max_size=200))
def test_refuses_random_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    error_of(tmp_path_factory.mktemp("b"), data)


def test_refuses_foreign_files(tmp_path: Path) -> None:
    for data in (
        b"",
        b"PK\x03\x04" + bytes(100),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        b"\xff" * 40,
    ):
        error_of(tmp_path, data)
    with pytest.raises(CheckpointError, match="No such file"):
        read_onnx(tmp_path / "none.onnx")
    with pytest.raises(CheckpointError):
        read_onnx(tmp_path)
    graph = field(1, field(4, b"Conv")) + field(5, tensor_bytes("t", np.zeros(1, np.float32)))
    assert error_of(tmp_path, field(7, graph) * 2).got == 2
    assert "0 nodes" in str(error_of(tmp_path, field(7, field(5, tensor_bytes("t", np.zeros(1, np.float32))))).got)
