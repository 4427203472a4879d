"""Which row of the vision encoder's square position table a patch reads.

A patch at fraction i / n of a side of n patches reads one of `side` buckets of equal width. Where
i / n falls on a bucket's edge, rounding decides, and the weights were trained with one particular rounding. For
the released table side the buckets are therefore data; `bucket_formula` repeats that rounding and serves all
other sides and lengths.
"""

import math
from functools import cache
from pathlib import Path

import numpy as np

TABLE_SIDE = 70  # of the released encoder: 980 px / 14 px
# Row n - 1 of the table: the buckets of a side of n patches, n numbers. Rows stand one after the other.
TABLE = Path(__file__).with_name("position_buckets.npy")
LANES = 8


def position_ids(rows: int, cols: int, *, table_side: int = TABLE_SIDE) -> np.ndarray:
    """[rows * cols] int64 table rows of the patches of a slice, row by row."""
    down, across = position_buckets(rows, table_side), position_buckets(cols, table_side)
    return (down[:, None] * table_side + across).reshape(-1)


def position_buckets(n: int, table_side: int = TABLE_SIDE) -> np.ndarray:
    """[n] int64 in 0..table_side - 1: the buckets of a side of n >= 1 patches."""
    assert n >= 1, n
    table = bucket_table()
    if table_side == TABLE_SIDE and n <= len(table):
        return table[n - 1]
    return bucket_formula(n, table_side)


@cache
def bucket_table() -> tuple[np.ndarray, ...]:
    """The shipped buckets: entry n - 1 is [n] int64 for a side of n patches."""
    flat = np.load(TABLE).astype(np.int64)
    flat.setflags(write=False)
    longest = int((2 * flat.size) ** 0.5)
    starts = np.cumsum(np.arange(longest + 1))
    return tuple(flat[start : start + n] for n, start in enumerate(starts[:-1], start=1))


def bucket_formula(n: int, table_side: int) -> np.ndarray:
    """[n] int64 buckets, computed: how many inner edges j / table_side lie at or below i / n."""
    step = 1 / table_side
    fractions = _ramp(0.0, float(np.float32(1) / np.float32(n)), n)
    edges = _ramp(step, step, math.ceil((1 - step) / step))
    return np.searchsorted(edges, fractions, side="right").astype(np.int64)


def _ramp(start: float, step: float, n: int) -> np.ndarray:
    """start + step * k for k < n in float32, as an eight-lane vector unit counts in blocks of two.

    The first of eight values is rounded, the others are counted from it and rounded again; what is left after
    the last whole block is rounded once. These are the numbers training saw.
    """
    k = np.arange(n)
    first = (start + step * (k // LANES * LANES)).astype(np.float32)
    values = (first + step * (k % LANES)).astype(np.float32)
    whole = n // (2 * LANES) * 2 * LANES
    values[whole:] = start + step * k[whole:]
    return values
