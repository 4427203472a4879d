"""Weight files of a checkpoint folder: index, safetensors shards and `.pt` files. Headers first, data on request.

Tensor names are returned as the files contain them; `models.load` maps them to the model.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.checkpoint.int8 import (
    DECLARED_AS,
    SCALE,
    Int8Matrix,
    check_declaration,
    checked_scale,
    scale_problem,
    unpacked,
)
from models.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Bytes per value of the types that a weight may have; quantized files have others.
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
INT8 = "I8"  # of a weight in a folder that declares it
READ_AHEAD_BYTES = 512 << 20  # of a file, requested from the system before they are needed


@dataclass(frozen=True)
class StoredTensor:
    """One weight as the header of its file describes it. scale: that of int8 values, in the same file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    scale: "StoredTensor | None" = None

    @property
    def n_bytes(self) -> int:
        if self.scale is not None:
            return math.prod(self.shape) + self.scale.n_bytes
        return math.prod(self.shape) * FLOAT_BYTES.get(self.dtype, 0)

    @property
    def is_weight(self) -> bool:
        """Whether the type is one that a weight may have: a float, or int8 with a scale."""
        return self.dtype in FLOAT_BYTES or self.scale is not None


def list_tensors(folder: Path) -> tuple[list[StoredTensor], list[str]]:
    """The weights of a folder, from its index or single file, and the problems of the files.

    Reads headers only. A file that is shorter than its header states is a problem. In a folder whose index declares
    int8, values and scales are one weight.

    Raises: CheckpointError if there is neither an index nor a single file, or the index is unreadable or declares an
        unknown format.
    """
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise CheckpointError(str(folder), expected=f"{INDEX} or {SINGLE}", got="neither")
        found, problem = _read_header(folder / SINGLE)
        return found, [problem] if problem else []

    weight_map, is_quantized = _read_index(folder / INDEX)
    tensors: list[StoredTensor] = []
    problems: list[str] = []
    for shard in sorted(set(weight_map.values())):
        listed = {name for name, file in weight_map.items() if file == shard}
        if Path(shard).name != shard:
            problems.append(f"{INDEX}: expected shard names without folders, got {shard!r}")
            continue
        found, problem = _read_header(folder / shard)
        if problem:
            problems.append(f"{problem} (the index lists {len(listed)} tensors of it)")
            continue
        names = {tensor.name for tensor in found}
        problems += [f"{shard}: expected {name}, which the index lists, got none" for name in sorted(listed - names)]
        problems += [
            f"{INDEX}: expected {name} of {shard} to be listed there, got {weight_map.get(name, 'no entry')}"
            for name in sorted(names - listed)
        ]
        tensors += [tensor for tensor in found if tensor.name in listed]
    if is_quantized:
        tensors, more = _with_scales(tensors)
        problems += more
    return tensors, problems


def _with_scales(tensors: list[StoredTensor]) -> tuple[list[StoredTensor], list[str]]:
    """Weights of a folder that declares int8, and what is wrong with their scales."""
    by_place = {(tensor.file, tensor.name): tensor for tensor in tensors}
    matrices = [tensor for tensor in tensors if tensor.dtype == INT8]
    scales = {(tensor.file, tensor.name + SCALE) for tensor in matrices}
    weights, problems = [], []
    for tensor in tensors:
        if (tensor.file, tensor.name) in scales:
            continue
        if tensor.dtype != INT8:
            weights.append(tensor)
            continue
        scale = by_place.get((tensor.file, tensor.name + SCALE))
        about = None if scale is None else (scale.dtype, scale.shape)
        if problem := scale_problem(tensor.shape[0] if tensor.shape else 0, about):
            problems.append(f"{tensor.file.name}: {tensor.name}{SCALE}: {problem}")
            # The problem is reported once: the weight counts as complete.
            scale = StoredTensor(tensor.file, tensor.name + SCALE, tensor.shape[:1], "F32")
        weights.append(replace(tensor, scale=scale))
    return weights, problems


