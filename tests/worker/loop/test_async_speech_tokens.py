"""Codes that are drawn beside everything else: asked for ahead, seen when they arrive, and nobody waits for them."""

import random
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from unittest import mock

import pytest

from models.stages.speech_steps import Poll, Readback, Speaker
from tests.worker.chat.reply_engine import MAX_TURNS, SPOKEN, AnsweringEngine, make_parts, short_chunks
from tests.worker.loop.engines import ALOUD, QUIET, assert_told, short_speech
from worker.assembly.parts import EngineParts
from worker.loop.job import SpeechCall
from worker.loop.observer import Observer
from worker.loop.results import Event, UnitResult
from worker.loop.speech_stages import MAX_POLLS

ASKED = "Hello there, how are you?"


class HeldLook:
    """Codes that arrive when they are let: `is_here` is set by hand."""

    all: ClassVar[list["HeldLook"]] = []

    def __init__(self, poll: Readback):
        self._poll, self.is_here, self.is_taken = poll, False, False
        HeldLook.all.append(self)

    def take(self) -> list[Poll]:
        assert self.is_here and not self.is_taken, "expected codes that have arrived to be seen, once"
        self.is_taken = True
        return self._poll.take()


@pytest.fixture(scope="module")
def parts() -> EngineParts:
    return make_parts()


@pytest.fixture(scope="module")
def expected(parts: EngineParts) -> list[Event]:
    """A spoken answer of an engine that sees codes before it asks for more."""
    engine = AnsweringEngine(parts)
    with short_chunks(), short_speech():
        engine.ask("a", ASKED, config=SPOKEN)
        engine.settle()
    return engine.heard("a")


@pytest.fixture
def engine(parts: EngineParts, monkeypatch: pytest.MonkeyPatch) -> Iterator[AnsweringEngine]:
    """One that draws beside, whose codes are held back; ahead in every call, also where one ends sooner."""
    HeldLook.all = []
    monkeypatch.setattr(Speaker, "is_beside", True)
    monkeypatch.setattr(SpeechCall, "may_end", False)
    engine = AnsweringEngine(parts)
    start = engine.duplex.speaker.start_poll
    monkeypatch.setattr(engine.duplex.speaker, "start_poll", lambda slots: HeldLook(start(slots)))
    with short_chunks(), short_speech():
        yield engine
    engine.sessions.close_all()
    assert engine.n_free == (3, 3), f"slots: expected all free afterwards, got {engine.n_free}"


def on_the_way() -> list[HeldLook]:
    return [poll for poll in HeldLook.all if not poll.is_here]


def until_codes_are_awaited(engine: AnsweringEngine) -> None:
    engine.run_until(lambda: len(on_the_way()) == MAX_POLLS)


def let_all_arrive(engine: AnsweringEngine) -> None:
    while not engine.loop.is_idle:
        engine.run_until(lambda: bool(on_the_way()) or engine.loop.is_idle)
        for poll in on_the_way()[:1]:
            poll.is_here = True
        engine.step()


def test_more_is_asked_for_before_the_first_is_seen(engine: AnsweringEngine, expected: list[Event]) -> None:
    engine.ask("a", ASKED, config=SPOKEN)
    until_codes_are_awaited(engine)
    (job,) = engine.loop.jobs
    n_drawn = job.calls[0].n_drawn
    for _ in range(3):
        engine.step()
    assert len(on_the_way()) == MAX_POLLS and job.calls[0].n_drawn == n_drawn, "expected no more than that"
    assert not job.windows and job.n_speech_tokens == 0, "expected nothing to be voiced that nobody has seen"
    let_all_arrive(engine)
    assert_told("answer", engine.heard("a"), expected)


