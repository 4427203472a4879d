"""What weights a checkpoint folder holds: index, shards and `.pt` files. Headers first, data on request.

Knows file formats. Does not know the model: names are passed on as the files spell them.
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

# Bytes per value of the types a weight may have; anything else is a quantised or foreign file.
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


AHEAD = 512 << 20  # bytes of a file that are on their way before they are needed


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a shard's header describes it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * FLOAT_BYTES.get(self.dtype, 0)


def list_tensors(folder: Path) -> tuple[list[StoredTensor], list[str]]:
    """Everything the folder's index or single file offers, and what is wrong with the files.

    Only headers are read; a header that promises more bytes than the file has is a problem.

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
        promised = {name for name, file in weight_map.items() if file == shard}
        if Path(shard).name != shard:
            problems.append(f"{INDEX}: expected shard names without folders, got {shard!r}")
            continue
        found, problem = _read_header(folder / shard)
        if problem:
            problems.append(f"{problem} (holds {len(promised)} tensors of the index)")
            continue
        names = {tensor.name for tensor in found}
        problems += [f"{shard}: expected {name} as the index says, got none" for name in sorted(promised - names)]
        problems += [
            f"{INDEX}: expected {name} of {shard} to be listed there, got {weight_map.get(name, 'no entry')}"
            for name in sorted(names - promised)
        ]
        tensors += [tensor for tensor in found if tensor.name in promised]
    return tensors, problems


def read_tensors(stored: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, Tensor]]:
    """The data, memory-mapped: a tensor's pages are read when they are touched, and no copy is held here.

    Files are read ahead of that in the background, as far as a caller that takes them in order will soon need.
    """
    for file, group in groupby(sorted(stored, key=lambda tensor: (str(tensor.file), tensor.name)), lambda t: t.file):
        try:
            with safe_open(file, framework="pt", device="cpu") as shard, file.open("rb") as plain:
                n_read = n_asked = 0
                for tensor in group:
                    n_read += tensor.n_bytes
                    n_asked = _read_ahead(plain.fileno(), n_asked, n_read + AHEAD)
                    yield tensor, shard.get_tensor(tensor.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(str(file), expected="a readable safetensors file", got=str(error)) from None


def _read_ahead(fd: int, start: int, end: int) -> int:
    """Ask the system for these bytes of a file: touched page by page, a disk gives a fraction of what it could.

    Returns: `end`.
    """
    with suppress(OSError, AttributeError):  # systems and files without it are read as they are touched
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_WILLNEED)
    return end


def read_pt(path: Path) -> dict[str, Tensor]:
    """The floating-point tensors of a `.pt` file, memory-mapped: a plain dict or one under `state_dict`.

    Raises: CheckpointError if it is missing, damaged, holds code, or holds anything but dense float tensors.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load has no common base: OSError, RuntimeError, UnpicklingError, ...
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(str(path), expected="a state dict saved by torch.save", got=first_line) from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict):
        raise CheckpointError(str(path), expected="a dict of tensors", got=type(loaded).__name__)
    odd = [f"{name}: {_kind(value)}" for name, value in loaded.items() if not _is_float_tensor(name, value)]
    if odd:
        raise CheckpointError(str(path), expected="names with dense float tensors only", got=", ".join(odd))
    return {name: tensor.detach() for name, tensor in loaded.items()}


def _read_header(file: Path) -> tuple[list[StoredTensor], str | None]:
    try:
        with safe_open(file, framework="pt", device="cpu") as shard:
            found = []
            for name in shard.keys():  # noqa: SIM118, the handle is no mapping
                header = shard.get_slice(name)
                found.append(StoredTensor(file, name, tuple(header.get_shape()), header.get_dtype()))
            return found, None
    except FileNotFoundError:
        return [], f"{file.name}: expected a safetensors file, got no such file"
    except (SafetensorError, OSError) as error:
        return [], f"{file.name}: expected a complete safetensors file, got {error}"


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(shard, str) for shard in weight_map.values()):
            raise TypeError("a shard name that is no string")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise CheckpointError(str(file), expected="JSON with weight_map {tensor: shard}", got=got) from None
    return weight_map


def _is_float_tensor(name: object, value: object) -> bool:
    is_data = isinstance(value, Tensor) and not value.is_meta and _is_dense(value)
    return isinstance(name, str) and is_data and value.is_floating_point()


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        if value.is_meta:
            return "a tensor without data"
        return str(value.dtype) if _is_dense(value) else "a tensor that is not dense"
    return type(value).__name__
