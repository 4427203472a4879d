"""Beam search in a slot: all hypotheses share the rows of the prompt, and each sees its own rows after them.

Each step feeds the newest token of every hypothesis in one forward. A mask tells which rows a hypothesis sees, so no
row is copied when hypotheses branch, and rows that none of them sees are written again. The slot's length does not
change: for all other calls its rows after the prompt do not exist.

The step is no region of the table and runs eagerly on purpose: its mask is an input that no captured graph and no
compiled layer has, and a graph per number of rows and searches would cost memory of sessions for a rare request.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.graphs.compiler import force_eager
from models.graphs.input_block import Array, inputs_to_device
from models.layers.kv_cache import CacheView
from models.sampling.beams import Beams, BeamSettings, Candidate, Found
from models.sampling.text import NEVER, TokenSets
from models.stages.runner import Runner

KEY_BLOCK, HISTORY_BLOCK = 256, 64  # rows read and tokens sent are multiples, so that allocations repeat


class BeamSearch:
    """One search in a slot. Made by `BeamSteps.begin`, advanced by `BeamSteps.step`."""

    def __init__(self, slot: int, settings: BeamSettings, *, n_prompt: int, llm_len: int):
        """n_prompt: rows that the slot holds. llm_len: rows that it can hold."""
        self.slot, self.n_prompt = slot, n_prompt
        self._beams = Beams(settings)
        # [n_beams, rows after the prompt]: the rows that each running hypothesis sees.
        self._sees = np.zeros((settings.n_beams, llm_len - n_prompt), np.bool_)
        self._rows = np.zeros(0, np.int64)  # rows of the next step, one per running hypothesis

    @property
    def settings(self) -> BeamSettings:
        return self._beams.settings

    @property
    def is_over(self) -> bool:
        """Whether the search has ended."""
        return self._beams.is_over

    @property
    def found(self) -> Found:
        """The result of a search that has ended."""
        return self._beams.found

    @property
    def n_running(self) -> int:
        """Hypotheses that go on."""
        return len(self._beams.running)

    @property
    def n_tokens(self) -> int:
        """Tokens of each hypothesis that goes on."""
        return self._beams.n_tokens

    @property
    def n_rows(self) -> int:
        """Rows that the next step reads, those that it writes included."""
        seen = np.flatnonzero(self._sees.any(0))
        return self.n_prompt + 1 + int(max(self._rows.max(), seen[-1] if len(seen) else 0))

    def fill(self, ids: Array, rows: Array, mask: Array, scores: Array, history: Array) -> None:
        """Write the inputs of the next step, one entry per running hypothesis; the rest of each array stays.

        Args:
            ids: [K] newest tokens.
            rows: [K] rows to write.
            mask: [K, kv_len] rows to see.
            scores: [K] log-probabilities.
            history: [K, H] tokens, padded with the newest one.
        """
        n, width = self.n_running, mask.shape[1] - self.n_prompt
        rows[:n] = self.n_prompt + self._rows
        mask[:n, : self.n_prompt] = True
        mask[:n, self.n_prompt :] = self._sees[:n, :width]
        mask[np.arange(n), rows[:n]] = True
        for row, one in enumerate(self._beams.running):
            ids[row], scores[row] = one.ids[-1], one.score
            history[row] = one.ids[-1]
            history[row, : len(one.ids)] = one.ids

    def take(self, values: Sequence[float], places: Sequence[float], vocab_size: int) -> bool:
        """Take the scores of the best continuations and their places in [K * vocab_size], best first.

        Returns: False, with nothing changed, for scores that are not usable.
        """
        if any(math.isnan(value) for value in values) or values[0] == NEVER:
            return False
        pairs = zip(values, map(int, places), strict=True)
        candidates = [Candidate(value, *divmod(place, vocab_size)) for value, place in pairs if value > NEVER]
        self._sees[np.arange(len(self._rows)), self._rows] = True
        kept = self._beams.advance(candidates[: self.settings.n_candidates])
        self._sees[: len(kept)] = self._sees[[one.parent for one in kept]]
        self._sees[len(kept) :] = False
        self._rows = np.flatnonzero(~self._sees.any(0))[: len(kept)]
        if not self.is_over and len(self._rows) < len(kept):
            self._beams.stop()  # the slot is full
        return True


class BeamSteps:
    """The steps of searches over a runner's slots."""

    def __init__(self, runner: Runner):
        self._runner = runner

    def begin(self, slot: int, settings: BeamSettings, logits: Tensor) -> BeamSearch | None:
        """Start a search after the slot's rows; one sync.

        Args:
            logits: [V] after the slot's last row; valid until the next call of a region is enough.
        Returns: the search; None for logits that are not usable.
        Raises: SlotError.
        """
        runner = self._runner
        runner.check_slots([slot])
        search = BeamSearch(slot, settings, n_prompt=runner.context_len(slot), llm_len=runner.capacity(slot))
        arrays = np.zeros((1, 1), np.float32), np.array([settings.set_index]), np.ones(1, np.float32)
        with torch.no_grad():
            scores, sets, penalty = inputs_to_device(logits.device, arrays)
            packed = _best(logits[None, None], scores, sets, penalty, None, runner.sets, settings.n_candidates)
        return search if self._taken([search], packed)[0] else None

    def step(self, searches: Sequence[BeamSearch]) -> list[bool]:
        """Feed the newest token of every hypothesis of searches that go on; one sync.

        Returns: of each search, whether its logits were usable; otherwise the search is as before.
        Raises: SlotError before any change.
        """
        runner = self._runner
        runner.check_slots([one.slot for one in searches])
        with torch.no_grad(), force_eager():  # compiled layers would compile again for the mask
            packed = self._step(searches)
        return self._taken(searches, packed)

    def _step(self, searches: Sequence[BeamSearch]) -> Tensor:
        runner, n, width = self._runner, len(searches), max(one.n_running for one in searches)
        model, state = runner.model, runner.state
        kv_len = min(_rounded(max(one.n_rows for one in searches), KEY_BLOCK), runner.llm_len)
        n_history = _rounded(max(one.n_tokens for one in searches), HISTORY_BLOCK)
        ids, rows, new = np.zeros((n, width), np.int64), np.zeros((n, width), np.int64), np.zeros((n, width), np.bool_)
        mask, history = np.zeros((n, width, kv_len), np.bool_), np.zeros((n, width, n_history), np.int64)
        mask[:, :, 0] = True  # padding sees one row, so that it is finite
        scores = np.full((n, width), NEVER, np.float32)
        for row, one in enumerate(searches):
            one.fill(ids[row], rows[row], mask[row], scores[row], history[row])
            new[row, : one.n_running] = True
        own = [one.settings for one in searches]
        arrays = (
            np.array([one.slot for one in searches]),
            np.array([one.n_tokens - 1 for one in searches]),  # rotary positions after the prompt
            *(ids, rows, new, mask, scores, history),
            np.array([one.set_index for one in own]),
            np.array([one.repetition_penalty for one in own], np.float32),
        )
        slots, depth, ids_, rows_, new_, mask_, scores_, history_, sets, penalty = inputs_to_device(
            model.device, arrays
        )
        positions = (state.llm.positions[slots] + depth)[:, None].expand(-1, width)
        row_slots, index = state.llm.places(slots, rows_, new_)
        pages = state.llm.pages_read(slots, kv_len)
        view = CacheView(slots, row_slots, index, positions, mask_, kv_len, pages=pages)
        hidden = model.llm.model.run_view(model.llm.embed(ids_, model.backend), state.llm, view)
        logits = model.llm.logits(hidden.flatten(0, 1), model.backend).unflatten(0, (n, width))
        most = max(one.n_candidates for one in own)
        return _best(logits, scores_, sets, penalty, history_, runner.sets, most)

    def _taken(self, searches: Sequence[BeamSearch], packed: Tensor) -> list[bool]:
        found: list[tuple[list[float], list[float]]] = packed.tolist()  # the one sync
        size = self._runner.model.config.vocab_size
        return [one.take(*own, size) for one, own in zip(searches, found, strict=True)]


def _rounded(n: int, block: int) -> int:
    return -(-n // block) * block


def _best(
    logits: Tensor,
    scores: Tensor,
    set_index: Tensor,
    penalty: Tensor,
    history: Tensor | None,
    sets: TokenSets,
    n: int,
) -> Tensor:
    """The best continuations of each search's hypotheses.

    Args:
        logits: [B, K, V].
        scores: [B, K] log-probabilities of the hypotheses; -inf for padding.
        set_index: [B] token set.
        penalty: [B] repetition penalty.
        history: [B, K, H] tokens that it applies to; None: none.
        n: continuations.
    Returns: [B, 2, n] float64: their scores, best first, and their places in [K * V]. NaN comes first.
    """
    values = logits.float().log_softmax(-1)
    if history is not None:
        old, factor = values.gather(2, history), penalty[:, None, None]
        values = values.scatter(2, history, torch.where(old < 0, old * factor, old / factor))
    values = values.masked_fill(sets.forbidden[set_index][:, None], NEVER) + scores[..., None]
    flat = values.flatten(1)
    best, places = flat.topk(min(n, flat.shape[1]))
    return torch.stack((best.double(), places.double()), 1)
