"""How quantised matrices are stored in files: names, the declaration, and the checks of what belongs to a matrix.

`NAME` has the values of a matrix, `NAME.scale` in the same file its scales, and `NAME.zeros` the zeros of int4
(`models.checkpoint.quantized`). Does not contain file formats.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from models.checkpoint.precision import GROUPS, Kind
from models.checkpoint.quantized import QuantizedMatrix, is_matrix, quantize
from models.errors import CheckpointError

SCALE, ZEROS = ".scale", ".zeros"
_FP8_NAN = 0x7F  # bits of NaN below the sign
_BLOCK_BYTES = 1 << 18  # of values compared at once on a CPU, which stay in its cache
# Kind of a matrix by the stored type of its values, as safetensors names it; int4 has two values in a byte.
STORED_KINDS: dict[str, Kind] = {"I8": "int8", "F8_E4M3": "fp8", "U8": "int4"}

StoredShape = tuple[str, tuple[int, ...]]  # type as safetensors names it, and shape


def packed(name: str, tensor: Tensor, kind: Kind = "int8") -> dict[str, Tensor]:
    """The tensors that store a weight: values and scales, or the weight itself where that is smaller."""
    if not is_matrix(tensor):
        return {name: tensor.detach().contiguous()}
    return stored_tensors(name, quantize(tensor, kind, name))


def stored_tensors(name: str, matrix: QuantizedMatrix) -> dict[str, Tensor]:
    """The tensors of a matrix by their stored names."""
    stored = {name: matrix.values.contiguous(), name + SCALE: matrix.scale.contiguous()}
    return stored if matrix.zeros is None else {**stored, name + ZEROS: matrix.zeros.contiguous()}


def companions(kind: Kind) -> tuple[str, ...]:
    """Suffixes of the tensors beside the values of a matrix."""
    return (SCALE, ZEROS) if kind == "int4" else (SCALE,)


def problems_beside(kind: Kind, values: tuple[int, ...], beside: Mapping[str, StoredShape | None]) -> list[str]:
    """What is wrong with the stored types and shapes beside the values of a matrix.

    Args:
        values: stored shape of the values.
        beside: suffix -> what is stored, None for nothing.
    """
    if kind != "int4":
        fitting: dict[str, list[StoredShape]] = {SCALE: [("F32", (values[0] if values else 0,))]}
    elif len(values) != 2:
        return [f": expected values with two dims, got {list(values)}"]
    else:
        n_groups = [2 * values[1] // group for group in GROUPS if 2 * values[1] % group == 0]
        found = next((one[1][0] for one in beside.values() if one and len(one[1]) == 2 and one[1][0] in n_groups), None)
        shapes = [(n, values[0]) for n in ([found] if found is not None else n_groups[:1])]
        fitting = {SCALE: [("F16", shape) for shape in shapes], ZEROS: [("U8", shape) for shape in shapes]}
    problems = []
    for suffix, allowed in fitting.items():
        one = beside.get(suffix)
        if one not in allowed:
            expected = " or ".join(f"{dtype} {list(shape)}" for dtype, shape in allowed) or "columns in groups of 32"
            got = "nothing" if one is None else f"{one[0]} {list(one[1])}"
            problems.append(f"{suffix}: expected {expected} beside {kind} values, got {got}")
    return problems


def checked_matrix(values: Tensor, beside: Mapping[str, Tensor], name: str) -> QuantizedMatrix:
    """The matrix of stored tensors. Raises: CheckpointError for scales or zeros out of range."""
    scale, zeros = beside[SCALE], beside.get(ZEROS)
    if not (scale.isfinite() & (scale >= 0)).all():
        bad = scale[~(scale.isfinite() & (scale >= 0))][0].item()
        raise CheckpointError(name + SCALE, expected="finite scales that are not negative", got=bad)
    if zeros is not None and (zeros > 16).any():
        raise CheckpointError(name + ZEROS, expected="zeros up to 16", got=int(zeros.max()))
    return QuantizedMatrix(values, scale, zeros)


def checked_values(matrix: QuantizedMatrix, name: str) -> QuantizedMatrix:
    """The matrix, whose values are checked on their device. Raises: CheckpointError for NaN among fp8 values.

    Values of other kinds are always finite.
    """
    if matrix.kind == "fp8" and _has_nan(matrix.values.view(torch.uint8).flatten()):
        raise CheckpointError(name, expected="finite fp8 values", got="NaN")
    return matrix


def _has_nan(stored: Tensor) -> bool:
    """Whether a byte of fp8 values is NaN."""
    if stored.device.type != "cpu":
        return int((stored & _FP8_NAN).max()) == _FP8_NAN
    # By NumPy, on this thread alone: threads of torch wait for each other, on a busy machine longer than this takes.
    blocks = np.split(stored.numpy(), range(_BLOCK_BYTES, len(stored), _BLOCK_BYTES))
    return any(int((block & _FP8_NAN).max()) == _FP8_NAN for block in blocks)


def matrices_in(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor | QuantizedMatrix]:
    """The weights of a file: int8 values and their scale as one matrix, other tensors as they are.

    Args:
        tensors: of a `.pt` file with a declaration.
        where: name of the file, for errors.
    Raises: CheckpointError for int8 values without a fitting scale.
    """
    matrices = [name for name, tensor in tensors.items() if tensor.dtype is torch.int8]
    scales = {name + SCALE for name in matrices}
    weights: dict[str, Tensor | QuantizedMatrix] = {
        name: tensor for name, tensor in tensors.items() if name not in scales
    }
    for name in matrices:
        values, scale = tensors[name], tensors.get(name + SCALE)
        about = None if scale is None else (_type_name(scale), tuple(scale.shape))
        for problem in problems_beside("int8", tuple(values.shape), {SCALE: about}):
            raise CheckpointError(where, expected="int8 weights with scales", got=f"{name}{problem}")
        assert scale is not None
        weights[name] = checked_matrix(values, {SCALE: scale}, f"{where}: {name}")
    return weights


def _type_name(tensor: Tensor) -> str:
    return "F32" if tensor.dtype is torch.float32 else str(tensor.dtype)
