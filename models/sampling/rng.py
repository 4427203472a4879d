"""Random numbers that depend on (seed, draw number, stream) and on nothing else, and draws by weight.

A counter-based generator has no state to share, so a session's numbers do not change with its slot,
its batch row or its neighbours. Weights are fixed-point integers, since integer sums come out the
same in any order: the drawn index is then a pure function of weights and number on every device.

Knows nothing about tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# One number per draw and stream; two questions asked in the same step must use different streams.
STREAM_STOP_PROBE = 0
STREAM_TEXT = 1
STREAM_SPEECH = 2
N_STREAMS = 8

WEIGHT_ONE = 2**40  # weight of the likeliest entry; 2**22 such entries still sum without overflow
SCAN_BLOCK = 1024

_MASK32 = 0xFFFFFFFF
_MULTIPLIER = 0xD256D193
_KEY_STEP = 0x9E3779B9
_N_ROUNDS = 10


def philox2x32(low: Tensor, high: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Ten rounds of Philox2x32 on int64 tensors that hold 32-bit words; returns two such tensors.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    for n in range(_N_ROUNDS):
        # Halves of 16 bits: each product stays below 2**48, so a signed 64-bit word never overflows.
        product_low = _MULTIPLIER * (low & 0xFFFF)
        product_high = _MULTIPLIER * (low >> 16)
        upper = (product_high + (product_low >> 16)) >> 16
        lower = (product_low + ((product_high & 0xFFFF) << 16)) & _MASK32
        round_key = (key + n * _KEY_STEP) & _MASK32
        low, high = upper ^ round_key ^ high, lower
    return low, high


def uniform(seed: Tensor, draw: Tensor, stream: int) -> Tensor:
    """Numbers in [0, 1) with 53 random bits.

    Args:
        seed: [B] int64; all 64 bits count.
        draw: [B] int64, the number of draws this seed has made; repeats after 2**29.
        stream: which question the number answers, below N_STREAMS.
    Returns: [B] float64.
    """
    assert 0 <= stream < N_STREAMS, stream
    counter = (draw * N_STREAMS + stream) & _MASK32
    first, second = philox2x32(counter, (seed >> 32) & _MASK32, seed & _MASK32)
    return ((first << 21) | (second >> 11)).double() * 2.0**-53


def fixed_point_weights(scores: Tensor, peak: Tensor) -> Tensor:
    """exp(scores - peak) as integers, WEIGHT_ONE at the peak; below 2**-40 of it the weight is 0.

    Args:
        scores: [B, N] float32 logits; -inf weighs nothing.
        peak: [B] float32, the largest score of the row; a row where it is not finite weighs nothing at all.
    Returns: [B, N] int64.
    """
    weights = torch.exp(scores - peak[:, None]) * WEIGHT_ONE
    return torch.where(peak.isfinite()[:, None], weights, 0.0).long()


def draw_index(weights: Tensor, number: Tensor) -> Tensor:
    """Inverse of the cumulative weights at `number`.

    Args:
        weights: [B, N] int64, not negative.
        number: [B] float64 in [0, 1).
    Returns: [B] int64, an index of positive weight; 0 in a row without any weight.
    """
    cumulative = running_sum(weights)
    total = cumulative[:, -1]
    # The product may round up to the total itself.
    target = torch.minimum((number * total.double()).long(), total - 1)
    return (cumulative <= target[:, None]).sum(1)


def running_sum(weights: Tensor) -> Tensor:
    """Cumulative sum of [B, N] int64 along the row, exact.

    In two levels: a vocabulary is too long for one block of threads, and the one-level scan that Inductor splits
    over several fails to compile for batches (torch 2.11, CUDA).
    """
    B, N = weights.shape
    blocks = F.pad(weights, (0, -N % SCAN_BLOCK)).view(B, -1, SCAN_BLOCK).cumsum(2)
    totals = blocks[..., -1]
    before = totals.cumsum(1) - totals
    return (blocks + before[..., None]).view(B, -1)[:, :N]
