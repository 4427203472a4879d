"""Int4 matrices as AWQ and GPTQ folders store them, converted to `QuantizedMatrix` without rounding.

A matrix `NAME.weight` [N, K] is stored as `NAME.qweight`, `NAME.qzeros` and `NAME.scales` [K / group, N], eight values
in an int32. `models.checkpoint.public_layout` reads the declaration.

| method | qweight | order in an int32 | zero |
|---|---|---|---|
| awq (gemm) | [K, N / 8] | rows 0, 2, 4, 6, 1, 3, 5, 7 | as stored |
| gptq | [K / 8, N] | columns 0 to 7 | stored less one; as stored in format gptq_v2 |
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.checkpoint.packing import StoredShape
from models.checkpoint.precision import GROUPS
from models.checkpoint.public_layout import PublicLayout
from models.checkpoint.quantized import QuantizedMatrix, packed_nibbles
from models.errors import CheckpointError

PER_WORD = 8  # values of an int32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of rows 0 to 7 in an int32
_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class PublicInt4:
    """A stored matrix before its conversion. parts: tensors by the suffixes of the layout."""

    layout: PublicLayout
    name: str
    parts: Mapping[str, Tensor]

    def matrix(self, device: torch.device | str = "cpu") -> QuantizedMatrix:
        """The same values, scales and zeros, converted on the device.

        Groups above 128 columns become several with equal scales.

        Raises: CheckpointError for columns in another order (`desc_act`), and for scales that are not finite.
        """
        parts = {suffix: tensor.to(device) for suffix, tensor in self.parts.items()}
        n_groups = len(parts["scales"])
        if self.layout.method == "awq":
            values = _awq_words(parts["qweight"]).T
            zeros = _awq_words(parts["qzeros"])
        else:
            values = _words(parts["qweight"].T)
            zeros = _words(parts["qzeros"])
        group = values.shape[1] // n_groups
        if "g_idx" in parts:
            order = torch.arange(values.shape[1], device=values.device, dtype=parts["g_idx"].dtype) // group
            if not torch.equal(parts["g_idx"], order):
                raise CheckpointError(
                    f"{self.name}: g_idx", expected="columns in their order", got="another (desc_act)"
                )
        scale, zeros = parts["scales"].half(), zeros + self.layout.zero_plus
        if not (scale.isfinite() & (scale >= 0)).all():
            raise CheckpointError(f"{self.name}: scales", expected="finite scales that are not negative", got="others")
        if group > GROUPS[0]:
            scale, zeros = (one.repeat_interleave(group // GROUPS[0], 0) for one in (scale, zeros))
        return QuantizedMatrix(
            packed_nibbles(values.unflatten(1, (len(scale), -1))), scale.contiguous(), zeros.contiguous()
        )


def matrix_shape(layout: PublicLayout, stored: tuple[int, ...]) -> tuple[int, ...]:
    """Shape [N, K] of the weight whose qweight has a shape."""
    if len(stored) != 2:
        return stored
    rows, columns = stored
    return (PER_WORD * columns, rows) if layout.method == "awq" else (columns, PER_WORD * rows)


def problems_of_parts(layout: PublicLayout, parts: Mapping[str, StoredShape]) -> list[str]:
    """What is wrong with the stored types and shapes of a matrix's parts."""
    dtype, stored = parts["qweight"]
    if dtype != "I32" or len(stored) != 2:
        return [f"qweight: expected I32 with two dims, got {dtype} {list(stored)}"]
    N, K = matrix_shape(layout, stored)
    group = K if layout.group == -1 else layout.group
    if group <= 0 or K % group or not (group in GROUPS or group % GROUPS[0] == 0):
        return [f"qweight: expected groups of 32, 64 or a multiple of 128 that divide {K} columns, got {group}"]
    expected: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
        "qzeros": (("I32",), (K // group, N // PER_WORD)),
        "scales": (_FLOATS, (K // group, N)),
    }
    if "g_idx" in parts:
        expected["g_idx"] = (("I32",), (K,))
    problems = []
    for suffix, (dtypes, shape) in expected.items():
        found = parts.get(suffix)
        if found is None or found[0] not in dtypes or found[1] != shape:
            got = "nothing" if found is None else f"{found[0]} {list(found[1])}"
            problems.append(f"{suffix}: expected {' or '.join(dtypes)} {list(shape)}, got {got}")
    return problems


def _words(packed: Tensor) -> Tensor:
    """Values [R, 8 C] uint8 of int32 [R, C], the lowest bits first."""
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    words = packed.contiguous()[..., None] >> shifts
    return words.bitwise_and(15).to(torch.uint8).flatten(1)


def _awq_words(packed: Tensor) -> Tensor:
    """As `_words`, in AWQ's order."""
    words = _words(packed).view(len(packed), -1, PER_WORD)
    return words[..., list(_AWQ_PLACES)].flatten(1)
