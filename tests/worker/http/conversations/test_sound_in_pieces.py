"""`DuplexConversation` with sound in pieces: which of them the engine gets, and what becomes of those that fail."""

from concurrent.futures import Future
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import AudioError
from tests.worker.early.test_pause import LoudnessNetwork
from tests.worker.early.test_pause_listener import AUTO, SILENT, SPOKEN
from tests.worker.http.conversations.duplex_stage import Handle, Stage, staged, until
from worker.config.session import SessionConfig
from worker.early import pause_listener
from worker.early.pause_thread import PauseThread
from worker.loop.audio_buffer import LEAD_SAMPLES, LOOKAHEAD_SAMPLES, AudioBuffer
from worker.loop.results import Failure, UnitResult
from worker.protocol.messages import AudioChunk, Error, Prepare, Prepared, Result, Spec
from worker.protocol.wire import Sound

PICTURE = "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"  # a GIF of one pixel


class BufferHandle(Handle):
    """An engine session with the engine's buffer. sounds: of the units it was sent. fails: the next unit is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer, self.sounds, self.fails = AudioBuffer(), list[np.ndarray](), False

    @property
    def n_to_unit(self) -> int:  # type: ignore[override]
        return self.buffer.n_to_unit

    def send(self, sound: np.ndarray, frames: Any, **options: Any) -> Future[None]:
        if self.fails:
            self.fails = False
            self.calls.append("send")
            raise AudioError("sound", expected="sound", got="a test")
        self.sounds.append(np.concatenate((*options["earlier"], sound)))
        self.buffer.extend(options["earlier"])
        self.before = self.buffer.copy()
        self.buffer.push(sound)
        if options["close_early"]:
            self.buffer.complete()
        return super().send(sound, frames, **options)

    def take(self) -> bool:
        """Take a unit. Returns: whether there is one."""
        if self.buffer.peek() is None:
            return False
        self.buffer.commit()
        self.n_units += 1
        return True


def piece(begin: int, n: int, **fields: Any) -> AudioChunk:
    """Samples of a ramp, so that each one is known."""
    return AudioChunk(audio_base64=Sound((np.arange(begin, begin + n) / 2**20).astype(np.float32)), **fields)


async def prepared(spec: Spec | None = None, config: SessionConfig | None = None) -> Stage:
    stage = Stage()
    stage.handle = BufferHandle()
    stage.conversation._service.session_config = lambda given: (config or SessionConfig(), [])
    await stage.say(Prepare() if spec is None else Prepare(spec=spec))
    assert isinstance(await stage.hear(), Prepared)
    return stage


async def answered(stage: Stage, chunk: AudioChunk, n_sent: int) -> Result:
    """The result of a chunk that the engine gets as its `n_sent`-th one."""
    await stage.say(chunk)
    await stage.sent(n_sent)
    is_whole = stage.handle.take()
    stage.n_units += is_whole
    stage.conversation.emit(
        UnitResult("c", stage.n_units, True, "", False, context_len=20 * n_sent, is_incomplete=not is_whole)
    )
    result = await stage.hear()
    assert isinstance(result, Result), f"expected a result, got {result!r}"
    return result


async def waiting(stage: Stage, chunk: AudioChunk) -> Result:
    """The result of a chunk that the engine does not get."""
    n_before = len(stage.handle.sounds)
    await stage.say(chunk)
    result = await stage.hear()
    assert isinstance(result, Result) and result.incomplete, f"expected an incomplete result, got {result!r}"
    assert len(stage.handle.sounds) == n_before, "expected the piece to wait beside the engine"
    return result


@staged
async def test_engine_gets_the_pieces_of_a_unit_as_one() -> None:
    stage = await prepared()
    first = [await waiting(stage, piece(at, 1_600)) for at in range(0, 14_400, 1_600)]
    assert {(one.current_time, one.kv_cache_length) for one in first} == {(0, 10)}, "expected the prompt's rows"
    whole = await answered(stage, piece(14_400, 1_600), 1)
    assert (whole.incomplete, whole.current_time) == (None, 1)
    [sound] = stage.handle.sounds
    assert np.array_equal(sound, np.arange(16_000, dtype=np.float32) / 2**20)
    later = await waiting(stage, piece(16_000, 15_000))
    assert (later.current_time, later.kv_cache_length, later.is_listen, later.text) == (1, 20, True, "")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=24))
def test_units_are_full_with_the_same_pieces_as_in_the_engine(lengths: list[int]) -> None:
    """A piece that fills a unit has the same result, and units the same samples, as if the engine got each piece."""

    async def test() -> None:
        stage, alone, at = await prepared(), AudioBuffer(), 0
        for n in lengths:
            alone.push((np.arange(at, at + n) / 2**20).astype(np.float32))
            is_whole = alone.n_whole > 0
            if is_whole:
                result = await answered(stage, piece(at, n), len(stage.handle.sounds) + 1)
                alone.peek()
                alone.commit()
            else:
                result = await waiting(stage, piece(at, n))
            assert (result.incomplete is None) is is_whole
            at += n
        joined = np.concatenate([*stage.handle.sounds, *stage.conversation._unsent._pieces])
        assert np.array_equal(joined, (np.arange(at) / 2**20).astype(np.float32)), "expected each sample once, in order"

    staged(test)()


@staged
async def test_pieces_that_the_engine_has_to_know_are_sent_with_all_sound() -> None:
    stage = await prepared()
    await waiting(stage, piece(0, 1_000))
    picture = await answered(stage, piece(1_000, 1_000, frame_base64_list=[PICTURE]), 1)
    assert picture.incomplete, "expected a picture that is encoded before its unit"
    await waiting(stage, piece(2_000, 500))
    closed = await answered(stage, piece(2_500, 500, close_early=True), 2)
    assert closed.incomplete is None
    assert [len(one) for one in stage.handle.sounds] == [2_000, 1_000]
    n_left = stage.handle.buffer.n_waiting
    assert n_left == LEAD_SAMPLES - LOOKAHEAD_SAMPLES, (
        f"expected whole seconds in the engine, got {n_left} samples more"
    )


@staged
async def test_refused_unit_takes_only_its_last_piece_with_it() -> None:
    stage = await prepared()
    for at in (0, 5_000):
        await waiting(stage, piece(at, 5_000))
    stage.handle.fails = True
    await stage.say(piece(90_000, 6_000))
    assert isinstance(await stage.hear(), Error)
    assert (await answered(stage, piece(10_000, 6_000), 2)).incomplete is None
    [sound] = stage.handle.sounds
    assert np.array_equal(sound, np.arange(16_000, dtype=np.float32) / 2**20)


@pytest.mark.parametrize("is_taken", [False, True], ids=["before its text", "after its text"])
def test_failing_unit_gives_no_piece_back(is_taken: bool) -> None:
    """The engine has the earlier pieces, and restores them itself unless the unit is in the context."""

    @staged
    async def test() -> None:
        stage = await prepared()
        for at in (0, 5_000):
            await waiting(stage, piece(at, 5_000))
        await stage.say(piece(90_000, 6_000))
        await stage.sent(1)
        if is_taken:
            stage.handle.take()
        else:
            stage.handle.buffer = stage.handle.before
        stage.conversation.emit(Failure("c", 0, AudioError("sound", expected="sound", got="a test")))
        assert isinstance(await stage.hear(), Error)
        if is_taken:
            result = await waiting(stage, piece(0, 6_000))
            assert result.current_time == 1, "expected the failed unit to count"
        else:
            assert (await answered(stage, piece(10_000, 6_000), 2)).incomplete is None
            assert len(stage.handle.sounds[1]) == 6_000, "expected no piece twice"

    test()


@staged
async def test_piece_that_is_refused_beside_a_unit_in_flight_gives_nothing_back() -> None:
    stage = await prepared(Spec(backlog="catch_up"))
    await waiting(stage, piece(0, 8_000))
    await stage.say(piece(8_000, 8_000), AudioChunk(audio_base64=Sound(np.array([np.nan], np.float32))))
    await stage.sent(1)
    stage.handle.take()
    stage.conversation.emit(UnitResult("c", 1, True, "", False))
    assert isinstance(await stage.hear(), Result) and isinstance(await stage.hear(), Error)
    await waiting(stage, piece(16_000, 8_000))
    await answered(stage, piece(24_000, 8_000), 2)
    assert [len(one) for one in stage.handle.sounds] == [16_000, 16_000]


@staged
async def test_refused_piece_is_not_kept() -> None:
    stage = await prepared()
    await waiting(stage, piece(0, 8_000))
    await stage.say(AudioChunk(audio_base64=Sound(np.array([np.nan], np.float32))))
    error = await stage.hear()
    assert isinstance(error, Error) and error.code == "bad_audio"
    await answered(stage, piece(8_000, 8_000), 1)
    assert np.array_equal(stage.handle.sounds[0], np.arange(16_000, dtype=np.float32) / 2**20)


@staged
async def test_prepare_drops_the_sound_that_waits() -> None:
    stage = await prepared()
    await waiting(stage, piece(50_000, 9_000))
    await stage.say(Prepare())
    assert isinstance(await stage.hear(), Prepared)
    stage.handle.buffer = AudioBuffer()
    await answered(stage, piece(0, 16_000), 1)
    assert len(stage.handle.sounds[0]) == 16_000


@staged
async def test_no_piece_overtakes_units_in_flight() -> None:
    stage = await prepared(Spec(backlog="catch_up"))
    await stage.say(piece(0, 16_000), piece(16_000, 1_000))
    await stage.sent(2)
    assert [len(one) for one in stage.handle.sounds] == [16_000, 1_000], "expected the engine to answer both, in order"


@staged
async def test_pause_sends_the_sound_so_far() -> None:
    network = PauseThread(LoudnessNetwork())
    with (
        mock.patch.object(pause_listener, "shared_thread", lambda: network),
        mock.patch.object(pause_listener, "MAX_WAIT_S", 20.0),
    ):
        stage = await prepared(config=AUTO)
        await waiting(stage, SPOKEN.model_copy())
        await stage.say(SILENT.model_copy())
        await until(lambda: len(stage.handle.sounds) == 1)
        n_spoken, n_silent = (len(one.samples()) for one in (SPOKEN, SILENT))
        assert len(stage.handle.sounds[0]) == n_spoken + n_silent
