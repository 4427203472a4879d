"""The text sampler in plain NumPy, one row at a time. An example of hypothesis that rounding may decide is left out."""

import math

import numpy as np
from hypothesis import assume

from models.sampling.settings import TextSampling
from models.sampling.text import TokenSet


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores.astype(np.float64) - np.float64(scores.max()))
    return weights / weights.sum()


def plain_scores(logits: np.ndarray, history: list[int], s: TextSampling, t: TokenSet) -> np.ndarray:
    scores = logits.astype(np.float32).copy()
    scores[list(t.forbidden)] = -math.inf
    recent = history[-s.repetition_window :] if s.repetition_window else []
    for token in set(recent):
        divide = s.sign_blind or scores[token] > 0
        factor = np.float32(s.repetition_penalty)
        scores[token] = scores[token] / factor if divide else scores[token] * factor
    for token in t.length_ids:
        factor = np.float32(s.length_penalty)
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    if t.listen_id is not None and s.listen_scale != 1:
        if s.listen_scale_on_probability:
            scores[t.listen_id] += np.log(np.float32(s.listen_scale))
        else:
            scores[t.listen_id] *= np.float32(s.listen_scale)
    return scores


def plain_kept(scores: np.ndarray, s: TextSampling) -> list[tuple[int, float]]:
    """(id, probability before renormalization) of the entries kept by top-k and top-p, best first."""
    scores = scores / np.float32(s.temperature)
    if s.top_k:
        kth = np.sort(scores)[::-1][min(s.top_k, len(scores)) - 1]
        scores = np.where(scores < kth, np.float32(-math.inf), scores)
    probabilities = softmax(scores)
    kept, above = [], 0.0
    for token in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        assume(s.top_p in (0, 1) or abs(above - s.top_p) > 1e-5)  # rounding may decide closer values
        if 0 < s.top_p < 1 and above > s.top_p:
            break
        above += probabilities[token]
        kept.append((token, probabilities[token]))
    return kept


def plain_sample(logits, history, s, t, probe: float, number: float) -> tuple[int, bool]:
    """The sampled id, and whether it is appended to the history."""
    raw = softmax(logits)
    if s.stop_probe and t.stop_id is not None:
        assume(abs(raw[t.stop_id] - probe) > 1e-5)
        if (s.greedy and int(np.argmax(logits)) == t.stop_id) or (not s.greedy and probe < raw[t.stop_id]):
            return t.stop_id, False
    scores = plain_scores(logits, history, s, t)
    if t.listen_id is not None and (scores > scores[t.listen_id]).sum() < s.listen_top_k:
        return t.listen_id, False
    if s.greedy:
        return int(np.argmax(scores)), True
    kept = plain_kept(scores, s)
    target, running = number * sum(p for _, p in kept), 0.0
    for token, p in kept:
        running += p
        assume(abs(running - target) > 1e-6)
        if running > target:
            return token, True
    raise AssertionError("expected the running sum to reach the target")
