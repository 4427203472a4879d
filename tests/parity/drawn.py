"""Tensors that torch drew on a CPU with `normal_`, told by seed and position, with a correction for each value.

Every value of such a tensor comes from two outputs of the Mersenne twister by the Box-Muller transform, 16 values of 16
outputs at a time. Here the transform is computed with operations that IEEE 754 rounds exactly, so that all machines get
the same prediction. It differs from torch's by a few units in the last place: the stored correction, mostly 0.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

BLOCK = 16
ESCAPE = 255  # in place of a correction that takes more than a byte: the value itself is stored


@dataclass(frozen=True)
class Drawn:
    """Where the values of a tensor come from.

    Args:
        seed: of the generator.
        spans: position of the first output and number of values, of each run of blocks; in order. A run may end
            inside of a block: torch draws the last 16 values of a tensor again if its size is not a multiple of 16.
        mean, std: of the distribution.
    """

    seed: int
    spans: list[tuple[int, int]]
    mean: float
    std: float

    def values(self, outputs: np.ndarray) -> np.ndarray:
        """[n] float32, predicted from the generator's outputs."""
        runs = [(start, n, np.arange(-(-n // BLOCK) * BLOCK)) for start, n in self.spans]
        places = np.concatenate([start + run for start, _, run in runs])
        is_kept = np.concatenate([run < n for _, n, run in runs])
        normal = box_muller(outputs[places])[is_kept].astype(np.float64)
        values: np.ndarray = (normal * self.std + self.mean).astype(np.float32)
        return values

    @property
    def end(self) -> int:
        """Number of outputs that are needed."""
        return max(start + n for start, n in self.spans) + BLOCK

    def entry(self) -> dict[str, Any]:
        return asdict(self)


def outputs_of(seed: int, n: int) -> np.ndarray:
    """[n] uint32: the first outputs of the generator."""
    return np.random.RandomState(seed).randint(0, 2**32, size=n, dtype=np.uint32)


def box_muller(outputs: np.ndarray) -> np.ndarray:
    """[n] float32 normal values of n outputs, n a multiple of 16."""
    uniform = ((outputs & 0xFFFFFF).astype(np.float64) / 2**24).reshape(-1, 2, BLOCK // 2)
    logarithm = _log(1 - uniform[:, 0]).astype(np.float32)
    radius = np.sqrt(np.float32(-2) * logarithm)
    theta = np.float32(2 * math.pi) * uniform[:, 1].astype(np.float32)
    cosine, sine = (part.astype(np.float32) for part in _cosine_and_sine(theta.astype(np.float64)))
    return np.stack([radius * cosine, radius * sine], axis=1).ravel()


def corrections(values: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[n] uint8 for each value, and the values whose correction is ESCAPE."""
    difference = _order(values) - _order(predicted)
    code = np.where(difference < 0, -2 * difference - 1, 2 * difference)
    small = np.minimum(code, ESCAPE).astype(np.uint8)
    again = corrected(predicted, small, values[small == ESCAPE])
    small[again.view(np.int32) != values.view(np.int32)] = ESCAPE  # zeros with a sign
    return small, values[small == ESCAPE]


def corrected(predicted: np.ndarray, small: np.ndarray, escaped: np.ndarray) -> np.ndarray:
    """The values of which `corrections` made the other two."""
    code = small.astype(np.int64)
    order = _order(predicted) + np.where(code % 2, -(code + 1) // 2, code // 2)
    values = np.where(order < 0, -(2**31) - order, order).astype(np.int64)
    bits = (values & 0xFFFFFFFF).astype(np.uint32)
    result: np.ndarray = bits.view(np.float32).copy()
    result[small == ESCAPE] = escaped
    return result


def _order(values: np.ndarray) -> np.ndarray:
    """[n] int64: neighbouring floats have neighbouring numbers."""
    bits = values.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(2**31) - bits, bits)


def _log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of values in (0, 1]."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa, exponent = np.where(low, 2 * mantissa, mantissa), np.where(low, exponent - 1, exponent)
    s = (mantissa - 1) / (mantissa + 1)
    square, total = s * s, np.zeros_like(s)
    for power in range(21, 0, -2):
        total = total * square + 1 / power
    return exponent * math.log(2) + 2 * s * total


def _cosine_and_sine(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of angles from 0 to 2 pi."""
    quarter = np.rint(x * (2 / math.pi))
    rest = x - quarter * (math.pi / 2)
    square, cosine, sine = rest * rest, np.zeros_like(rest), np.zeros_like(rest)
    for order in range(9, -1, -1):
        cosine = cosine * square + (-1) ** order / math.factorial(2 * order)
        sine = sine * square + (-1) ** order / math.factorial(2 * order + 1)
    sine = sine * rest
    turned = quarter.astype(np.int64) % 4
    return (
        np.choose(turned, [cosine, -sine, -cosine, sine]),
        np.choose(turned, [sine, cosine, -sine, -cosine]),
    )
