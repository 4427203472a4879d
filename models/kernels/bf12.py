"""bf12: bfloat16 weights in 12 bits, without loss, as the products of `models.kernels.bf12_gemm` read them.

A bfloat16 number has a low byte, which is the last bit of its exponent and seven bits of mantissa, and a high byte of
its sign and seven bits of exponent. The high bytes of nearly all numbers of a row lie within eight steps of the
largest, so that three bits tell which. A number that is too small for that, about one in 13 000 of normally
distributed ones, is an exception: it is stored as a whole beside its row. Does not require Triton.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 256  # columns
GROUP_WORDS = GROUP * 12 // 32
MAX_COLUMNS = 1 << 15  # a column of an exception takes 15 bits
LEAST_ENTRIES, MOST_ENTRIES = 4, 16  # for the exceptions of a row; those beyond four are read one after the other
_STEPS = 8
_ENCODED_AT_ONCE = 1 << 24  # numbers, which bounds the memory that encoding takes


class Bf12Matrix(NamedTuple):
    """A weight [N, K].

    A group of 256 columns has 32 words of low bytes of its first half, 32 of its second, and 32 with the bits of the
    high bytes of both halves: of the first, the sign in bit 7 of a byte and the step in bits 2 to 0; of the second the
    same in the word rotated to the left by four bits. Column 32 i + j of a half is byte 2 (i % 2) + j % 2 of word
    j - j % 2 + i // 2. In the place of an exception is the smallest number that the row's tiles can have, with its
    sign; entries that a row does not need have that number, positive, and column 0.

    Attributes:
        values: [N, 3 K / 8] int32, whole groups.
        smallest: [N] uint8, the high byte, without sign, of numbers with step 0.
        exceptions: [E, N] int32, E >= 4: column in the high half, the number's bits in the low half.
    """

    values: Tensor
    smallest: Tensor
    exceptions: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return len(self.values), self.values.shape[1] // GROUP_WORDS * GROUP

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.smallest.nbytes + self.exceptions.nbytes


def bf12_bytes(n_rows: int, n_columns: int) -> int:
    """Bytes of a matrix without more exceptions than each row has entries for; 0 for a shape that is not encoded."""
    if not _fits((n_rows, n_columns)):
        return 0
    return n_rows * (n_columns // GROUP * GROUP_WORDS * 4 + 1 + 4 * LEAST_ENTRIES)


def encode(weight: Tensor) -> Bf12Matrix | None:
    """A weight [N, K] in 12 bits, on its device.

    Returns: None if its columns are not whole groups, if a number is not one of bfloat16 or not finite, and if a row
        has more than 16 exceptions.
    """
    if not _fits(tuple(weight.shape)):
        return None
    parts = list(_encoded_blocks(weight))
    if any(part is None for part in parts):
        return None
    matrices = [part for part in parts if part is not None]
    n_entries = max(len(part.exceptions) for part in matrices)
    exceptions = [_filled(part, n_entries) for part in matrices]
    return Bf12Matrix(
        torch.cat([part.values for part in matrices]),
        torch.cat([part.smallest for part in matrices]),
        torch.cat(exceptions, dim=1),
    )


def _fits(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[0] > 0 and 0 < shape[1] < MAX_COLUMNS and shape[1] % GROUP == 0


def _encoded_blocks(weight: Tensor) -> Iterator[Bf12Matrix | None]:
    for block in weight.detach().split(max(1, _ENCODED_AT_ONCE // weight.shape[1])):
        rows = block.bfloat16()
        yield _encoded(rows) if rows.isfinite().all() and torch.equal(rows.to(block.dtype), block) else None


def _encoded(rows: Tensor) -> Bf12Matrix | None:
    """Finite rows [N, K] bfloat16."""
    bits = rows.contiguous().view(torch.int16)
    high, low, sign = (bits >> 8) & 127, (bits & 255).to(torch.uint8), bits < 0
    smallest = (high.amax(1) - (_STEPS - 1)).clamp_min(0)
    step = high - smallest[:, None]
    is_exception = step < 0
    counts = is_exception.sum(1)
    n_entries = max(int(counts.max()), LEAST_ENTRIES)
    if n_entries > MOST_ENTRIES:
        return None
    matrix = Bf12Matrix(
        _interleaved(low.masked_fill(is_exception, 0), step.clamp_min(0).to(torch.uint8) | sign.to(torch.uint8) << 7),
        smallest.to(torch.uint8),
        torch.empty(0, len(rows), dtype=torch.int32, device=rows.device),
    )
    exceptions = _filled(matrix, n_entries)
    row, column = is_exception.nonzero(as_tuple=True)
    entry = torch.arange(len(row), device=rows.device) - (counts.cumsum(0) - counts)[row]
    exceptions[entry, row] = column.int() << 16 | bits[row, column].int() & 0xFFFF
    return matrix._replace(exceptions=exceptions)


def _filled(matrix: Bf12Matrix, n_entries: int) -> Tensor:
    """The exceptions with n_entries for each row."""
    filling = matrix.smallest.int() << 8
    missing = n_entries - len(matrix.exceptions)
    return torch.cat((matrix.exceptions, filling.expand(missing, -1)))


def _interleaved(low: Tensor, codes: Tensor) -> Tensor:
    """The words of rows. low, codes: [N, K] uint8, low bytes, and signs with steps."""
    lower, upper = _words(low), _words(codes)
    turned = (upper[:, :, 1] >> 4) & 0x0FFFFFFF | upper[:, :, 1] << 28
    return torch.cat((lower.flatten(2), upper[:, :, 0] | turned), dim=2).flatten(1)


def _words(columns: Tensor) -> Tensor:
    """Bytes [N, K] as words [N, groups, 2, 32] of both halves of each group."""
    # Halves; two times two quarters of a half; pairs of words.
    pairs = columns.unflatten(1, (-1, 2, 2, 2, GROUP // 16, 2))
    return pairs.permute(0, 1, 2, 5, 3, 4, 6).flatten(5).view(torch.int32).flatten(3)
