"""Draws of codes: repetition penalty, end mask, temperature, top-k, top-p, and the draw itself, for every row at once.

Every slot has its own settings and seed. A number is a function of seed, frame and code group, so a slot's codes do not
depend on the other rows of the batch.
"""

import torch
from torch import Tensor

from models.qwen3_tts.config import CONTROL_CODES
from models.qwen3_tts.settings import MIN_FRAMES
from models.qwen3_tts.state import TalkerState
from models.sampling.rng import STREAM_SPEECH, draw_index, fixed_point_weights, running_sum, uniform
from models.sampling.text import NEVER, best


def allowed_scores(logits: Tensor, slots: Tensor, state: TalkerState, eos_id: int) -> Tensor:
    """Logits [B, V] of first codes after repetition penalty, end mask and mask of control codes. Excluded: -inf."""
    penalty = state.repetition_penalty[slots, None]
    lowered = torch.where(logits < 0, logits * penalty, logits / penalty)
    scores = torch.where(state.seen[slots], lowered, logits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    is_end = ids == eos_id
    is_control = (ids >= logits.shape[1] - CONTROL_CODES) & ~is_end
    too_early = (state.frames[slots] < MIN_FRAMES)[:, None] & is_end
    return scores.masked_fill(is_control | too_early, NEVER)


def keep_codes(
    scores: Tensor, slots: Tensor, state: TalkerState, which: int, candidates: int | None
) -> tuple[Tensor, Tensor]:
    """Codes and scores that temperature, top-k and top-p leave, best first, equal scores by ascending code.

    Ties at the k-th rank are kept. Top-p drops the largest set of worst codes whose probabilities sum to 1 - p or less,
    and keeps one at least.

    Args:
        scores: [B, V] float32.
        which: FIRST or REST, the column of the settings.
        candidates: None sorts all codes and is exact for any settings. A number sorts only that many of the best codes,
            which is exact where 0 < top_k and top_k and the ties at its rank fit it.
    Returns: codes [B, C or V] int64 and scores [B, C or V], -inf for those that are dropped.
    """
    top_k, top_p = state.top_k[slots, which], state.top_p[slots, which]
    values, codes = best(scores / state.temperature[slots, which, None], candidates)
    n_values = values.shape[1]
    last_kept = values.gather(1, top_k.clamp(1, n_values)[:, None] - 1)
    values = torch.where((values >= last_kept) | (top_k == 0)[:, None], values, NEVER)

    weights = fixed_point_weights(values, values[:, 0])
    total = weights.sum(1)
    from_here_down = total[:, None] - (running_sum(weights) - weights)
    allowed_tail = (total.double() * (1 - top_p.double())).long()
    is_best = torch.arange(n_values, device=scores.device) == 0
    kept = (from_here_down > allowed_tail[:, None]) | is_best | (top_p >= 1)[:, None]
    return codes, torch.where(kept, values, NEVER)


def final_scores(scores: Tensor, slots: Tensor, state: TalkerState, which: int) -> Tensor:
    """Scores [B, V] of which the draw uses the softmax; dropped codes are -inf."""
    codes, values = keep_codes(scores, slots, state, which, None)
    return torch.full_like(scores, NEVER).scatter(1, codes, values)


def draw_codes(
    scores: Tensor, slots: Tensor, state: TalkerState, draws: Tensor, which: int, candidates: int | None
) -> Tensor:
    """One code of each slot's next frame.

    Args:
        scores: [B, V] of any float type.
        slots: [B] int64.
        state: read only.
        draws: [B] int64 number of the code in its slot's answer: frame * 16 + group.
        which: FIRST or REST, the column of the settings.
        candidates: as for `keep_codes`.
    Returns: [B] int64.
    """
    scores = scores.float()
    codes, values = keep_codes(scores, slots, state, which, candidates)
    # In the order of the codes, as the kernel draws: it does not sort.
    weights = torch.zeros_like(scores, dtype=torch.int64)
    weights = weights.scatter(1, codes, fixed_point_weights(values, values[:, 0]))
    drawn = draw_index(weights, uniform(state.seed[slots], draws, STREAM_SPEECH))
    return torch.where(state.greedy[slots, which], scores.argmax(1), drawn)
