"""Trials at the pauses of a session: which chunk gets one, and what makes it void."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from threading import Event
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.worker.early.test_pause import CERTAIN, NEEDED, SILENCE, SPEECH, LoudnessNetwork, sound_of
from worker.config.session import SessionConfig
from worker.early import pause_listener
from worker.early.pause_listener import MAX_UNHEARD, PauseListener
from worker.early.pause_thread import PauseThread
from worker.early.trial import EarlyTrial
from worker.protocol.messages import AudioChunk
from worker.protocol.wire import Sound

AUTO = SessionConfig(early_unit="auto", early_pause_ms=192)


def chunk(row: list[float]) -> AudioChunk:
    return AudioChunk(audio_base64=Sound(sound_of(row)))


SPOKEN, SILENT, BREATH = chunk([SPEECH] * CERTAIN), chunk([SILENCE] * NEEDED), chunk([SILENCE] * 2)


@pytest.fixture(autouse=True)
def loudness() -> Iterator[None]:
    with mock.patch.object(pause_listener, "shared_thread", lambda: PauseThread(LoudnessNetwork())):
        yield


def run(test: Callable[[PauseListener], Coroutine[Any, Any, None]], config: SessionConfig = AUTO) -> None:
    async def whole() -> None:
        listener = PauseListener()
        await listener.configure(config, starts_over=True)
        with mock.patch.object(pause_listener, "MAX_WAIT_S", 20.0):
            await test(listener)

    asyncio.run(whole())


async def trials(listener: PauseListener, *chunks: AudioChunk) -> list[EarlyTrial | None]:
    copies = [one.model_copy() for one in chunks]
    for one in copies:
        listener.push(one)
    return [await listener.trial_of(one) for one in copies]


def test_chunk_that_reaches_the_pause_gets_the_trial() -> None:
    async def test(listener: PauseListener) -> None:
        got = await trials(listener, SPOKEN, BREATH, SILENT, SILENT)
        assert [one is not None for one in got] == [False, False, True, False]
        assert not got[2].is_void, "expected a trial that stands while the user is silent"

    run(test)


def test_speech_makes_a_trial_void() -> None:
    async def test(listener: PauseListener) -> None:
        (_, trial) = await trials(listener, SPOKEN, SILENT)
        await trials(listener, BREATH)
        assert not trial.is_void
        await trials(listener, SPOKEN)
        assert trial.is_void, "expected a void trial after speech"

    run(test)


@pytest.mark.parametrize("config", [SessionConfig(), AUTO.model_copy(update={"compat": "reference"})], ids=str)
def test_no_trial_unless_the_setting_asks_for_it(config: SessionConfig) -> None:
    async def test(listener: PauseListener) -> None:
        assert await trials(listener, SPOKEN, SILENT) == [None, None]

    run(test, config)


def test_long_chunk_gets_no_trial() -> None:
    async def test(listener: PauseListener) -> None:
        assert await trials(listener, chunk([SPEECH] * 20 + [SILENCE] * NEEDED)) == [None]

    run(test)


def test_turning_off_makes_trials_void_and_ends_listening() -> None:
    async def test(listener: PauseListener) -> None:
        (_, trial) = await trials(listener, SPOKEN, SILENT)
        await listener.configure(SessionConfig(), starts_over=False)
        assert trial.is_void and await trials(listener, SPOKEN, SILENT) == [None, None]

    run(test)


def test_same_settings_keep_what_was_heard() -> None:
    async def test(listener: PauseListener) -> None:
        await trials(listener, SPOKEN)
        await listener.configure(AUTO.model_copy(update={"top_k": 3}), starts_over=False)
        assert (await trials(listener, SILENT))[0] is not None
        await trials(listener, SPOKEN)
        await listener.configure(AUTO, starts_over=True)
        assert await trials(listener, SILENT) == [None], "expected a new session's silence"

    run(test)


def test_chunks_that_are_not_asked_for_are_dropped() -> None:
    async def test(listener: PauseListener) -> None:
        for _ in range(3):
            listener.push(SPOKEN.model_copy())
        assert await listener.trial_of(SPOKEN.model_copy()) is None, "expected none for a chunk that was not pushed"
        assert (await trials(listener, SILENT))[0] is not None
        assert not listener._hearing, "expected nothing left of the chunks before"

    run(test)


def test_bad_chunk_is_left_to_its_unit() -> None:
    async def test(listener: PauseListener) -> None:
        broken = AudioChunk(audio_base64="AAA")
        nan = AudioChunk(audio_base64=Sound(np.full(600, np.nan, np.float32)))
        got = await trials(listener, SPOKEN, broken, nan, SILENT)
        assert [one is not None for one in got] == [False, False, False, True]

    run(test)


def test_unit_does_not_wait_for_a_slow_detector() -> None:
    free = Event()

    class SlowNetwork(LoudnessNetwork):
        def probabilities(self, sounds: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            free.wait()
            return super().probabilities(sounds, states)

    async def test(listener: PauseListener) -> None:
        with mock.patch.object(pause_listener, "MAX_WAIT_S", 0.001):
            assert await trials(listener, SPOKEN, SILENT) == [None, None]
        free.set()

    with mock.patch.object(pause_listener, "shared_thread", lambda: PauseThread(SlowNetwork())):
        run(test)


def test_long_chunk_makes_a_trial_void() -> None:
    async def test(listener: PauseListener) -> None:
        (_, trial) = await trials(listener, SPOKEN, SILENT)
        await trials(listener, chunk([SILENCE] * 40))
        assert trial is not None and trial.is_void, "expected a chunk that is heard in part to count as speech"

    run(test)


def test_a_session_has_a_limited_number_of_unheard_pieces() -> None:
    free = Event()

    class HeldNetwork(LoudnessNetwork):
        def probabilities(self, sounds: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            free.wait(20.0)
            return super().probabilities(sounds, states)

    async def test(listener: PauseListener) -> None:
        for _ in range(MAX_UNHEARD + 10):
            listener.push(SPOKEN.model_copy())
        n_kept = len(listener._hearing)
        free.set()
        assert n_kept == MAX_UNHEARD, f"expected {MAX_UNHEARD} pieces to wait, got {n_kept}"

    with mock.patch.object(pause_listener, "shared_thread", lambda: PauseThread(HeldNetwork())):
        run(test)
