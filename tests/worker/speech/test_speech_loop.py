"""The order of frames, prompts and live units, with streams that only count."""

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from models.qwen3_tts.streams import SpokenPart
from worker.engine_thread import EngineError
from worker.loop.batch_runner import DeviceLostError
from worker.speech.speech_loop import LEAD_S, SpeechLoop, SpokenSound, SpokenUtterance

INF = float("inf")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class CountedStreams:
    """Streams in which a prompt takes 30 ms and a frame 10 ms of the clock; each frame gives a second of sound."""

    def __init__(self, clock: Clock):
        self.clock, self.slots, self.n_steps, self.fails, self.slow_s = clock, list[int](), 0, False, 0.0
        self.error: Exception = RuntimeError("no frame")

    @property
    def can_step(self) -> bool:
        return bool(self.slots)

    def start(self, _: object) -> int:
        self.clock.now += 0.03
        self.slots.append(len(self.slots))
        return self.slots[-1]

    def step(self) -> list[SpokenPart]:
        self.clock.now += 0.01 + self.slow_s
        self.n_steps += 1
        if self.fails:
            raise self.error
        return [SpokenPart(slot, np.zeros(24_000, np.float32), None) for slot in self.slots]

    def cancel(self, slot: int) -> None:
        self.slots.remove(slot)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def streams(clock: Clock) -> CountedStreams:
    return CountedStreams(clock)


@pytest.fixture
def loop(streams: CountedStreams, clock: Clock) -> SpeechLoop:
    return SpeechLoop(streams, torch.device("cpu"), clock)  # type: ignore[arg-type]


def begun(loop: SpeechLoop) -> tuple[SpokenUtterance, list[Any]]:
    events: list[Any] = []
    utterance = SpokenUtterance(None, events.append)  # type: ignore[arg-type]
    loop.begin(utterance)
    return utterance, events


def test_nothing_runs_that_would_make_a_unit_late(loop: SpeechLoop, streams: CountedStreams) -> None:
    begun(loop)
    assert not loop.is_idle
    loop.run(INF)
    assert streams.n_steps == 1, "a prompt and its first frame run at once"
    begun(loop)
    for slack_s in (0.0, -0.5, 0.009):
        loop.run(slack_s)
        assert streams.n_steps == 1 and streams.slots == [0], f"expected nothing within {slack_s} s"
    loop.run(0.035)
    assert streams.slots == [0, 1] and streams.n_steps == 1, "the prompt fits, and no frame after it"
    loop.run(0.05)
    assert streams.n_steps == 2, "a text without sound does not wait for the one with sound left"


def test_frames_wait_for_units_while_clients_have_sound(
    loop: SpeechLoop, streams: CountedStreams, clock: Clock
) -> None:
    _, events = begun(loop)
    loop.run(INF)
    loop.run(0.5)
    assert streams.n_steps == 1, "the client has a second of sound"
    clock.now += 1 - LEAD_S + 0.01
    loop.run(0.5)
    assert streams.n_steps == 2
    loop.run(INF)
    assert streams.n_steps == 3, "without units frames follow each other"
    assert loop.n_sounds_late == 0 and all(isinstance(one, SpokenSound) for one in events)
    clock.now += 10
    loop.run(INF)
    assert loop.n_sounds_late == 1, "the client had nothing left to play"


def test_failed_frames_end_all_texts_and_free_their_slots(loop: SpeechLoop, streams: CountedStreams) -> None:
    texts = [begun(loop) for _ in range(2)]
    for _ in texts:
        loop.run(INF)
    streams.fails = True
    loop.run(INF)
    for _, events in texts:
        assert isinstance(events[-1], RuntimeError)
    assert loop.is_idle and not streams.slots
    streams.fails = False
    later, events = begun(loop)
    loop.cancel(later)  # before it has begun
    loop.run(INF)
    assert not events and not streams.slots


def test_only_a_lost_device_ends_the_thread(
    loop: SpeechLoop, streams: CountedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams.fails = True
    for streams.error in (torch.OutOfMemoryError("no room"), torch.AcceleratorError("CUDA error: one call")):
        _, events = begun(loop)
        loop.run(INF)
        assert events == [streams.error] and not streams.slots, f"expected the error of the frame, got {events}"

    def lose(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cpu, "synchronize", lose)
    _, events = begun(loop)
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        loop.run(INF)
    assert not events, f"expected the thread to tell its failure, got {events}"


def test_slow_steps_do_not_hold_back_others_for_ever(loop: SpeechLoop, streams: CountedStreams, clock: Clock) -> None:
    def encode() -> None:
        clock.now += 2

    begun(loop)
    loop.run(INF)
    for _ in range(2):
        loop.call(Future(), encode)
    loop.run(INF)
    begun(loop)
    clock.now += 1
    loop.run(0.04)
    assert streams.slots == [0, 1], "a prompt goes before a call that does not fit"
    loop.run(0.3)
    assert not loop.is_idle and clock.now < 4, "the second call waits"
    streams.slow_s = 0.9
    loop.run(INF)  # also the second call
    n_steps, streams.slow_s = streams.n_steps, 0.0
    clock.now += 2
    loop.run(0.3)
    assert streams.n_steps == n_steps, "the slow frame is remembered"
    clock.now += 10
    loop.run(0.3)
    assert streams.n_steps == n_steps + 1, "and forgotten"


def test_calls_get_their_result_between_units(loop: SpeechLoop) -> None:
    future: Future[int] = Future()
    begun(loop)
    loop.run(INF)  # a prompt takes 30 ms
    loop.call(future, lambda: 5)
    loop.run(0.0)
    assert not future.done()
    loop.run(INF)
    assert future.result(0) == 5
    late: Future[int] = Future()
    loop.call(late, lambda: 5)
    loop.end()
    assert isinstance(late.exception(0), EngineError), "nothing waits for a loop that has ended"
