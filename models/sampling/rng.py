"""Counter-based random numbers as a function of (seed, draw number, stream), and draws by weight.

The generator has no shared state, so the numbers of a session do not depend on its slot, its batch row or other
sessions. Weights are fixed-point integers, because an integer sum does not depend on its order: the drawn index is
the same function of weights and number on every device.
"""

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Word = TypeVar("Word", int, Tensor)

# A (draw, stream) pair gives one number; two decisions of the same step use different streams.
STREAM_STOP_PROBE = 0
STREAM_TEXT = 1
STREAM_SPEECH = 2
N_STREAMS = 8

WEIGHT_ONE = 2**40  # weight of the most probable entry; the sum of 2**22 such entries does not overflow
SCAN_BLOCK = 1024
MAX_ON_HOST = 32  # up to this many numbers, Python's integers are faster than 60 operations on tensors

_MASK32 = 0xFFFFFFFF
_MULTIPLIER = 0xD256D193
_KEY_STEP = 0x9E3779B9
_N_ROUNDS = 10


def is_eager_on_cpu(tensor: Tensor) -> bool:
    """Whether the host may read the tensor at once: it is in host memory, and no graph is traced."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def philox2x32(low: Word, high: Word, key: Word) -> tuple[Word, Word]:
    """Ten rounds of Philox2x32 on numbers, or int64 tensors, of 32-bit words.

    Returns: two such words.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    for n in range(_N_ROUNDS):
        product = _MULTIPLIER * low  # modulo 2**64: the words below come out right although the sign bit may be set
        low, high = ((product >> 32) ^ (key + n * _KEY_STEP) ^ high) & _MASK32, product & _MASK32
    return low, high


def uniform(seed: Tensor, draw: Tensor, stream: int) -> Tensor:
    """Numbers in [0, 1) with 53 random bits.

    Args:
        seed: [B] int64, all 64 bits used.
        draw: [B] int64, number of draws made with this seed before; numbers repeat after 2**29 draws.
        stream: index of the decision within the step, below N_STREAMS.
    Returns: [B] float64.
    """
    assert 0 <= stream < N_STREAMS, stream
    if len(seed) <= MAX_ON_HOST and is_eager_on_cpu(seed):
        pairs = zip(seed.numpy().tolist(), draw.numpy().tolist(), strict=True)
        return torch.tensor([_uniform(*pair, stream) for pair in pairs], dtype=torch.float64)
    counter = (draw * N_STREAMS + stream) & _MASK32
    first, second = philox2x32(counter, (seed >> 32) & _MASK32, seed & _MASK32)
    return ((first << 21) | (second >> 11)).double() * 2.0**-53


def _uniform(seed: int, draw: int, stream: int) -> float:
    first, second = philox2x32((draw * N_STREAMS + stream) & _MASK32, (seed >> 32) & _MASK32, seed & _MASK32)
    return ((first << 21) | (second >> 11)) * 2.0**-53


def fixed_point_weights(scores: Tensor, peak: Tensor) -> Tensor:
    """exp(scores - peak) as integers: WEIGHT_ONE at the peak, 0 below 2**-40 of the peak.

    Args:
        scores: [B, N] float32 logits; the weight of -inf is 0.
        peak: [B] float32, the largest score of the row; all weights of a row are 0 if it is not finite.
    Returns: [B, N] int64.
    """
    weights = torch.exp(scores - peak[:, None]) * WEIGHT_ONE
    return torch.where(peak.isfinite()[:, None], weights, 0.0).long()


def draw_index(weights: Tensor, number: Tensor) -> Tensor:
    """The index drawn by weight: the inverse of the cumulative weights at `number`.

    Args:
        weights: [B, N] int64, none negative.
        number: [B] float64 in [0, 1).
    Returns: [B] int64, an index of positive weight; 0 in a row without any weight.
    """
    cumulative = running_sum(weights)
    total = cumulative[:, -1]
    # The product may round up to the total, which is one too many.
    target = torch.minimum((number * total.double()).long(), total - 1)
    return (cumulative <= target[:, None]).sum(1)


def running_sum(weights: Tensor) -> Tensor:
    """Exact cumulative sum of [B, N] int64 along each row.

    Computed in two levels: a vocabulary does not fit one thread block, and Inductor's one-level scan over several
    blocks fails to compile for batches (torch 2.11, CUDA). Eager operations on a CPU need one level.
    """
    if is_eager_on_cpu(weights):
        return weights.cumsum(1)
    B, N = weights.shape
    blocks = F.pad(weights, (0, -N % SCAN_BLOCK)).view(B, -1, SCAN_BLOCK).cumsum(2)
    totals = blocks[..., -1]
    before = totals.cumsum(1) - totals
    return (blocks + before[..., None]).view(B, -1)[:, :N]
