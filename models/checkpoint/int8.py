"""Matrices stored as int8: rounding, the way back, and the declaration that files with them carry.

`NAME` has whole numbers from -127 to 127, and `NAME.scale` in the same file one float32 for each index of its first
dim. The weight is their product. Does not contain file formats.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.errors import CheckpointError

FORMAT, VERSION = "int8", 1
DECLARATION: dict[str, object] = {"format": FORMAT, "version": VERSION}
DECLARED_AS = "quantization"  # key of the declaration in an index's metadata and in a `.pt` file
SCALE = ".scale"
MAX_VALUE = 127
MIN_ROW_VALUES = 32  # in shorter rows the scale takes more bytes than rounding saves


@dataclass(frozen=True)
class Int8Matrix:
    """Stored values [rows, ...] and scales [rows]."""

    values: Tensor
    scale: Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def dequantized(self, device: torch.device | str = "cpu") -> Tensor:
        """The weight in float32. The stored bytes cross to the device before they grow."""
        rows = (-1,) + (1,) * (self.values.ndim - 1)
        return self.values.to(device).float().mul_(self.scale.to(device).view(rows))


def is_matrix(tensor: Tensor) -> bool:
    """Whether int8 makes a tensor smaller: at least two dims, and rows that are long enough."""
    return tensor.is_floating_point() and tensor.ndim > 1 and tensor[0].numel() >= MIN_ROW_VALUES


def quantize(tensor: Tensor) -> Int8Matrix:
    """The nearest int8 values. A weight differs from its stored one by half its row's scale at most.

    Raises: CheckpointError for values that are not finite.
    """
    if not tensor.isfinite().all():
        raise CheckpointError("a weight to store as int8", expected="finite values", got="NaN or infinity")
    rows = tensor.detach().flatten(1).double()
    # Float32 rounds the scale: the next larger one keeps the largest value of a row at 127.
    scale = (rows.abs().amax(1) / MAX_VALUE).float()
    scale = torch.where(scale.double() * MAX_VALUE < rows.abs().amax(1), _next_larger(scale), scale)
    values = (rows / scale.double().clamp_min(torch.finfo(torch.float64).tiny)[:, None]).round().to(torch.int8)
    return Int8Matrix(values.view(tensor.shape), scale)


def packed(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors that store a weight: int8 values and their scales, or the weight itself where that is smaller."""
    if not is_matrix(tensor):
        return {name: tensor.detach().contiguous()}
    stored = quantize(tensor)
    return {name: stored.values.contiguous(), name + SCALE: stored.scale}


def check_declaration(declared: object, where: str) -> None:
    """Raises: CheckpointError unless this program reads the declared format."""
    if declared != DECLARATION:
        raise CheckpointError(f"{where}: {DECLARED_AS}", expected=DECLARATION, got=declared)


def scale_problem(rows: int, scale: tuple[str, tuple[int, ...]] | None) -> str | None:
    """What is wrong with the stored type and shape of a scale, None for no scale; or None if nothing is."""
    if scale == ("F32", (rows,)):
        return None
    got = "nothing" if scale is None else f"{scale[0]} {list(scale[1])}"
    return f"expected F32 [{rows}] beside int8 values, got {got}"


def checked_scale(scale: Tensor, name: str) -> Tensor:
    """The scale. Raises: CheckpointError unless every value is finite and not negative."""
    if not (scale.isfinite() & (scale >= 0)).all():
        bad = scale[~(scale.isfinite() & (scale >= 0))][0].item()
        raise CheckpointError(name, expected="finite scales that are not negative", got=bad)
    return scale


def unpacked(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Weights in float32 for int8 values; other tensors as they are.

    Args:
        tensors: of a file with a declaration.
        where: name of the file, for errors.
    Raises: CheckpointError for int8 values without a fitting scale.
    """
    matrices = [name for name, tensor in tensors.items() if tensor.dtype is torch.int8]
    scales = {name + SCALE for name in matrices}
    weights = {name: tensor for name, tensor in tensors.items() if name not in scales}
    for name in matrices:
        values, scale = tensors[name], tensors.get(name + SCALE)
        about = None if scale is None else (_type_name(scale), tuple(scale.shape))
        if problem := scale_problem(values.shape[0] if values.ndim else 0, about):
            raise CheckpointError(where, expected="int8 weights with scales", got=f"{name}{SCALE}: {problem}")
        assert scale is not None
        weights[name] = Int8Matrix(values, checked_scale(scale, f"{where}: {name}{SCALE}")).dequantized()
    return weights


def _type_name(tensor: Tensor) -> str:
    return "F32" if tensor.dtype is torch.float32 else str(tensor.dtype)


def _next_larger(values: Tensor) -> Tensor:
    return torch.nextafter(values, torch.full_like(values, torch.inf))
