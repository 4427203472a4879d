"""The best scores first, sorted by NumPy on a CPU."""

import math

import torch

from models.sampling.text import best


def test_all_scores_in_the_order_of_a_stable_sort():
    """Ties, both zeros and infinities included."""
    torch.manual_seed(0)
    scores = torch.randn(3, 6562).round(decimals=2)
    scores[:, ::7], scores[:, 3::11], scores[:, 5::13], scores[1, 9] = 0.0, -0.0, -math.inf, math.inf
    expected = scores.sort(dim=1, descending=True, stable=True)
    for got, one in zip(best(scores, None), expected, strict=True):
        assert torch.equal(got, one), f"expected {one}, got {got}"
