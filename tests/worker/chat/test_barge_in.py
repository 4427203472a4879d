"""Barge-in: which sounds interrupt an answer that is made or played, how fast, and what becomes of the speech."""

import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from tests.worker.chat.half_duplex_driver import PAUSE, Clock
from worker.chat.config import HalfDuplexConfig
from worker.chat.half_duplex import HalfDuplex
from worker.chat.vad import WINDOW, VoiceDetector
from worker.loop.results import (
    SOUND_RATE,
    Event,
    Generating,
    Interruption,
    PartialResult,
    ReplyResult,
    VoiceState,
)

PIECE = 1_600  # samples of a push: the precision of the onset
RATE = 16_000
ONSET = VoiceState("talk", True)
CONFIG = HalfDuplexConfig(barge_in=True)


class Port:
    """An engine whose answers the test controls. turns: the sounds to answer. n_breaks: requests to stop."""

    name, context_len = "talk", 0

    def __init__(self) -> None:
        self.turns: list[np.ndarray] = []
        self.n_breaks = 0

    def answer(self, content: Any, config: Any, arrived: float) -> Future[None]:
        self.turns.append(content)
        return Future()

    def break_speech(self) -> Future[None]:
        self.n_breaks += 1
        return Future()


class Reader:
    """Content is the turn's sound."""

    def read_segment(self, message: Any, options: Any) -> Any:
        return message.parts[0]

    def cut(self, prompt: Any) -> Any:
        return prompt


class Talk:
    """A conversation without an engine. Pushing sound moves the clock by its length.

    Attributes:
        events: the events since `take`.
        times: when the last event of each kind was emitted.
    """

    def __init__(self, config: HalfDuplexConfig = CONFIG):
        self.clock, self.port = Clock(), Port()
        self.events: list[Event] = []
        self.times: dict[type, float] = {}
        self.half_duplex = HalfDuplex(Reader(), config, self.emit, 8192, clock=self.clock)
        self.half_duplex.begin(self.port)
        self.clock.now += 1

    def emit(self, event: Event) -> None:
        self.events.append(event)
        self.times[type(event)] = self.clock.now

    def push(self, wave: np.ndarray, pause: int = 0) -> None:
        wave = np.concatenate((wave, np.zeros(pause, np.float32))).astype(np.float32)
        for start in range(0, len(wave), PIECE):
            self.clock.now += len(wave[start : start + PIECE]) / RATE
            self.half_duplex.push(wave[start : start + PIECE])

    def part(self, text: str, seconds: float = 0.0) -> None:
        """Emit a part of the answer."""
        pcm = np.ones(int(seconds * SOUND_RATE), np.float32) if seconds else None
        self.half_duplex.forward(PartialResult("talk", 1, text, pcm))

    def finish(self, index: int = 1, stopped: Any = "stop") -> None:
        self.half_duplex.forward(ReplyResult("talk", "", stopped, index))

    def take(self) -> list[Event]:
        """The events since the last call."""
        events = self.events[:]
        self.events.clear()
        return events


@pytest.fixture
def answering(greeting: np.ndarray) -> Talk:
    """A conversation whose first answer is made."""
    talk = Talk()
    talk.push(greeting, PAUSE)
    assert isinstance(talk.take()[-1], Generating)
    return talk


def test_interrupt_of_another_thread_follows_the_request(greeting: np.ndarray) -> None:
    """An engine that has no answer yet would take no notice of it."""
    talk, n_turns = Talk(), []
    talk.port.break_speech = lambda: (n_turns.append(len(talk.port.turns)), Future())[1]
    interrupting = threading.Thread(target=talk.half_duplex.interrupt)

    def emit(event: Event) -> None:
        if isinstance(event, Generating):
            interrupting.start()
            interrupting.join(0.1)

    talk.half_duplex._emit = emit
    talk.push(greeting, PAUSE)
    interrupting.join()
    assert n_turns == [1], f"expected the interrupt after the request of one answer, got one after {n_turns}"


