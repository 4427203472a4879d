"""Weight files of a checkpoint folder: index, safetensors shards and `.pt` files. Headers first, data on request.

Tensor names are returned as the files contain them; `models.load` maps them to the model.
"""

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.checkpoint.checksums import INDEX
from models.checkpoint.index import DECLARED_AS, checked_declaration, read_index
from models.checkpoint.packing import (
    STORED_KINDS,
    StoredShape,
    checked_matrix,
    checked_values,
    companions,
    matrices_in,
    problems_beside,
)
from models.checkpoint.precision import Kind
from models.checkpoint.pt_errors import pt_failure
from models.checkpoint.public_int4 import PublicInt4, matrix_shape, problems_of_parts
from models.checkpoint.public_layout import PublicLayout, public_layout
from models.checkpoint.quantized import QuantizedMatrix
from models.errors import CheckpointError

SINGLE = "model.safetensors"

# Bytes per value of the types that a weight may have; the parts of quantised matrices may have the others.
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
OTHER_BYTES = {"I8": 1, "U8": 1, "F8_E4M3": 1, "I32": 4}
MAPPED_BYTES = 64 << 20  # of a file, mapped at once
ALONE_BYTES = 16 << 20  # a tensor of this size is mapped alone, so that a reference to it keeps no others
READ_AHEAD_BYTES = 512 << 20  # of a file, requested from the system before they are needed

Stored = Tensor | QuantizedMatrix | PublicInt4


@dataclass(frozen=True)
class StoredTensor:
    """One weight as the headers of its files describe it.

    Attributes:
        shape: of the weight; of a matrix of int4 not that of its bytes.
        parts: tensors of a quantised matrix by their suffixes, the values first.
        layout: of a matrix that another program has packed.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[tuple[str, "StoredTensor"], ...] = ()
    layout: PublicLayout | None = None

    @property
    def n_bytes(self) -> int:
        if self.parts:
            return sum(part.n_bytes for _, part in self.parts)
        return math.prod(self.shape) * (FLOAT_BYTES | OTHER_BYTES).get(self.dtype, 0)

    @property
    def is_weight(self) -> bool:
        """Whether the type is one that a weight may have: a float, or values with what belongs to them."""
        return self.dtype in FLOAT_BYTES or bool(self.parts)

    @property
    def described(self) -> StoredShape:
        return self.dtype, self.shape


def list_tensors(folder: Path) -> tuple[list[StoredTensor], list[str]]:
    """The weights of a folder, from its index or single file, and the problems of the files.

    Reads headers only. A file that is shorter than its header states is a problem. In a folder whose index declares
    quantised matrices, or whose `config.json` declares AWQ or GPTQ, the tensors of a matrix are one weight.

    Raises: CheckpointError if there is neither an index nor a single file, or the index is unreadable or declares an
        unknown format.
    """
    tensors, problems, kind = _stored_tensors(folder)
    layout = public_layout(folder)
    if kind is not None:
        tensors, more = _matrices(tensors, kind)
        problems += more
    elif layout is not None:
        tensors, more = _public_matrices(tensors, layout)
        problems += more
    return tensors, problems


def _stored_tensors(folder: Path) -> tuple[list[StoredTensor], list[str], Kind | None]:
    """Tensors as they are stored, problems of the files, and the kind of matrices that the index declares."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise CheckpointError(str(folder), expected=f"{INDEX} or {SINGLE}", got="neither")
        found, problem = _read_header(folder / SINGLE)
        return found, [problem] if problem else [], None

    weight_map, kind = read_index(folder)
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
    return tensors, problems, kind


