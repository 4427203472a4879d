"""Sound that is made beside everything else: who waits for it, who does not, and what becomes of it if nobody does."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest

from models.stages.speech_steps import Poll
from tests.worker.chat.reply_engine import SPOKEN, AnsweringEngine, ToneVocoder, make_parts, short_chunks
from tests.worker.loop.engines import QUIET, assert_told, short_speech, told, voice
from worker.assembly.parts import EngineParts
from worker.chat.config import HalfDuplexConfig, PromptOptions
from worker.loop.results import Event, PartialResult, ReplyResult, UnitResult

ASKED = "Hello there, how are you?"


@pytest.fixture(scope="module")
def parts() -> EngineParts:
    return make_parts()


@pytest.fixture(scope="module")
def expected(parts: EngineParts) -> list[Event]:
    """A spoken answer whose sound is there at once."""
    engine = AnsweringEngine(parts)
    with short_chunks(), short_speech():
        engine.ask("a", ASKED, config=SPOKEN)
        engine.settle()
    events = engine.heard("a")
    assert sum(is_sound(event) for event in events) > 1, f"expected several windows, got {events}"
    return events


@pytest.fixture
def engine(parts: EngineParts) -> Iterator[AnsweringEngine]:
    """One whose sound is held back."""
    engine = AnsweringEngine(parts)
    engine.vocoder.is_held = True
    with short_chunks(), short_speech():
        yield engine
    engine.sessions.close_all()
    assert engine.n_free == (3, 3), f"slots: expected all free afterwards, got {engine.n_free}"


def is_sound(event: Event) -> bool:
    return isinstance(event, PartialResult) and event.pcm is not None


def on_the_way(vocoder: ToneVocoder) -> int:
    return sum(not launch.is_over for launch in vocoder.launches)


def until_only_sound_is_left(engine: AnsweringEngine) -> None:
    engine.run_until(lambda: all(job.windows and not job.step and not job.calls for job in engine.loop.jobs))


def land_all(engine: AnsweringEngine) -> None:
    """Let everything arrive, one launch after the other."""
    while engine.loop.jobs:
        engine.run_until(lambda: on_the_way(engine.vocoder) > 0 or engine.loop.is_idle)
        if on_the_way(engine.vocoder):
            engine.vocoder.let_land()
        engine.step()


def assert_as_expected(events: Sequence[Event], expected: Sequence[Event]) -> None:
    """The same words, the same sounds in the same order, the same outcome behind all of them."""
    assert told(events[-1]) == told(expected[-1]), f"outcome: expected {expected[-1]}, got {events[-1]}"
    for kind in (is_sound, lambda event: isinstance(event, PartialResult) and not is_sound(event)):
        got, wanted = ([told(event) for event in one if kind(event)] for one in (events, expected))
        assert got == wanted, f"expected {wanted}, got {got}"


def test_whoever_listens_does_not_wait(engine: AnsweringEngine, expected: list[Event]) -> None:
    """Units run and end while somebody's sound is on its way, which arrives whole and in order."""
    engine.ask("a", ASKED, config=SPOKEN)
    until_only_sound_is_left(engine)
    session = engine.open("listens", QUIET)
    for number in range(2):
        engine.send(session, number, force_listen=True)
        engine.run_until(lambda: not session.is_busy and not session.waiting)
        assert isinstance(engine.take("listens")[-1], UnitResult), "expected a unit to end meanwhile"
    told_so_far = engine.heard("a")
    assert not any(is_sound(event) or isinstance(event, ReplyResult) for event in told_so_far), "expected no sound yet"
    land_all(engine)
    assert_as_expected(told_so_far + engine.heard("a"), expected)


def test_sound_leaves_when_it_arrives(engine: AnsweringEngine, expected: list[Event]) -> None:
    """One launch after the other, each behind the one before; the result is the last of all."""
    engine.ask("a", ASKED, config=SPOKEN)
    counts = []
    while not engine.loop.is_idle:
        engine.run_until(lambda: on_the_way(engine.vocoder) > 0 or engine.loop.is_idle)
        counts.append(sum(is_sound(event) for event in engine.events["a"]))
        if on_the_way(engine.vocoder):
            assert not any(isinstance(event, ReplyResult) for event in engine.events["a"])
            engine.vocoder.let_land()
            engine.step()
    assert counts[0] == 0 and all(b - a == 1 for a, b in pairwise(counts)), f"got {counts}"
    assert_as_expected(engine.heard("a"), expected)


