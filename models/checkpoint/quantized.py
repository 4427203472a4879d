"""Quantised matrices: rounding to fp8, int8 or int4, and the way back.

| kind | values | weight |
|---|---|---|
| int8 | -127 to 127, int8 | value * scale of its first index |
| fp8 | float8_e4m3fn | value * scale of its first index |
| int4 | 0 to 15, two in a byte | (value - zero of its group) * scale of its group |

A group of int4 is up to 128 neighbouring columns of one row. Byte j of a group has column j in its low bits and column
j + group / 2 in its high bits. Does not contain file formats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from models.checkpoint.precision import GROUPS, MIN_ROW_VALUES, Kind, group_size
from models.errors import CheckpointError

KINDS: tuple[Kind, ...] = get_args(Kind)
VALUE_TYPES: dict[Kind, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
_MAX: dict[Kind, float] = {"fp8": 448.0, "int8": 127.0}
_MAX_INT4 = 15
# Values that are rounded at once, which bounds the memory of the intermediate float64. On a GPU blocks take launches.
_BLOCK, _GPU_BLOCK = 1 << 19, 1 << 22


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix as it is stored and multiplied.

    Attributes:
        values: int8 and fp8: [N, ...]; int4: [N, K / 2] uint8.
        scale: int8 and fp8: [N] float32; int4: [K / group, N] float16.
        zeros: int4: [K / group, N] uint8, 0 to 16; otherwise None.
    """

    values: Tensor
    scale: Tensor
    zeros: Tensor | None = None

    @property
    def kind(self) -> Kind:
        return next(kind for kind, dtype in VALUE_TYPES.items() if dtype is self.values.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        N, *rest = self.values.shape
        return (N, 2 * rest[0]) if self.zeros is not None else (N, *rest)

    @property
    def group(self) -> int:
        """Columns with one scale; all of them, unless the kind is int4."""
        return self.shape[1] // len(self.scale) if self.zeros is not None else self.values[0].numel()

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def __len__(self) -> int:
        return len(self.values)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values, self.scale) if self.zeros is None else (self.values, self.scale, self.zeros)

    def to(self, device: torch.device | str) -> "QuantizedMatrix":
        return QuantizedMatrix(*(tensor.to(device) for tensor in self.tensors()))

    def dequantized(self, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight, computed in float32 and rounded to `dtype`. The stored bytes cross to the device first."""
        stored = self if device is None else self.to(device)
        if stored.zeros is None:
            rows = (-1,) + (1,) * (stored.values.ndim - 1)
            return stored.values.float().mul_(stored.scale.view(rows)).to(dtype)
        scale, zeros = (one.float().T[:, :, None] for one in (stored.scale, stored.zeros))
        return (stored._nibbles().float().sub_(zeros)).mul_(scale).flatten(1).to(dtype)

    def _nibbles(self) -> Tensor:
        """Values of int4 [N, groups, group]."""
        packed = self.values.unflatten(1, (len(self.scale), -1))
        return torch.cat((packed & 15, packed >> 4), dim=2)

    def split(self, counts: Sequence[int]) -> "list[QuantizedMatrix]":
        """Matrices of consecutive rows, as views."""
        axes = (0, 0) if self.zeros is None else (0, 1, 1)
        parts = (one.split(list(counts), dim=axis) for one, axis in zip(self.tensors(), axes, strict=True))
        return [QuantizedMatrix(*tensors) for tensors in zip(*parts, strict=True)]


def concatenated(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """One matrix with the rows of several that have one kind, as many columns and equal groups."""
    kinds = {(one.kind, one.shape[1:], one.group) for one in matrices}
    assert len(kinds) == 1, f"matrices: expected one kind and width, got {kinds}"
    axes = (0, 0, 0) if matrices[0].zeros is None else (0, 1, 1)
    tensors = zip(*(one.tensors() for one in matrices), strict=True)
    return QuantizedMatrix(*(torch.cat(list(parts), dim=axis) for parts, axis in zip(tensors, axes, strict=False)))


def is_matrix(tensor: Tensor) -> bool:
    """Whether rounding makes a tensor smaller: at least two dims, and rows that are long enough."""
    return tensor.is_floating_point() and tensor.ndim > 1 and tensor[0].numel() >= MIN_ROW_VALUES


def quantize(tensor: Tensor, kind: Kind = "int8", name: str = "a weight") -> QuantizedMatrix:
    """The nearest values, on the tensor's device, some rows at a time.

    A weight differs from its source by half its scale at most; of fp8 by half the distance of neighbouring values.

    Args:
        tensor: [N, ...]; for int4 [N, K] with K a multiple of 32.
        name: of the weight, for errors.
    Raises: CheckpointError for values that are not finite.
    """
    rows = tensor.detach().flatten(1)
    result = _empty(tensor, kind)
    step = max(1, (_BLOCK if tensor.device.type == "cpu" else _GPU_BLOCK) // max(rows.shape[1], 1))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        if not block.isfinite().all():
            raise CheckpointError(f"{name} to store as {kind}", expected="finite values", got="NaN or infinity")
        counts = [start, len(block), len(rows) - start - len(block)]
        rounded = _int4(block, name) if kind == "int4" else _scaled(block, kind)
        for whole, part in zip(result.split(counts)[1].tensors(), rounded.tensors(), strict=True):
            whole.copy_(part.view(whole.shape))
    return result


def _empty(tensor: Tensor, kind: Kind) -> QuantizedMatrix:
    """A matrix without values, allocated at once: blocks that are joined at the end would take the memory twice."""
    N, K = len(tensor), tensor[:1].numel()
    if kind != "int4":
        scale = torch.empty(N, dtype=torch.float32, device=tensor.device)
        return QuantizedMatrix(torch.empty(tensor.shape, dtype=VALUE_TYPES[kind], device=tensor.device), scale)
    group = group_size(K)
    assert group is not None, f"int4: expected columns a multiple of {GROUPS[-1]}, got {K}"
    values, zeros = (
        torch.empty(shape, dtype=torch.uint8, device=tensor.device) for shape in ((N, K // 2), (K // group, N))
    )
    return QuantizedMatrix(values, torch.empty(zeros.shape, dtype=torch.float16, device=tensor.device), zeros)


def _scaled(rows: Tensor, kind: Kind) -> QuantizedMatrix:
    wide, largest = rows.double(), _MAX[kind]
    top = wide.abs().amax(1)
    # Float32 rounds the scale: the next larger one keeps the largest value of a row in range.
    scale = (top / largest).float()
    scale = torch.where(scale.double() * largest < top, _next_larger(scale), scale)
    values = wide / scale.double().clamp_min(torch.finfo(torch.float64).tiny)[:, None]
    if kind == "int8":
        return QuantizedMatrix(values.round().to(torch.int8), scale)
    # Float32 first: no type converts from float64 to fp8 in one rounding on every device.
    return QuantizedMatrix(values.float().clamp(-largest, largest).to(torch.float8_e4m3fn), scale)


def _int4(rows: Tensor, name: str) -> QuantizedMatrix:
    group = group_size(rows.shape[1])
    assert group is not None
    wide = rows.double().unflatten(1, (-1, group))
    low, high = wide.amin(2).clamp(max=0), wide.amax(2).clamp(min=0)
    exact = (high - low) / _MAX_INT4
    if (exact > torch.finfo(torch.float16).max).any():
        got = f"{exact.max() * _MAX_INT4:g}"
        raise CheckpointError(f"{name} to store as int4", expected="groups below 982 560", got=got)
    scale = exact.half()
    # The bits of positive numbers count upwards.
    scale = torch.where(scale.double() < exact, (scale.view(torch.int16) + 1).view(torch.float16), scale)
    divisor = scale.double().clamp_min(torch.finfo(torch.float64).tiny)
    zeros = (-low / divisor).round().clamp(0, _MAX_INT4)
    values = ((wide / divisor[..., None]).round() + zeros[..., None]).clamp(0, _MAX_INT4).to(torch.uint8)
    return QuantizedMatrix(packed_nibbles(values), scale.T.contiguous(), zeros.to(torch.uint8).T.contiguous())


def packed_nibbles(values: Tensor) -> Tensor:
    """Values [N, groups, group] uint8 below 16 in the bytes of an int4 matrix: [N, groups * group / 2]."""
    low, high = values.chunk(2, dim=2)
    return (low | high << 4).flatten(1)


def _next_larger(values: Tensor) -> Tensor:
    return torch.nextafter(values, torch.full_like(values, torch.inf))
