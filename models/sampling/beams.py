"""Beam search over scored tokens: which hypotheses go on, which are complete, and when the search ends. Torch-free.

The rules are those of `generate` in `transformers` with beams, without sampling and with `early_stopping=False`.
Contains no scores of tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from models.errors import SettingsError
from models.sampling.settings import check_number

MAX_BEAMS = 8


@dataclass(frozen=True)
class BeamSettings:
    """Settings of one search.

    Attributes:
        n_beams: hypotheses that go on after each step, 2 to MAX_BEAMS.
        max_new_tokens: tokens of a hypothesis at most, its stop token included.
        stop_ids: tokens that complete a hypothesis.
        length_penalty: a complete hypothesis of n tokens has its log-probability divided by n to this power.
        repetition_penalty: factor on the log-probability of tokens that the hypothesis has; above 1 makes them less
            likely.
        set_index: row of the shared token sets, whose forbidden ids are never chosen.
    Raises: SettingsError for a value outside its range.
    """

    n_beams: int
    max_new_tokens: int
    stop_ids: frozenset[int]
    length_penalty: float = 1.0
    repetition_penalty: float = 1.0
    set_index: int = 0

    def __post_init__(self) -> None:
        check_number("n_beams", self.n_beams, at_least=2, at_most=MAX_BEAMS, whole=True)
        check_number("max_new_tokens", self.max_new_tokens, at_least=1, whole=True)
        check_number("length_penalty", self.length_penalty, at_least=-10, at_most=10)
        check_number("repetition_penalty", self.repetition_penalty, above=0)
        if not isinstance(self.stop_ids, frozenset):
            raise SettingsError("stop_ids", expected="a frozenset of token ids", got=type(self.stop_ids).__name__)

    @property
    def n_candidates(self) -> int:
        """Candidates that a step considers: enough that `n_beams` of them go on, whichever tokens stop."""
        return max(2, 1 + len(self.stop_ids)) * self.n_beams


class Candidate(NamedTuple):
    """A running hypothesis with one more token. score: log-probability of all its tokens. parent: its index."""

    score: float
    parent: int
    token: int


class Hypothesis(NamedTuple):
    """Tokens and their score: the log-probability while it runs, then that after the length penalty."""

    ids: tuple[int, ...]
    score: float


class Found(NamedTuple):
    """The best hypothesis. ids: without the stop token. stopped: "stop" if it had one, "length" otherwise."""

    ids: tuple[int, ...]
    stopped: Literal["stop", "length"]


class Beams:
    """The hypotheses of one search.

    running: those that go on, best first; at first one without tokens. is_over: the search has ended.
    """

    def __init__(self, settings: BeamSettings):
        self.settings = settings
        self.running = [Hypothesis((), 0.0)]
        self.is_over = False
        self._complete: list[Hypothesis] = []  # at most n_beams, best first

    @property
    def n_tokens(self) -> int:
        """Tokens of each running hypothesis."""
        return len(self.running[0].ids)

    def advance(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Take the best candidates of a step, best first.

        Returns: those that go on, in the order of `running`; none if the search ends because no candidate goes on.
        """
        assert not self.is_over, "advance: expected a search that goes on, got one that has ended"
        settings, n_tokens = self.settings, self.n_tokens + 1
        is_full = n_tokens >= settings.max_new_tokens
        kept: list[Candidate] = []
        for rank, one in enumerate(candidates):
            if not is_full and one.token not in settings.stop_ids:
                if len(kept) < settings.n_beams:
                    kept.append(one)
            elif rank < settings.n_beams:  # worse candidates replace running hypotheses only
                self._add(self._extended(one))
        self._trim()
        if not kept:
            self.is_over = True
            return kept
        self.running = [self._extended(one) for one in kept]
        is_settled = len(self._complete) == settings.n_beams
        self.is_over = is_settled and self._normalized(self.running[0]) <= self._complete[-1].score
        return kept

    def stop(self) -> None:
        """End the search now: running hypotheses count as complete."""
        for one in self.running:
            self._add(one)
        self._trim()
        self.is_over = True

    @property
    def found(self) -> Found:
        """The best complete hypothesis of a search that has ended."""
        assert self.is_over, "found: expected a search that has ended, got one that goes on"
        ids = self._complete[0].ids
        return Found(ids[:-1], "stop") if ids[-1] in self.settings.stop_ids else Found(ids, "length")

    def _extended(self, one: Candidate) -> Hypothesis:
        return Hypothesis((*self.running[one.parent].ids, one.token), one.score)

    def _normalized(self, one: Hypothesis) -> float:
        return one.score / math.pow(len(one.ids), self.settings.length_penalty)

    def _add(self, one: Hypothesis) -> None:
        self._complete.append(one._replace(score=self._normalized(one)))

    def _trim(self) -> None:
        self._complete.sort(key=lambda one: one.score, reverse=True)  # stable: the older one of equal scores is first
        del self._complete[self.settings.n_beams :]