def _matrices(tensors: list[StoredTensor], declared: Kind) -> tuple[list[StoredTensor], list[str]]:
    """Weights of a folder that declares quantised matrices, and what is wrong with the parts of these."""
    by_place = {(tensor.file, tensor.name): tensor for tensor in tensors}
    kinds = {dtype: kind for dtype, kind in STORED_KINDS.items() if kind in ("int8", declared)}
    places = {(tensor.file, tensor.name) for tensor in tensors if tensor.dtype in kinds}

    def belongs_to_other(tensor: StoredTensor, kind: Kind) -> bool:  # the zeros of int4 are bytes as its values are
        stems = (tensor.name.removesuffix(suffix) for suffix in companions(kind) if tensor.name.endswith(suffix))
        return any((tensor.file, stem) in places for stem in stems)

    typed = {tensor: kinds[tensor.dtype] for tensor in tensors if tensor.dtype in kinds}
    values = {tensor: kind for tensor, kind in typed.items() if not belongs_to_other(tensor, kind)}
    beside = {(one.file, one.name + suffix) for one, kind in values.items() for suffix in companions(kind)}
    weights, problems = [], []
    for tensor in tensors:
        if (tensor.file, tensor.name) in beside:
            continue
        kind = values.get(tensor)
        if kind is None:
            weights.append(tensor)
            continue
        found = {suffix: by_place.get((tensor.file, tensor.name + suffix)) for suffix in companions(kind)}
        described = {suffix: None if one is None else one.described for suffix, one in found.items()}
        problems += [
            f"{tensor.file.name}: {tensor.name}{problem}" for problem in problems_beside(kind, tensor.shape, described)
        ]
        # A problem is reported once: the weight counts as complete.
        parts = (("", tensor), *((suffix, one) for suffix, one in found.items() if one is not None))
        shape = tensor.shape if kind != "int4" else (*tensor.shape[:-1], 2 * tensor.shape[-1])
        weights.append(replace(tensor, shape=shape, parts=parts))
    return weights, problems


def _public_matrices(tensors: list[StoredTensor], layout: PublicLayout) -> tuple[list[StoredTensor], list[str]]:
    """Weights of an AWQ or GPTQ folder, and what is wrong with the parts of their matrices."""
    by_name = {tensor.name: tensor for tensor in tensors}
    stems = [tensor.name.removesuffix(".qweight") for tensor in tensors if tensor.name.endswith(".qweight")]
    taken: set[str] = set()
    weights, problems = [], []
    for stem in stems:
        found = {suffix: by_name.get(f"{stem}.{suffix}") for suffix in layout.suffixes}
        parts = tuple((suffix, one) for suffix, one in found.items() if one is not None)
        taken |= {one.name for _, one in parts}
        described = {suffix: one.described for suffix, one in parts}
        if wrong := problems_of_parts(layout, described):
            problems += [f"{stem}.{problem}" for problem in wrong]
        values = by_name[f"{stem}.qweight"]
        shape = matrix_shape(layout, values.shape)
        weights.append(StoredTensor(values.file, f"{stem}.weight", shape, values.dtype, parts, layout))
    return [tensor for tensor in tensors if tensor.name not in taken] + weights, problems


def read_tensors(stored: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, Stored]]:
    """Memory-mapped data of tensors, sorted by file and name; the system reads a page when it is first accessed.

    Requests the next READ_AHEAD_BYTES of a file in the background.

    Raises: CheckpointError if a file is unreadable or a scale is not finite.
    """
    for file, group in groupby(sorted(stored, key=lambda tensor: (str(tensor.file), tensor.name)), lambda t: t.file):
        try:
            with file.open("rb") as plain:
                n_read = n_requested = 0
                for span in _spans(group):
                    with safe_open(file, framework="pt", device="cpu") as shard:
                        for tensor in span:
                            n_read += tensor.n_bytes
                            n_requested = _read_ahead(plain.fileno(), n_requested, n_read + READ_AHEAD_BYTES)
                            yield tensor, _read(shard, file, tensor)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(str(file), expected="a readable safetensors file", got=str(error)) from None


