"""Weight files of a checkpoint folder: index, safetensors shards and `.pt` files. Headers first, data on request.

Tensor names are returned as the files contain them; `models.load` maps them to the model.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Bytes per value of the types that a weight may have; quantized files have others.
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
READ_AHEAD_BYTES = 512 << 20  # of a file, requested from the system before they are needed


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as the header of its file describes it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * FLOAT_BYTES.get(self.dtype, 0)


def list_tensors(folder: Path) -> tuple[list[StoredTensor], list[str]]:
    """The tensors of a folder, from its index or single file, and the problems of the files.

    Reads headers only. A file that is shorter than its header states is a problem.

    Raises: CheckpointError if there is neither an index nor a single file, or the index is unreadable.
    """
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise CheckpointError(str(folder), expected=f"{INDEX} or {SINGLE}", got="neither")
        found, problem = _read_header(folder / SINGLE)
        return found, [problem] if problem else []

    weight_map = _read_index(folder / INDEX)
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
    return tensors, problems


def read_tensors(stored: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, Tensor]]:
    """Memory-mapped data of tensors, sorted by file and name; the system reads a page when it is first accessed.

    Requests the next READ_AHEAD_BYTES of a file in the background.

    Raises: CheckpointError if a file is unreadable.
    """
    for file, group in groupby(sorted(stored, key=lambda tensor: (str(tensor.file), tensor.name)), lambda t: t.file):
        try:
            with safe_open(file, framework="pt", device="cpu") as shard, file.open("rb") as plain:
                n_read = n_requested = 0
                for tensor in group:
                    n_read += tensor.n_bytes
                    n_requested = _read_ahead(plain.fileno(), n_requested, n_read + READ_AHEAD_BYTES)
                    yield tensor, shard.get_tensor(tensor.name)
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

    Raises: CheckpointError if the file is missing or damaged, or contains code or anything but dense float tensors.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load raises OSError, RuntimeError, UnpicklingError and others
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(str(path), expected="a state dict saved by torch.save", got=first_line) from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict):
        raise CheckpointError(str(path), expected="a dict of tensors", got=type(loaded).__name__)
    tensors, others = {}, []
    for name, value in loaded.items():
        if isinstance(name, str) and isinstance(value, Tensor) and _is_float_data(value):
            tensors[name] = value.detach()
        else:
            others.append(f"{name}: {_kind(value)}")
    if others:
        raise CheckpointError(str(path), expected="names with dense float tensors only", got=", ".join(others))
    return tensors


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


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(shard, str) for shard in weight_map.values()):
            raise TypeError("a shard name that is not a string")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise CheckpointError(str(file), expected="JSON with weight_map {tensor: shard}", got=got) from None
    return weight_map


def _is_float_data(tensor: Tensor) -> bool:
    return not tensor.is_meta and _is_dense(tensor) and tensor.is_floating_point()


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        if value.is_meta:
            return "a tensor without data"
        return str(value.dtype) if _is_dense(value) else "a tensor that is not dense"
    return type(value).__name__
