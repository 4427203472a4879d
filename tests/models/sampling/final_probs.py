"""The distribution that the text sampler draws from, for comparisons."""

import torch
from torch import Tensor

from models.sampling.text import SamplerState, TokenSets, keep_top, penalise


def final_probs(
    logits: Tensor, slots: Tensor, state: SamplerState, sets: TokenSets, candidates: int | None = None
) -> Tensor:
    """[B, V] float32 distribution of `sample_text` where neither the stop probe nor the listen rank rule decides."""
    scores = penalise(logits, slots, state, sets)
    ids, weights = keep_top(scores, state.temperature[slots], state.top_k[slots], state.top_p[slots], candidates)
    shares = (weights.double() / weights.sum(1, keepdim=True)).float()
    return torch.zeros_like(logits, dtype=torch.float32).scatter(1, ids, shares)