def _spans(tensors: Iterable[StoredTensor]) -> Iterator[list[StoredTensor]]:
    """Neighbouring tensors of up to MAPPED_BYTES, or one of ALONE_BYTES or more.

    The pages of a mapped file count as the process's memory until the file is closed and no tensor refers to it.
    """
    span: list[StoredTensor] = []
    for tensor in tensors:
        if span and sum(one.n_bytes for one in span) + tensor.n_bytes > MAPPED_BYTES:
            yield span
            span = []
        if tensor.n_bytes >= ALONE_BYTES:
            yield [tensor]
        else:
            span.append(tensor)
    if span:
        yield span


def _read(shard: Any, file: Path, tensor: StoredTensor) -> Stored:
    """The data of one weight. Raises: CheckpointError if a scale is not finite."""
    if not tensor.parts:
        plain: Tensor = shard.get_tensor(tensor.name)
        return plain
    parts = {suffix: _read_part(shard, file, part) for suffix, part in tensor.parts}
    if tensor.layout is not None:
        return PublicInt4(tensor.layout, f"{file}: {tensor.name}", parts)
    return checked_matrix(parts.pop(""), parts, f"{file}: {tensor.name}")


def on_device(data: Stored, device: torch.device | str, name: str) -> Tensor | QuantizedMatrix:
    """Stored data on the device. name: for errors. Raises: CheckpointError for values that are not as they are stored.

    A matrix that another program has packed is converted there.
    """
    if isinstance(data, PublicInt4):
        return data.matrix(device)
    return checked_values(data.to(device), name) if isinstance(data, QuantizedMatrix) else data.to(device)


def float_weight(data: Stored, device: torch.device | str, name: str) -> Tensor:
    """The weight of stored data on the device; that of a quantised matrix in float32, of a tensor in its own type.

    Arguments and errors of `on_device`.
    """
    placed = on_device(data, device, name)
    return placed.dequantized() if isinstance(placed, QuantizedMatrix) else placed


def _read_part(shard: Any, file: Path, part: StoredTensor) -> Tensor:
    """A part of a matrix from its file, which is open if it is `file`."""
    if part.file == file:
        tensor: Tensor = shard.get_tensor(part.name)
        return tensor
    with safe_open(part.file, framework="pt", device="cpu") as other:
        return _read_part(other, part.file, part)


def _read_ahead(fd: int, start: int, end: int) -> int:
    """Make the system read bytes [start, end) of a file in the background; page by page, disks reach a fraction of
    their rate.

    Returns: `end`.
    """
    with suppress(OSError, AttributeError):  # not on every system, nor for every file
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_WILLNEED)
    return end


def read_pt(path: Path) -> dict[str, Tensor]:
    """As `read_stored_pt`, with int8 weights dequantised to float32."""
    stored = read_stored_pt(path)
    return {name: one.dequantized() if isinstance(one, QuantizedMatrix) else one for name, one in stored.items()}


def read_stored_pt(path: Path) -> dict[str, Tensor | QuantizedMatrix]:
    """The memory-mapped tensors of a `.pt` file that contains a dict of tensors, or such a dict under `state_dict`.

    A file that declares int8 beside its `state_dict` has int8 values with scales; both are returned as one
    `QuantizedMatrix`.

    Raises: CheckpointError if the file is missing or damaged, or contains code or anything but dense float tensors, or
        int8 values without a declaration or a fitting scale.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load raises OSError, RuntimeError, UnpicklingError and others
        raise CheckpointError(str(path), expected="a state dict saved by torch.save", got=pt_failure(error)) from None
    is_quantized = False
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        if is_quantized := DECLARED_AS in loaded:
            kind = checked_declaration(loaded[DECLARED_AS], str(path))
            if kind != "int8":
                raise CheckpointError(f"{path}: {DECLARED_AS}", expected="int8 in a `.pt` file", got=kind)
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
    return matrices_in(tensors, str(path)) if is_quantized else {**tensors}


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