def test_sound_does_not_wait_for_codes(
    engine: AnsweringEngine, expected: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What arrives while others' codes are being drawn leaves before somebody looks at those."""
    engine.ask("a", ASKED, config=SPOKEN)
    until_only_sound_is_left(engine)
    start, n_sounds = engine.duplex.speaker.start_poll, []

    class SlowLook:
        """Here once a sound has left that arrived meanwhile."""

        def __init__(self, slots: Sequence[int]):
            self._poll, self._has_let_land = start(slots), False

        @property
        def is_here(self) -> bool:
            if not self._has_let_land:
                engine.vocoder.let_land()
            self._has_let_land = True
            n_sounds.append(sum(is_sound(event) for event in engine.events["a"]))
            return n_sounds[-1] > 0

        def take(self) -> list[Poll]:
            return self._poll.take()

    monkeypatch.setattr(engine.duplex.speaker, "start_poll", SlowLook)
    engine.ask("b", ASKED, config=SPOKEN)
    engine.run_until(lambda: len(n_sounds) > 1)
    assert n_sounds[:2] == [0, 1], f"sounds that had left whenever codes were asked for: expected 0, 1, got {n_sounds}"
    monkeypatch.undo()
    land_all(engine)
    for name in ("a", "b"):
        assert_as_expected(engine.heard(name), expected)


def test_windows_of_several_wait_together(engine: AnsweringEngine, expected: list[Event]) -> None:
    """The vocoder has one batch to do and one to go on with; whatever comes meanwhile goes in one."""
    for name in ("a", "b", "c"):
        engine.ask(name, ASKED, config=SPOKEN)
        until_only_sound_is_left(engine)
    sizes = [len(launch.sounds) for launch in engine.vocoder.launches]
    assert sizes == [1, 1], f"sessions in each launch: expected two launches of one each, got {sizes}"
    engine.vocoder.let_land()
    engine.step()
    sizes = [len(launch.sounds) for launch in engine.vocoder.launches]
    assert sizes == [1, 1, 2], f"sessions in each launch: expected the others together, got {sizes}"
    land_all(engine)
    for name in ("a", "b", "c"):
        events = engine.heard(name)
        assert [len(e.pcm) for e in events if is_sound(e)] == [len(e.pcm) for e in expected if is_sound(e)]


def test_a_session_closed_meanwhile(engine: AnsweringEngine, expected: list[Event]) -> None:
    session = engine.ask("a", ASKED, config=SPOKEN)
    until_only_sound_is_left(engine)
    before = len(engine.events["a"])
    engine.sessions.close(session)
    assert engine.n_free == (3, 3), f"expected its slots to be free at once, got {engine.n_free}"
    engine.ask("next", ASKED, config=SPOKEN)
    until_only_sound_is_left(engine)
    land_all(engine)
    assert len(engine.events["a"]) == before, f"expected nothing more, got {engine.events['a'][before:]}"
    assert_as_expected(engine.heard("next"), expected)


def test_speech_broken_off_meanwhile(engine: AnsweringEngine, expected: list[Event]) -> None:
    session = engine.ask("a", ASKED, config=SPOKEN)
    until_only_sound_is_left(engine)
    engine.vocoder.let_land()
    engine.step()
    sounds = [event.pcm for event in engine.events["a"] if is_sound(event)]
    assert len(sounds) == 1, f"expected one sound before the break, got {len(sounds)}"
    engine.sessions.break_speech(session)
    engine.run_until(lambda: engine.loop.is_idle)
    result = engine.heard("a")[-1]
    assert np.array_equal(result.pcm, sounds[0]), "expected the sound that had left, and no more"
    engine.vocoder.is_held = False
    for launch in engine.vocoder.launches:
        launch.is_here = True
    engine.ask("a", ASKED, config=SPOKEN)
    engine.settle()
    assert_told("the next one", engine.heard("a"), expected)


def test_a_round_taken_back_meanwhile(engine: AnsweringEngine) -> None:
    config = HalfDuplexConfig(reply=SPOKEN)
    system = engine.reader.read([{"role": "system", "content": "Be kind."}], PromptOptions(add_generation_prompt=False))
    events = engine.events["talk"]
    session = engine.answers.converse("talk", engine.reader.cut(system), config, events.append, voice=voice(0))

    def ask() -> None:
        engine.answers.answer(session, engine.content(ASKED), SPOKEN, 0.0)

    ask()
    until_only_sound_is_left(engine)
    n_rows, n_told = engine.duplex.runner.context_len(session.slot), len(events)
    assert engine.answers.take_back(session), "expected a round to take back"
    assert engine.duplex.runner.context_len(session.slot) < n_rows
    ask()
    until_only_sound_is_left(engine)
    land_all(engine)
    sounds = [event for event in events if is_sound(event)]
    again = [event for event in events[n_told:] if is_sound(event)]
    assert sounds == again, "expected no sound of the round that was taken back"
    assert np.array_equal(np.concatenate([event.pcm for event in sounds]), events[-1].pcm)


@pytest.mark.parametrize("together", [True, False])
def test_sound_that_never_arrives(engine: AnsweringEngine, expected: list[Event], together: bool) -> None:
    """Whoever was beside it in the launch is heard, whoever was to come from it falls silent."""
    bad = engine.ask("bad", ASKED, config=SPOKEN)
    engine.ask("good", ASKED, config=SPOKEN)
    engine.vocoder.broken = {bad.voice.slot}
    until_only_sound_is_left(engine)
    assert [len(launch.sounds) for launch in engine.vocoder.launches] == [2]
    if not together:
        engine.sessions.break_speech(bad)
    engine.vocoder.is_held = False
    for launch in engine.vocoder.launches:
        launch.is_here = True
    engine.settle()
    result = engine.heard("bad")[-1]
    assert (str(result.voice_error) == "broken") is together, f"got {result.voice_error}"
    assert result.pcm is None and result.text == expected[-1].text
    good = engine.heard("good")
    assert_as_expected(good, expected)


def test_the_engine_does_not_sleep_while_sound_is_on_its_way(engine: AnsweringEngine) -> None:
    """Nobody has to ask for anything for it to be handed out."""
    engine.ask("a", ASKED, config=SPOKEN)
    until_only_sound_is_left(engine)
    for _ in range(3):
        assert engine.step() and not engine.loop.is_idle, "expected the loop to have something left to do"
    land_all(engine)
    assert engine.loop.is_idle and isinstance(engine.events["a"][-1], ReplyResult)
