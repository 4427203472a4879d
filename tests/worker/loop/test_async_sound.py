"""Sound that is made beside other stages: emitted on arrival, in order, and dropped if its session has left."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models.stages.speech_steps import Poll
from tests.worker.chat.reply_engine import SPOKEN, AnsweringEngine, ToneVocoder, short_chunks
from tests.worker.loop.engines import ALOUD, QUIET, assert_same_events, content_of, short_speech, voice
from worker.assembly.parts import EngineParts
from worker.chat.config import HalfDuplexConfig, PromptOptions
from worker.loop.results import Event, PartialResult, ReplyResult, UnitResult

ASKED = "Hello there, how are you?"


@pytest.fixture(scope="module")
def expected(parts: EngineParts) -> list[Event]:
    """A spoken reply whose sound arrives at once."""
    engine = AnsweringEngine(parts)
    with short_chunks(), short_speech():
        engine.ask("a", ASKED, config=SPOKEN)
        engine.settle()
    events = engine.received("a")
    assert sum(is_sound(event) for event in events) > 1, f"expected several windows, got {events}"
    return events


@pytest.fixture
def engine(parts: EngineParts) -> Iterator[AnsweringEngine]:
    """An engine whose sound is held."""
    engine = AnsweringEngine(parts)
    engine.vocoder.is_held = True
    with short_chunks(), short_speech():
        yield engine
    engine.sessions.close_all()
    assert engine.n_free == (3, 3), f"slots: expected all free afterwards, got {engine.n_free}"


def is_sound(event: Event) -> bool:
    return isinstance(event, PartialResult) and event.pcm is not None


def n_in_flight(vocoder: ToneVocoder) -> int:
    return sum(not launch.is_over for launch in vocoder.launches)


def run_until_only_sound_is_left(engine: AnsweringEngine) -> None:
    engine.run_until(lambda: all(job.windows and not job.has_text_left and not job.calls for job in engine.loop.jobs))


def release_all(engine: AnsweringEngine) -> None:
    """Release all launches, one per iteration."""
    while engine.loop.jobs:
        engine.run_until(lambda: n_in_flight(engine.vocoder) > 0 or engine.loop.is_idle)
        if n_in_flight(engine.vocoder):
            engine.vocoder.release_oldest()
        engine.step()


def assert_as_expected(events: Sequence[Event], expected: Sequence[Event]) -> None:
    """The same text, the same sounds in the same order, and the same outcome at the end."""
    assert content_of(events[-1]) == content_of(expected[-1]), f"outcome: expected {expected[-1]}, got {events[-1]}"
    for kind in (is_sound, lambda event: isinstance(event, PartialResult) and not is_sound(event)):
        got, wanted = ([content_of(event) for event in one if kind(event)] for one in (events, expected))
        assert got == wanted, f"expected {wanted}, got {got}"


def test_listening_session_does_not_wait_for_sound(engine: AnsweringEngine, expected: list[Event]) -> None:
    """Units run and finish while another session's sound is in flight; that sound is complete and in order."""
    engine.ask("a", ASKED, config=SPOKEN)
    run_until_only_sound_is_left(engine)
    session = engine.open("listens", QUIET)
    for number in range(2):
        engine.send(session, number, force_listen=True)
        engine.run_until(lambda: not session.is_busy and not session.waiting)
        assert isinstance(engine.take("listens")[-1], UnitResult), "expected a unit to end meanwhile"
    received = engine.received("a")
    assert not any(is_sound(event) or isinstance(event, ReplyResult) for event in received), "expected no sound yet"
    release_all(engine)
    assert_as_expected(received + engine.received("a"), expected)


def test_emits_sound_on_arrival(engine: AnsweringEngine, expected: list[Event]) -> None:
    """One sound per launch, in launch order; the result comes last."""
    engine.ask("a", ASKED, config=SPOKEN)
    counts = []
    while not engine.loop.is_idle:
        engine.run_until(lambda: n_in_flight(engine.vocoder) > 0 or engine.loop.is_idle)
        counts.append(sum(is_sound(event) for event in engine.events["a"]))
        if n_in_flight(engine.vocoder):
            assert not any(isinstance(event, ReplyResult) for event in engine.events["a"])
            engine.vocoder.release_oldest()
            engine.step()
    assert counts[0] == 0 and all(b - a == 1 for a, b in pairwise(counts)), f"got {counts}"
    assert_as_expected(engine.received("a"), expected)


