"""Conversations whose units may run early, beside another one, and the same conversations without trials."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.inputs.mel_stream import EDGE_SAMPLES, EDGES, MAX_FRAMES, RAW_FRAMES, SLIDE_BY, plan_emission, stable_count
from models.layers.audio_overlap import needs_overlap
from models.stages.unit_steps import REDUNDANCY, UnitSteps
from tests.models.stages.slot_copies import assert_same, copy_state
from tests.worker.engine.failing_regions import broken, poisoned
from tests.worker.loop.engines import (
    ALOUD,
    QUIET,
    Director,
    SmallEngine,
    assert_mirrors,
    assert_same_events,
    make_config,
    make_prompt,
    make_unit,
)
from worker.config.session import SessionConfig, WindowConfig
from worker.early.trial import EarlyEnd, EarlyOutcome, EarlyTrial
from worker.loop.early.early_job import EarlyJob
from worker.loop.prompt.system_prompt import Adjustment
from worker.loop.results import Event, InsertedText, UnitResult
from worker.loop.session import Session, TextInput
from worker.loop.session_handle import CutImage

EARLY = {"early_unit": "auto"}
CONFIGS = (
    ALOUD.model_copy(update=EARLY),
    ALOUD.model_copy(update={**EARLY, "window": WindowConfig(mode="basic", high_tokens=60, low_tokens=40)}),
    QUIET.model_copy(update={**EARLY, "window": WindowConfig(mode="context", max_units=2, previous_max_tokens=12)}),
    QUIET.model_copy(update={**EARLY, "force_listen_count": 1, "text_repetition_window_size": 4}),
)
# What the trial of a piece of sound does; "plain": there is none.
TRIALS = ("plain", "speaks", "listens", "resumes", "fails", "nan")
PIECES = (1_500, 4_000, 7_000, 16_000)
# What happens before a piece, or while it waits for the engine.
EVENTS = ("", "", "break", "adjust", "prompt", "pause", "text", "ahead", "queued break", "queued stop", "queued close")
GARBAGE = 3.0


@dataclass(frozen=True)
class Piece:
    """One message of a client.

    Args:
        trial, event: see `TRIALS` and `EVENTS`.
        other: samples of the neighbour's message; 0: it sends none.
    """

    n: int
    trial: str
    picture: bool = False
    other: int = 0
    event: str = ""


class TrialDirector(Director):
    """A director that decides as the trial requires. speaks_now: the unit of session a speaks without a trial."""

    def __init__(self) -> None:
        super().__init__(listen=0.4, turn_end=0.3, unit_end=0.3)
        self.trial = "plain"
        self.speaks_now = False
        self.n_logits = 0  # of session a before the unit that runs
        self.on_taken_back = lambda session: None

    def token_sampled(self, session: str, job: Any, token: int) -> int:
        is_first = not job.decoder.all_ids
        if is_first and self.speaks_now and session == "a":
            return job.language.special.speak
        if is_first and isinstance(job, EarlyJob) and not job._is_kept:
            if self.trial == "resumes":
                job.trial.void()
            return job.language.special.listen if self.trial == "listens" else job.language.special.speak
        return super().token_sampled(session, job, token)

    def unit_taken_back(self, session: str) -> None:
        del self.logits[session][self.n_logits :]
        self.on_taken_back(session)


class TrialEngine(SmallEngine):
    """Two sessions whose units may run early."""

    def __init__(self) -> None:
        self.director = TrialDirector()
        super().__init__(make_config(early_pictures=True), self.director)
        self.director.on_taken_back = self.on_taken_back
        self.before: list[Tensor] | None = None
        self.n_before: int | None = None  # context rows before the early rows of session a, while a trial runs
        self.n_taken_back = 0
        self._ahead: list[CutImage] = []  # pictures of the next unit

    def on_taken_back(self, name: str) -> None:
        """Check what is restored; fill the places that are not with garbage, which later units must not read."""
        session = self.sessions.get(name)
        slot = session.slot
        self.n_taken_back += 1
        assert_mirrors(self.unit_steps, slot)
        places = leftovers(self.unit_steps, slot)
        self._check_finite(places, slot)
        if self.n_before is not None and session.early_rows is None:  # a trial that fails removes them
            n_rows = self.unit_steps.context_len(slot)
            assert n_rows == self.n_before, f"expected {self.n_before} rows before the pictures, got {n_rows}"
        elif self.before is not None:
            copies = dict(zip(map(Tensor.data_ptr, self.unit_steps.state.tensors()), self.before, strict=True))
            for tensor, place in places:
                tensor[slot][place] = copies[tensor.data_ptr()][slot][place]
            assert_same(self.unit_steps.state, self.before, [slot])
        for tensor, place in places:
            tensor[slot][place] = GARBAGE

    def _check_finite(self, places: list[tuple[Tensor, Any]], slot: int) -> None:
        """A masked row is multiplied by zero, so that NaN would reach later units."""
        bad = [tuple(tensor.shape) for tensor, place in places if not tensor[slot][place].isfinite().all()]
        assert not bad, f"expected finite rows after a unit that was taken back, got NaN in tensors of shape {bad}"

    def run_piece(
        self, sessions: list[Session], number: int, piece: Piece, *, closes: bool | None
    ) -> EarlyOutcome | None:
        """Send a piece of session a, and one of its neighbour, and run them.

        Args:
            closes: None runs the trial; otherwise there is none, and the unit is closed early if it is true.
        Returns: how the trial has ended; None without one.
        """
        sessions[0] = self._before(sessions[0], number, piece)
        a, b = sessions
        trial = EarlyTrial() if closes is None and piece.trial != "plain" else None
        unit = make_unit(number, piece.n, pictures=[number] if piece.picture else ())
        self.director.trial, self.director.speaks_now = piece.trial, bool(closes)
        self.director.n_logits = len(self.director.logits["a"])
        unit = replace(unit, frames=[*self._ahead, *unit.frames])
        self._ahead = []
        self.sessions.unit(a, replace(unit, early=trial, close_early=bool(closes)))
        if piece.other:
            self.send(b, 500 + number, piece.other)
        sessions[0] = a = self._while_queued(a, piece)
        self.before = copy_state(self.unit_steps.state) if trial is not None else None
        early = a.early_rows if trial is not None else None
        self.n_before = early and early.n_before
        with self._failing(piece.trial if trial is not None else "plain"):
            self.settle()
        self.before = self.n_before = None
        return None if trial is None else trial.outcome

    def _before(self, session: Session, number: int, piece: Piece) -> Session:
        """Let the event of a piece happen before it."""
        sessions, config = self.sessions, session.config
        if piece.event == "break":
            sessions.break_speech(session)
        elif piece.event == "adjust":
            changed = {"temperature": 0.5 + number % 2, "early_pause_ms": 160 + number, "length_penalty": 1.1}
            sessions.adjust(session, Adjustment(config=config.model_copy(update=changed)))
        elif piece.event == "prompt":
            sessions.adjust(session, Adjustment(prompt=make_prompt(f"You are number {number}.")))
        elif piece.event == "pause":
            sessions.pause(session)
            sessions.resume(session)
        elif piece.event == "text":
            sessions.insert_text(session, TextInput((5, 6, 7), 0.0))
            self.settle()
        elif piece.event == "ahead":
            self._ahead = make_unit(number, 1, pictures=[number]).frames
            sessions.expect_picture(session, self._ahead[0])
            self.settle()
        return session

    def _while_queued(self, session: Session, piece: Piece) -> Session:
        """Let the event of a piece happen before the engine begins with it."""
        if piece.event == "queued break":
            self.sessions.break_speech(session)
        elif piece.event == "queued stop":
            self.sessions.stop(session)
            self.sessions.clear_stop(session)
        elif piece.event == "queued close":
            self.sessions.close(session)
            speaker = 0 if session.config.generate_audio else None
            session = self.open(session.id, session.config, make_prompt(speaker=speaker))
        return session

    @contextmanager
    def _failing(self, trial: str) -> Iterator[None]:
        """Let the trial itself fail; units outside of a trial run as usual."""
        table = self.unit_steps.regions
        if trial == "fails":
            with broken(table, "unit_prefill", lambda tensors: self._tries, "before"):
                yield
        elif trial == "nan":
            with poisoned(table, "audio_unit", lambda tensors: 0 if self._tries else None):
                yield
        else:
            yield

    @property
    def _tries(self) -> bool:
        """Whether a trial runs now, which is alone in its batch."""
        return bool(self.loop._early._runner.jobs)


def leftovers(unit_steps: UnitSteps, slot: int) -> list[tuple[Tensor, Any]]:
    """Tensors, and the places of a slot that a unit which is taken back leaves changed."""
    at, state = unit_steps.counters(slot), unit_steps.state
    n_after = at.n_samples + (16_000 if at.n_samples else 16_480)
    first, end, _ = plan_emission(n_after, at.n_frames, REDUNDANCY)
    refills = needs_overlap(at.audio_rows, first, end, state.apm.max_len)
    frames = torch.arange(*(int(stable_count(torch.tensor(n))) for n in (at.n_samples, n_after)))
    edge, unit = max((n_after - EDGE_SAMPLES) // SLIDE_BY, 0), at.n_units % state.recent_mel.mel.shape[1]
    places: list[tuple[Tensor, Any]] = [(rows, slice_from(at.context_len)) for rows in (*state.llm.k, *state.llm.v)]
    places += [(rows, slice_from(0 if refills else at.audio_rows)) for rows in (*state.apm.k, *state.apm.v)]
    places += [(state.mel.raw, frames % RAW_FRAMES), (state.mel.frame_max, frames % MAX_FRAMES)]
    places += [(state.mel.edge_max, edge % EDGES)]
    return places + [(tensor, unit) for tensor in (state.recent_mel.mel, state.recent_mel.first, state.recent_mel.end)]


def slice_from(row: int) -> tuple[slice, slice]:
    """Rows of a cache from `row` on, of all heads."""
    return slice(None), slice(row, None)


class Run(NamedTuple):
    """Events and digests of logits by session, and how each trial has ended."""

    events: dict[str, list[Event]]
    logits: dict[str, list[str]]
    ends: list[EarlyEnd | None]


@cache
def engine() -> TrialEngine:
    """One engine for all runs, so that state left by one of them affects the next."""
    return TrialEngine()


def play(config: SessionConfig, pieces: Sequence[Piece], closes: Sequence[bool] | None = None) -> Run:
    """Run a conversation beside another one. closes: pieces whose units are closed early; None: run the trials."""
    small = engine()
    small.close_all()
    small.director.logits.clear()
    speaker = 0 if config.generate_audio else None
    sessions = [small.open(name, config, make_prompt(speaker=speaker)) for name in ("a", "b")]
    ends = []
    for number, piece in enumerate(pieces):
        outcome = small.run_piece(sessions, number, piece, closes=None if closes is None else closes[number])
        ends.append(outcome and outcome.end)
    taken = {name: small.take(name) for name in ("a", "b")}
    events = {
        name: [without_trial(one) for one in given if not isinstance(one, InsertedText)]
        for name, given in taken.items()
    }
    logits = {name: list(small.director.logits[name]) for name in ("a", "b")}
    return Run(events, logits, ends)


def without_trial(event: Event) -> Event:
    return replace(event, early=None) if isinstance(event, UnitResult) else event


def check_equal_runs(config: SessionConfig, pieces: Sequence[Piece]) -> list[EarlyEnd | None]:
    """A run with trials equals one without, in which units that were kept are closed early. Returns: the ends."""
    tried = play(config, pieces)
    plain = play(config, pieces, [end is EarlyEnd.COMMITTED for end in tried.ends])
    for name in ("a", "b"):
        assert_same_events(name, tried.events[name], plain.events[name])
        assert tried.logits[name] == plain.logits[name], f"{name}: expected the same logits to the last bit"
    return tried.ends
