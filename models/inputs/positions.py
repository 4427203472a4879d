"""Rows of the vision encoder's square position table for the patches of a slice.

Patch i of a side of n patches is at fraction i / n and reads one of `side` buckets of equal width. If i / n is on the
edge of a bucket, rounding decides, and the weights were trained with one particular rounding. The buckets for the
released table side are therefore data. `bucket_formula` reproduces that rounding for other sides and lengths.
"""

import math
from functools import cache
from pathlib import Path

import numpy as np

TABLE_SIDE = 70  # of the released encoder: 980 px / 14 px
# Row n - 1 contains the n buckets of a side of n patches; the rows are concatenated.
TABLE = Path(__file__).with_name("position_buckets.npy")
LANES = 8


def position_ids(rows: int, cols: int, *, table_side: int = TABLE_SIDE) -> np.ndarray:
    """[rows * cols] int64 table rows of the patches of a slice, in row-major order."""
    down, across = position_buckets(rows, table_side), position_buckets(cols, table_side)
    ids: np.ndarray = (down[:, None] * table_side + across).reshape(-1)
    return ids


def position_buckets(n: int, table_side: int = TABLE_SIDE) -> np.ndarray:
    """[n] int64 in 0..table_side - 1: the buckets of a side of n >= 1 patches."""
    assert n >= 1, n
    table = bucket_table()
    if table_side == TABLE_SIDE and n <= len(table):
        return table[n - 1]
    return bucket_formula(n, table_side)


@cache
def bucket_table() -> tuple[np.ndarray, ...]:
    """The buckets in TABLE: entry n - 1 is [n] int64, for a side of n patches."""
    flat = np.load(TABLE).astype(np.int64)
    flat.setflags(write=False)
    longest = int((2 * flat.size) ** 0.5)
    starts = np.cumsum(np.arange(longest + 1))
    return tuple(flat[start : start + n] for n, start in enumerate(starts[:-1], start=1))


def bucket_formula(n: int, table_side: int) -> np.ndarray:
    """[n] int64 computed buckets: for each i, the number of inner edges j / table_side at or below i / n."""
    step = 1 / table_side
    fractions = _ramp(0.0, float(np.float32(1) / np.float32(n)), n)
    edges = _ramp(step, step, math.ceil((1 - step) / step))
    buckets: np.ndarray = np.searchsorted(edges, fractions, side="right").astype(np.int64)
    return buckets


def _ramp(start: float, step: float, n: int) -> np.ndarray:
    """start + step * k for k < n in float32, with the rounding of an eight-lane vector unit that processes two vectors
    at a time.

    The first of eight values is rounded, and the others are computed from it and rounded again. Values after the last
    complete block of 16 are rounded once. Training used these numbers.
    """
    k = np.arange(n)
    first = (start + step * (k // LANES * LANES)).astype(np.float32)
    values = (first + step * (k % LANES)).astype(np.float32)
    whole = n // (2 * LANES) * 2 * LANES
    values[whole:] = start + step * k[whole:]
    return values
