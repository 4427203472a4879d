"""Speech tokens that are drawn beside other stages: launched ahead, handed over on arrival, never waited for."""

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest

from models.stages.speech_steps import Poll, Readback, Speaker
from tests.worker.chat.reply_engine import MAX_ITERATIONS, SPOKEN, AnsweringEngine, short_chunks
from tests.worker.loop.engines import ALOUD, QUIET, assert_same_events, short_speech
from worker.assembly.parts import EngineParts
from worker.loop.job import SpeechCall
from worker.loop.observer import Observer
from worker.loop.results import Event, UnitResult
from worker.loop.speech_stages import FEW_JOBS, MAX_POLLS, _slice
from worker.loop.unit_loop import RESTS

ASKED = "Hello there, how are you?"
CHUNK_TOKENS = 10  # of a reply's chunk: more than one slice draws


class HeldReadback:
    """A readback that arrives when a test sets `is_here`."""

    all: ClassVar[list["HeldReadback"]] = []

    def __init__(self, poll: Readback):
        self._poll, self.is_here, self.is_taken = poll, False, False
        HeldReadback.all.append(self)

    def take(self) -> list[Poll]:
        assert self.is_here and not self.is_taken, "expected a readback that has arrived to be taken once"
        self.is_taken = True
        return self._poll.take()


@pytest.fixture(scope="module")
def expected(parts: EngineParts) -> list[Event]:
    """A spoken reply of an engine that polls before it draws more."""
    engine = AnsweringEngine(parts)
    with short_chunks(CHUNK_TOKENS), short_speech():
        engine.ask("a", ASKED, config=SPOKEN)
        engine.settle()
    return engine.received("a")


@pytest.fixture
def engine(parts: EngineParts, monkeypatch: pytest.MonkeyPatch) -> Iterator[AnsweringEngine]:
    """An engine that draws on a side stream and whose readbacks are held; calls that may end are drawn ahead too."""
    HeldReadback.all = []
    monkeypatch.setattr(Speaker, "is_beside", True)
    monkeypatch.setattr(SpeechCall, "may_end", False)
    engine = AnsweringEngine(parts)
    start = engine.unit_steps.speaker.start_poll
    monkeypatch.setattr(engine.unit_steps.speaker, "start_poll", lambda slots: HeldReadback(start(slots)))
    with short_chunks(CHUNK_TOKENS), short_speech():
        yield engine
    engine.sessions.close_all()
    assert engine.n_free == (3, 3), f"slots: expected all free afterwards, got {engine.n_free}"


def in_flight() -> list[HeldReadback]:
    return [poll for poll in HeldReadback.all if not poll.is_here]


def run_until_polls_are_full(engine: AnsweringEngine) -> None:
    engine.run_until(lambda: len(in_flight()) == MAX_POLLS)


def release_all(engine: AnsweringEngine) -> None:
    while not engine.loop.is_idle:
        engine.run_until(lambda: bool(in_flight()) or engine.loop.is_idle)
        for poll in in_flight()[:1]:
            poll.is_here = True
        engine.step()


def test_draws_ahead_of_the_first_poll(engine: AnsweringEngine, expected: list[Event]) -> None:
    engine.ask("a", ASKED, config=SPOKEN)
    run_until_polls_are_full(engine)
    (job,) = engine.loop.jobs
    n_drawn = job.calls[0].n_drawn
    for _ in range(3):
        engine.step()
    assert len(in_flight()) == MAX_POLLS and job.calls[0].n_drawn == n_drawn, "expected no more draws"
    assert not job.windows and job.n_speech_tokens == 0, "expected no tokens before a poll has arrived"
    release_all(engine)
    assert_same_events("answer", engine.received("a"), expected)