def disturbances(greeting: np.ndarray) -> dict[str, np.ndarray]:
    t = np.arange(2 * RATE) / RATE
    noise = np.random.default_rng(1).normal(size=len(t)).clip(-3, 3)
    claps = noise * (np.mod(t, 0.5) < 0.03)
    chord = sum(np.sin(2 * np.pi * hertz * t) for hertz in (220, 277.2, 329.6)) * (1 - np.mod(t, 0.5)) / 6
    loud = int(np.argmax(np.abs(greeting)))
    return {
        "silence": np.zeros(len(t)),
        "faint noise": 0.003 * noise,
        "loud noise": 0.3 * noise,
        "hum": 0.5 * np.sin(2 * np.pi * 50 * t),
        "claps": 0.3 * claps,
        "music": chord,
        "a cough": np.concatenate((greeting[loud : loud + RATE // 10], np.zeros(RATE))),
    }


def test_disturbances_do_not_interrupt(answering: Talk, greeting: np.ndarray) -> None:
    for name, wave in disturbances(greeting).items():
        answering.push(wave, PAUSE)
        assert answering.take() == [], f"{name}: expected no effect"
    assert answering.port.n_breaks == 0


@pytest.mark.parametrize("barge_in_ms", [100, 200, 500])
def test_speech_interrupts_after_its_onset(greeting: np.ndarray, question: np.ndarray, barge_in_ms: int) -> None:
    detector = VoiceDetector()
    onset_s = next(n for n in range(0, len(question), WINDOW) if detector.push(question[n : n + WINDOW])) / RATE
    talk = Talk(CONFIG.model_copy(update={"barge_in_ms": barge_in_ms}))
    talk.push(greeting, PAUSE)
    begun = talk.clock.now
    talk.push(question, PAUSE)
    delay_ms = 1000 * (talk.times[Interruption] - begun - onset_s)
    assert barge_in_ms <= delay_ms <= barge_in_ms + 150, f"expected {barge_in_ms} ms and a push, got {delay_ms:.0f} ms"


def test_interrupted_answer_has_no_further_sound(answering: Talk, question: np.ndarray) -> None:
    answering.part("One ", 0.5)
    answering.part("two")
    answering.take()
    answering.push(question)
    interrupted, onset = answering.take()
    assert onset == ONSET and (interrupted.index, interrupted.text) == (1, "One two")
    assert interrupted.sound_ms == 500 and 0 < interrupted.heard_ms <= 500
    assert answering.port.n_breaks == 1
    answering.part(" three", 0.5)
    answering.part("", 0.5)
    assert answering.take() == [PartialResult("talk", 1, " three", None)]


def test_speech_of_an_interrupt_is_the_next_turn(answering: Talk, question: np.ndarray) -> None:
    answering.push(question[: len(question) // 2])
    answering.finish(stopped="interrupted")
    answering.push(question[len(question) // 2 :], PAUSE)
    kinds = [type(event) for event in answering.take()]
    assert kinds == [Interruption, VoiceState, ReplyResult, VoiceState, Generating]
    turn = answering.port.turns[1]
    assert len(turn) > len(question) - 8_000, f"expected the speech from its first sample, got {len(turn)} samples"


def test_turn_waits_for_the_interrupted_answer(answering: Talk, question: np.ndarray) -> None:
    """The engine takes longer to stop than the user to speak."""
    answering.push(question, PAUSE)
    assert len(answering.port.turns) == 1
    answering.half_duplex.answer_waiting()
    assert len(answering.port.turns) == 1, "expected no second answer while the first is made"
    answering.finish(stopped="interrupted")
    answering.half_duplex.answer_waiting()
    assert len(answering.port.turns) == 2
    answering.half_duplex.answer_waiting()
    assert len(answering.port.turns) == 2


def test_speech_interrupts_the_playback(answering: Talk, question: np.ndarray) -> None:
    """The whole answer was sent, and a player still plays it."""
    answering.part("Long", 30.0)
    answering.finish()
    answering.take()
    answering.push(question, PAUSE)
    interrupted, *rest = answering.take()
    assert isinstance(interrupted, Interruption) and (interrupted.index, interrupted.sound_ms) == (1, 30_000)
    assert interrupted.heard_ms < 4_000
    assert [type(event) for event in rest] == [VoiceState, VoiceState, Generating]
    assert answering.port.n_breaks == 0, "expected no request to an engine that makes no answer"


def test_speech_after_the_playback_interrupts_nothing(answering: Talk, question: np.ndarray) -> None:
    answering.part("Short", 0.5)
    answering.finish()
    answering.clock.now += 1
    answering.take()
    answering.push(question, PAUSE)
    assert [type(event) for event in answering.take()] == [VoiceState, VoiceState, Generating]


def test_speech_that_begins_at_the_end_of_an_answer_counts(answering: Talk, question: np.ndarray) -> None:
    """Its onset is not confirmed when the answer ends."""
    speech = question[4_000 + 1_600 :]
    answering.push(speech[:PIECE])
    answering.finish()
    answering.take()
    answering.push(speech[PIECE:], PAUSE)
    assert [type(event) for event in answering.take()] == [VoiceState, VoiceState, Generating]


def test_without_barge_in_speech_has_no_effect(greeting: np.ndarray, question: np.ndarray) -> None:
    talk = Talk(HalfDuplexConfig())
    talk.push(greeting, PAUSE)
    talk.part("Hello", 30.0)
    talk.take()
    talk.push(question, PAUSE)
    assert (talk.take(), talk.port.n_breaks) == ([], 0)
    assert talk.half_duplex.interrupt(), "expected a request to stop the answer"
    assert isinstance(talk.take()[0], Interruption)