def test_emits_sound_while_speech_tokens_are_drawn(
    engine: AnsweringEngine, expected: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sound that arrives during another session's draws is emitted before their poll arrives."""
    engine.ask("a", ASKED, config=SPOKEN)
    run_until_only_sound_is_left(engine)
    start, n_sounds = engine.unit_steps.speaker.start_poll, []

    class SlowReadback:
        """A readback that arrives after a sound was emitted."""

        def __init__(self, slots: Sequence[int]):
            self._poll, self._has_release_oldest = start(slots), False

        @property
        def is_here(self) -> bool:
            if not self._has_release_oldest:
                engine.vocoder.release_oldest()
            self._has_release_oldest = True
            n_sounds.append(sum(is_sound(event) for event in engine.events["a"]))
            return n_sounds[-1] > 0

        def take(self) -> list[Poll]:
            return self._poll.take()

    monkeypatch.setattr(engine.unit_steps.speaker, "start_poll", SlowReadback)
    engine.ask("b", ASKED, config=SPOKEN)
    engine.run_until(lambda: len(n_sounds) > 1)
    assert n_sounds[:2] == [0, 1], f"sounds emitted at each poll: expected 0, 1, got {n_sounds}"
    monkeypatch.undo()
    release_all(engine)
    for name in ("a", "b"):
        assert_as_expected(engine.received(name), expected)


def test_waiting_windows_share_a_launch(engine: AnsweringEngine, expected: list[Event]) -> None:
    """Two launches are in flight. Of the windows that wait, the one that makes a first sound is launched before the
    others, which share a launch."""
    engine.use(ToneVocoder(3), clock=lambda: 0.0)  # no client has played its sound
    engine.vocoder.is_held = True
    for name in ("a", "b", "c"):
        engine.ask(name, ASKED, config=SPOKEN)
        run_until_only_sound_is_left(engine)
    sizes = [len(launch.sounds) for launch in engine.vocoder.launches]
    assert sizes == [1, 1], f"sessions in each launch: expected two launches of one each, got {sizes}"
    for _ in range(2):
        engine.vocoder.release_oldest()
        engine.step()
    launched = [set(launch.sounds) for launch in engine.vocoder.launches]
    first, second, third = (min(one) for one in launched[:3])
    assert launched == [{first}, {second}, {third}, {first, second}], (
        f"expected the third session before the others, and those together, got {launched}"
    )
    release_all(engine)
    for name in ("a", "b", "c"):
        events = engine.received(name)
        assert [len(e.pcm) for e in events if is_sound(e)] == [len(e.pcm) for e in expected if is_sound(e)]


def test_closing_a_session_drops_its_sound(engine: AnsweringEngine, expected: list[Event]) -> None:
    session = engine.ask("a", ASKED, config=SPOKEN)
    run_until_only_sound_is_left(engine)
    before = len(engine.events["a"])
    engine.sessions.close(session)
    assert engine.n_free == (3, 3), f"expected its slots to be free at once, got {engine.n_free}"
    engine.ask("next", ASKED, config=SPOKEN)
    run_until_only_sound_is_left(engine)
    release_all(engine)
    assert len(engine.events["a"]) == before, f"expected nothing more, got {engine.events['a'][before:]}"
    assert_as_expected(engine.received("next"), expected)


def test_interrupt_drops_sound_in_flight(engine: AnsweringEngine, expected: list[Event]) -> None:
    session = engine.ask("a", ASKED, config=SPOKEN)
    run_until_only_sound_is_left(engine)
    engine.vocoder.release_oldest()
    engine.step()
    sounds = [event.pcm for event in engine.events["a"] if is_sound(event)]
    assert len(sounds) == 1, f"expected one sound before the interrupt, got {len(sounds)}"
    engine.sessions.break_speech(session)
    engine.run_until(lambda: engine.loop.is_idle)
    result = engine.received("a")[-1]
    assert np.array_equal(result.pcm, sounds[0]), "expected the sound emitted before the interrupt only"
    engine.vocoder.is_held = False
    for launch in engine.vocoder.launches:
        launch.is_here = True
    engine.ask("a", ASKED, config=SPOKEN)
    engine.settle()
    assert_same_events("the next one", engine.received("a"), expected)


def test_take_back_drops_sound_in_flight(engine: AnsweringEngine) -> None:
    config = HalfDuplexConfig(reply=SPOKEN)
    system = engine.reader.read([{"role": "system", "content": "Be kind."}], PromptOptions(add_generation_prompt=False))
    events = engine.events["talk"]
    session = engine.answers.converse("talk", engine.reader.cut(system), config, events.append, voice=voice(0))

    def ask() -> None:
        engine.answers.answer(session, engine.content(ASKED), SPOKEN, 0.0)

    ask()
    run_until_only_sound_is_left(engine)
    n_rows, n_before = engine.unit_steps.context_len(session.slot), len(events)
    assert engine.answers.take_back(session), "expected a round to take back"
    assert engine.unit_steps.context_len(session.slot) < n_rows
    ask()
    run_until_only_sound_is_left(engine)
    release_all(engine)
    sounds = [event for event in events if is_sound(event)]
    again = [event for event in events[n_before:] if is_sound(event)]
    assert sounds == again, "expected no sound of the removed round"
    assert np.array_equal(np.concatenate([event.pcm for event in sounds]), events[-1].pcm)


@pytest.mark.parametrize("together", [True, False])
def test_failed_launch_disables_speech_of_one_session(
    engine: AnsweringEngine, expected: list[Event], together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other session of the launch gets its sound; the failing one goes on without speech."""
    monkeypatch.setattr(type(engine.unit_steps), "max_prefill_rows", 2 * 96)  # both prompts are fed at once
    bad = engine.ask("bad", ASKED, config=SPOKEN)
    engine.ask("good", ASKED, config=SPOKEN)
    engine.vocoder.broken = {bad.speech.vocoder_slot}
    run_until_only_sound_is_left(engine)
    assert [len(launch.sounds) for launch in engine.vocoder.launches] == [2]
    if not together:
        engine.sessions.break_speech(bad)
    engine.vocoder.is_held = False
    for launch in engine.vocoder.launches:
        launch.is_here = True
    engine.settle()
    result = engine.received("bad")[-1]
    assert (str(result.voice_error) == "broken") is together, f"got {result.voice_error}"
    assert result.pcm is None and result.text == expected[-1].text
    good = engine.received("good")
    assert_as_expected(good, expected)


def test_loop_is_not_idle_while_sound_is_in_flight(engine: AnsweringEngine) -> None:
    engine.ask("a", ASKED, config=SPOKEN)
    run_until_only_sound_is_left(engine)
    for _ in range(3):
        assert engine.step() and not engine.loop.is_idle, "expected a loop with a job left"
    release_all(engine)
    assert engine.loop.is_idle and isinstance(engine.events["a"][-1], ReplyResult)


def test_sound_that_arrives_during_a_prefill_leaves_before_the_token_step(
    engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit's sound does not wait for the token step of other units; there is no second look without a prefill."""
    order: list[str] = []

    def noted(name: str, call: Callable[..., Any], before: Callable[[], None] = lambda: None) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            order.append(name)
            before()
            return call(*given)

        return called

    speaks, listens = engine.open("speaks", ALOUD, speaker=0), engine.open("listens", QUIET)
    engine.send(speaks, 0, force_speak=True)
    engine.run_until(lambda: n_in_flight(engine.vocoder) > 0 and not any(job.calls for job in engine.loop.jobs))
    engine.take("speaks")
    steps, loop = engine.unit_steps, engine.loop
    monkeypatch.setattr(steps, "feed", noted("prefill", steps.feed, before=engine.vocoder.release_oldest))
    monkeypatch.setattr(steps, "step", noted("token step", steps.step))
    monkeypatch.setattr(loop, "_hand_over", noted("hand over", loop._hand_over))
    monkeypatch.setattr(loop, "_finish", SimpleNamespace(run=lambda jobs: order.append("finish")))
    engine.send(listens, 0, force_speak=True)
    engine.step()
    assert order == ["prefill", "hand over", "token step", "hand over", "finish"], order
    assert any(is_sound(event) for event in engine.events["speaks"]), "expected the sound in the same iteration"
    order.clear()
    engine.step()
    assert order == ["token step", "hand over", "finish"], f"expected one look without a prefill, got {order}"
    monkeypatch.undo()
    release_all(engine)


def test_reply_that_still_writes_is_not_looked_at_before_its_next_token(
    engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the order of its text and its sound does not depend on prefills of other sessions."""
    looks: list[bool] = []
    engine.ask("a", ASKED, config=SPOKEN)
    engine.run_until(lambda: any(job.has_text_left and job.windows for job in engine.loop.jobs))
    hand_over = engine.loop._hand_over
    monkeypatch.setattr(engine.loop, "_hand_over", lambda waiting: (looks.append(True), hand_over(waiting)))
    engine.send(engine.open("listens", QUIET), 0, force_listen=True)
    engine.step()
    assert len(looks) == 1, f"expected one look, after the token steps, got {len(looks)}"
    monkeypatch.undo()
    release_all(engine)