def read_tensors(stored: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, Tensor | Int8Matrix]]:
    """Memory-mapped data of tensors, sorted by file and name; the system reads a page when it is first accessed.

    Requests the next READ_AHEAD_BYTES of a file in the background.

    Raises: CheckpointError if a file is unreadable or a scale is not finite.
    """
    for file, group in groupby(sorted(stored, key=lambda tensor: (str(tensor.file), tensor.name)), lambda t: t.file):
        try:
            with safe_open(file, framework="pt", device="cpu") as shard, file.open("rb") as plain:
                n_read = n_requested = 0
                for tensor in group:
                    n_read += tensor.n_bytes
                    n_requested = _read_ahead(plain.fileno(), n_requested, n_read + READ_AHEAD_BYTES)
                    data = shard.get_tensor(tensor.name)
                    if tensor.scale is None:
                        yield tensor, data
                        continue
                    scale = shard.get_tensor(tensor.scale.name)
                    yield tensor, Int8Matrix(data, checked_scale(scale, f"{file}: {tensor.scale.name}"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(str(file), expected="a readable safetensors file", got=str(error)) from None


def _read_ahead(fd: int, start: int, end: int) -> int:
    """Make the system read bytes [start, end) of a file in the background; page by page, disks reach a fraction of
    their rate.

    Returns: `end`.
    """
    with suppress(OSError, AttributeError):  # not on every system, nor for every file
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_WILLNEED)
    return end


def read_pt(path: Path) -> dict[str, Tensor]:
    """The memory-mapped tensors of a `.pt` file that contains a dict of tensors, or such a dict under `state_dict`.

    A file that declares int8 beside its `state_dict` has int8 values with scales; the weights are returned in float32.

    Raises: CheckpointError if the file is missing or damaged, or contains code or anything but dense float tensors, or
        int8 values without a declaration or a fitting scale.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load raises OSError, RuntimeError, UnpicklingError and others
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(str(path), expected="a state dict saved by torch.save", got=first_line) from None
    is_quantized = False
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        if is_quantized := DECLARED_AS in loaded:
            check_declaration(loaded[DECLARED_AS], str(path))
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict):
        raise CheckpointError(str(path), expected="a dict of tensors", got=type(loaded).__name__)
    tensors, others = {}, []
    for name, value in loaded.items():
        if isinstance(name, str) and isinstance(value, Tensor) and _is_float_data(value, or_int8=is_quantized):
            tensors[name] = value.detach()
        else:
            others.append(f"{name}: {_kind(value)}")
    if others:
        raise CheckpointError(str(path), expected="names with dense float tensors only", got=", ".join(others))
    return unpacked(tensors, str(path)) if is_quantized else tensors


def _read_header(file: Path) -> tuple[list[StoredTensor], str | None]:
    try:
        with safe_open(file, framework="pt", device="cpu") as shard:
            found = []
            for name in shard.keys():  # noqa: SIM118, the handle is not a mapping
                header = shard.get_slice(name)
                found.append(StoredTensor(file, name, tuple(header.get_shape()), header.get_dtype()))
            return found, None
    except FileNotFoundError:
        return [], f"{file.name}: expected a safetensors file, got no such file"
    except (SafetensorError, OSError) as error:
        return [], f"{file.name}: expected a complete safetensors file, got {error}"


def _read_index(file: Path) -> tuple[dict[str, str], bool]:
    """Map of tensor -> shard, and whether the weights are int8."""
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
        weight_map: dict[str, str] = index["weight_map"]
        metadata = index.get("metadata") or {}
        is_quantized = DECLARED_AS in metadata
        if not all(isinstance(shard, str) for shard in weight_map.values()):
            raise TypeError("a shard name that is not a string")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise CheckpointError(str(file), expected="JSON with weight_map {tensor: shard}", got=got) from None
    if is_quantized:
        check_declaration(metadata[DECLARED_AS], str(file))
    return weight_map, is_quantized


def _is_float_data(tensor: Tensor, *, or_int8: bool) -> bool:
    is_known = tensor.is_floating_point() or (or_int8 and tensor.dtype is torch.int8)
    return not tensor.is_meta and _is_dense(tensor) and is_known


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        if value.is_meta:
            return "a tensor without data"
        return str(value.dtype) if _is_dense(value) else "a tensor that is not dense"
    return type(value).__name__