def test_nothing_is_asked_ahead_of_a_call_that_may_end(
    engine: AnsweringEngine, expected: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its codes might be drawn for nobody, with those of the next call behind them."""
    monkeypatch.setattr(SpeechCall, "may_end", True)
    engine.ask("a", ASKED, config=SPOKEN)
    engine.run_until(lambda: bool(on_the_way()))
    for _ in range(3):
        engine.step()
    assert len(on_the_way()) == 1, f"looks on their way: expected one, got {len(on_the_way())}"
    let_all_arrive(engine)
    assert_told("answer", engine.heard("a"), expected)


def test_only_a_call_with_as_many_codes_as_it_needs_cannot_end_sooner() -> None:
    assert SpeechCall([], least=25, most=26).may_end and not SpeechCall([], least=26, most=26).may_end


def test_whoever_listens_does_not_wait(engine: AnsweringEngine, expected: list[Event]) -> None:
    engine.ask("a", ASKED, config=SPOKEN)
    until_codes_are_awaited(engine)
    session = engine.open("listens", QUIET)
    for number in range(2):
        engine.send(session, number, force_listen=True)
        engine.run_until(lambda: not session.is_busy and not session.waiting)
        assert isinstance(engine.take("listens")[-1], UnitResult), "expected a unit to end meanwhile"
    assert len(on_the_way()) == MAX_POLLS, "expected the codes not to have been waited for"
    let_all_arrive(engine)
    assert_told("answer", engine.heard("a"), expected)


@pytest.mark.parametrize("arrived", [0, 1, MAX_POLLS])
def test_codes_that_are_undone_are_drawn_again(engine: AnsweringEngine, expected: list[Event], arrived: int) -> None:
    """As when a step of the same answer fails and all of its slot goes back."""
    engine.ask("a", ASKED, config=SPOKEN)
    until_codes_are_awaited(engine)
    (job,) = engine.loop.jobs
    engine.duplex.rewind_speech(job.slot, job.calls[0].at)
    for poll in HeldLook.all[:arrived]:
        poll.is_here = True
    let_all_arrive(engine)
    assert_told("answer", engine.heard("a"), expected)


class Turns(Observer):
    """Units that speak, the second of them to the end of a turn, the third of a new one."""

    def token(self, session: str, job: Any, token: int) -> int:
        ids, n = job.language.talk_ids, len(job.talk.all_ids)
        if n == 0:
            return ids.speak
        if n <= 2:
            return ord("a") + n
        return ids.turn_eos if n == 3 and job.session.n_decided == 1 else ids.chunk_eos


def talk(engine: AnsweringEngine, names: Sequence[str], late: random.Random | None = None) -> dict[str, list[Event]]:
    """Units of duplex sessions, side by side. late: when codes arrive; None: at once."""
    sessions = [engine.open(name, ALOUD, speaker=0) for name in names]
    for unit in range(3):
        for session in sessions:
            engine.send(session, unit)
            for _ in range(late.randrange(8) if late else 0):
                engine.step()
        for _ in range(MAX_TURNS):
            if not engine.step():
                break
            for poll in on_the_way()[: late.randrange(2)] if late else ():
                poll.is_here = True
        assert engine.loop.is_idle, f"unit {unit}: expected an end within {MAX_TURNS} turns of the loop"
    for session in sessions:
        engine.sessions.close(session)
    return {name: engine.take(name) for name in names}


@pytest.fixture(scope="module")
def said(parts: EngineParts) -> list[Event]:
    """What one session comes to by itself, of an engine that sees codes before it asks for more."""
    with short_speech():
        (events,) = talk(AnsweringEngine(parts, Turns()), ["alone"]).values()
    assert sum(getattr(event, "pcm", None) is not None for event in events) > 3
    return events


@pytest.mark.parametrize("seed", range(2))
def test_units_are_cut_alike_however_late_codes_arrive(said: list[Event], engine: AnsweringEngine, seed: int) -> None:
    """Where a turn ends, drains and begins too: who speaks meanwhile is nobody else's business."""
    engine.use(engine.vocoder, Turns())
    for name, events in talk(engine, ["a", "b", "c"], random.Random(seed)).items():
        assert_told(name, events, said)
    assert len(HeldLook.all) > 3, "expected codes that were held back"


def test_a_session_closed_meanwhile(engine: AnsweringEngine, expected: list[Event]) -> None:
    session = engine.ask("a", ASKED, config=SPOKEN)
    until_codes_are_awaited(engine)
    engine.sessions.close(session)
    assert engine.n_free == (3, 3), f"expected its slots to be free at once, got {engine.n_free}"
    engine.take("a")
    engine.ask("next", ASKED, config=SPOKEN)
    let_all_arrive(engine)
    assert not engine.take("a"), "expected nothing more"
    assert_told("next", engine.heard("next"), expected)


def test_the_loop_rests_and_does_not_hurry(engine: AnsweringEngine) -> None:
    """While codes are on their way and nothing else is to be done, and not while something is."""
    engine.ask("a", ASKED, config=SPOKEN)
    until_codes_are_awaited(engine)
    with mock.patch("worker.loop.speech_stages.time.sleep") as sleep:
        engine.step()
        assert sleep.call_count == 1, f"expected one short rest, got {sleep.call_count}"
        for poll in on_the_way():
            poll.is_here = True
        engine.step()
        assert sleep.call_count == 1, "expected none where codes have arrived"
    let_all_arrive(engine)


def test_times_of_what_was_asked_ahead_do_not_overlap(engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speech takes as long as codes were on their way, however many looks were."""
    now, seconds = [0.0], 0.0
    monkeypatch.setattr(engine.loop._batch, "clock", lambda: now[0])
    engine.ask("a", ASKED, config=SPOKEN)
    while not engine.loop.is_idle:
        jobs = engine.loop.jobs[:]
        for _ in range(3):
            engine.step()
        for poll in on_the_way()[:1]:
            poll.is_here = True
            now[0] += 1
            seconds += 1
    assert seconds > 1
    assert jobs[0].times.speech == 1000 * seconds, f"speech: expected {1000 * seconds} ms, got {jobs[0].times.speech}"