def test_does_not_draw_ahead_in_a_call_that_may_end(
    engine: AnsweringEngine, expected: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens after an early end would be wasted and would delay the next call."""
    monkeypatch.setattr(SpeechCall, "may_end", True)
    engine.ask("a", ASKED, config=SPOKEN)
    engine.run_until(lambda: bool(in_flight()))
    for _ in range(3):
        engine.step()
    assert len(in_flight()) == 1, f"polls in flight: expected one, got {len(in_flight())}"
    release_all(engine)
    assert_same_events("answer", engine.received("a"), expected)


def test_only_a_call_with_min_equal_to_max_cannot_end_early() -> None:
    assert (
        SpeechCall([], min_tokens=25, max_tokens=26).may_end
        and not SpeechCall([], min_tokens=26, max_tokens=26).may_end
    )


def test_listening_session_does_not_wait_for_speech_tokens(engine: AnsweringEngine, expected: list[Event]) -> None:
    engine.ask("a", ASKED, config=SPOKEN)
    run_until_polls_are_full(engine)
    session = engine.open("listens", QUIET)
    for number in range(2):
        engine.send(session, number, force_listen=True)
        engine.run_until(lambda: not session.is_busy and not session.waiting)
        assert isinstance(engine.take("listens")[-1], UnitResult), "expected a unit to finish meanwhile"
    assert len(in_flight()) == MAX_POLLS, "expected the polls still in flight"
    release_all(engine)
    assert_same_events("answer", engine.received("a"), expected)


@pytest.mark.parametrize("arrived", [0, 1, MAX_POLLS])
def test_draws_undone_tokens_again(engine: AnsweringEngine, expected: list[Event], arrived: int) -> None:
    """Rewinding the slot's speech is what a failed step of the same reply does."""
    engine.ask("a", ASKED, config=SPOKEN)
    run_until_polls_are_full(engine)
    (job,) = engine.loop.jobs
    engine.unit_steps.rewind_speech(job.slot, job.calls[0].start)
    for poll in HeldReadback.all[:arrived]:
        poll.is_here = True
    release_all(engine)
    assert_same_events("answer", engine.received("a"), expected)


class Turns(Observer):
    """Three speaking units: the second ends its turn, the third begins a new one."""

    def token_sampled(self, session: str, job: Any, token: int) -> int:
        ids, n = job.language.control_tokens, len(job.decoder.all_ids)
        if n == 0:
            return ids.speak
        if n <= 2:
            return ord("a") + n
        return ids.turn_eos if n == 3 and job.session.n_decided == 1 else ids.chunk_eos


def run_units(
    engine: AnsweringEngine, names: Sequence[str], late: random.Random | None = None
) -> dict[str, list[Event]]:
    """Events of duplex sessions that run side by side. late: random arrival of polls; None: at once."""
    sessions = [engine.open(name, ALOUD, speaker=0) for name in names]
    for unit in range(3):
        for session in sessions:
            engine.send(session, unit)
            for _ in range(late.randrange(8) if late else 0):
                engine.step()
        for _ in range(MAX_ITERATIONS):
            if not engine.step():
                break
            for poll in in_flight()[: late.randrange(2)] if late else ():
                poll.is_here = True
        assert engine.loop.is_idle, f"unit {unit}: expected an end within {MAX_ITERATIONS} iterations"
    for session in sessions:
        engine.sessions.close(session)
    return {name: engine.take(name) for name in names}


@pytest.fixture(scope="module")
def alone(parts: EngineParts) -> list[Event]:
    """Events of one session alone, of an engine that polls before it draws more."""
    with short_speech():
        (events,) = run_units(AnsweringEngine(parts, Turns()), ["alone"]).values()
    assert sum(getattr(event, "pcm", None) is not None for event in events) > 3
    return events


@pytest.mark.parametrize("seed", range(2))
def test_arrival_time_of_polls_does_not_change_units(alone: list[Event], engine: AnsweringEngine, seed: int) -> None:
    """Including units in which a turn ends, drains and begins, with other sessions speaking."""
    engine.use(engine.vocoder, Turns())
    for name, events in run_units(engine, ["a", "b", "c"], random.Random(seed)).items():
        assert_same_events(name, events, alone)
    assert len(HeldReadback.all) > 3, "expected polls that were held"


@pytest.mark.parametrize(("first_sound_alone", "few_jobs"), [(True, FEW_JOBS), (True, 0), (False, FEW_JOBS)])
def test_further_tokens_of_a_unit_wait_for_its_first_sound(
    alone: list[Event],
    engine: AnsweringEngine,
    monkeypatch: pytest.MonkeyPatch,
    first_sound_alone: bool,
    few_jobs: int,
) -> None:
    """Only with `first_sound_alone` and few jobs in flight."""
    monkeypatch.setattr("worker.loop.speech_stages.FEW_JOBS", few_jobs)
    vocoder = engine.vocoder
    engine.use(vocoder, Turns(), first_sound_alone=first_sound_alone)
    session = engine.open("a", ALOUD, speaker=0)
    for unit in range(3):
        vocoder.is_held = True
        n_launches = len(vocoder.launches)
        engine.send(session, unit)
        while len(vocoder.launches) == n_launches:
            for poll in in_flight()[:1]:
                poll.is_here = True
            engine.step()
        (job,) = engine.loop.jobs
        call = job.calls[0]
        for _ in range(3):
            engine.step()
        waits = call.n_drawn == call.pieces[0]
        assert waits is (first_sound_alone and few_jobs > 0), f"{call.n_drawn} drawn, pieces {call.pieces}"
        vocoder.is_held = False
        vocoder.release_oldest()
        release_all(engine)
    engine.sessions.close(session)
    assert_same_events("a", engine.take("a"), alone)


def test_closing_a_session_drops_its_polls(engine: AnsweringEngine, expected: list[Event]) -> None:
    session = engine.ask("a", ASKED, config=SPOKEN)
    run_until_polls_are_full(engine)
    engine.sessions.close(session)
    assert engine.n_free == (3, 3), f"expected its slots to be free at once, got {engine.n_free}"
    engine.take("a")
    engine.ask("next", ASKED, config=SPOKEN)
    release_all(engine)
    assert not engine.take("a"), "expected nothing more"
    assert_same_events("next", engine.received("next"), expected)


def test_loop_sleeps_only_while_everything_is_in_flight(engine: AnsweringEngine) -> None:
    engine.ask("a", ASKED, config=SPOKEN)
    run_until_polls_are_full(engine)
    with mock.patch("worker.loop.unit_loop.time.sleep") as sleep:
        engine.step()
        assert sleep.call_count == RESTS, f"expected {RESTS} sleeps, got {sleep.call_count}"
        for poll in in_flight():
            poll.is_here = True
        engine.step()
        assert sleep.call_count == RESTS, "expected none after a poll has arrived"
    release_all(engine)


def test_speech_time_counts_overlapping_polls_once(engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the speech stage is the time with polls in flight, for any number of polls."""
    now, seconds = [0.0], 0.0
    monkeypatch.setattr(engine.loop._batch, "clock", lambda: now[0])
    engine.ask("a", ASKED, config=SPOKEN)
    while not engine.loop.is_idle:
        jobs = engine.loop.jobs[:]
        for _ in range(3):
            engine.step()
        for poll in in_flight()[:1]:
            poll.is_here = True
            now[0] += 1
            seconds += 1
    assert seconds > 1
    assert jobs[0].times.speech == 1000 * seconds, f"speech: expected {1000 * seconds} ms, got {jobs[0].times.speech}"


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([((8,), 1)], 7),
        ([((8,), 8)], 6),
        ([((8,), 3)], 6),  # a slice is enough
        ([((), 1)], 6),
        ([((25,), 1)], 6),  # too many are missing
        ([((25,), 18)], 7),
        ([((8,), 14), ((8,), 1)], 7),
        ([((), 20), ((8,), 1)], 7),
    ],
)
def test_slice_reaches_to_a_first_piece_of_sound(calls: list[tuple[tuple[int, ...], int]], expected: int) -> None:
    """calls: pieces and drawn tokens of each."""
    jobs: Any = [SimpleNamespace(calls=[SpeechCall([], pieces=one, n_drawn=n)]) for one, n in calls]
    assert _slice(jobs) == expected, f"{calls}: expected {expected} tokens, got {_slice(jobs)}"
