"""One conversation of the fake worker: every message is answered in order, as the protocol requires.

Units listen and speak in a fixed cycle; speech is a tone. Times in results are measured in this process. A chunk is
a unit, whatever its length, except in a session with `early_unit` `auto`: there sound in pieces waits for its second.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from websockets.asyncio.server import ServerConnection

from benchmarks.serve.open_second import OpenSecond
from models.errors import ModelError, SettingsError
from worker.config.session import SessionConfig
from worker.protocol.codes import ErrorCode
from worker.protocol.gateway_messages import Decided
from worker.protocol.messages import (
    PLAIN_SPEC,
    Adjust,
    Adjusted,
    AudioChunk,
    ClientMessage,
    Error,
    Form,
    Interrupt,
    Interrupted,
    Partial,
    Pause,
    Paused,
    Prepare,
    Prepared,
    Result,
    Resume,
    Resumed,
    ServerMessage,
    Stop,
    Stopped,
    Timeout,
    VideoFrame,
    read_binary,
    read_text,
    write,
)
from worker.protocol.text_messages import InsertText, TextInserted
from worker.protocol.wire import Sound, WireError

SOUND_RATE = 24_000
UNIT_MS = 1000.0
TONE_HZ, LOUDNESS = 440, 0.2
N_PARTS = 2  # of a unit with partial results
MAX_WAITING = 256  # messages; further ones are not read
NORMAL = 1000


class ScriptedUnit(NamedTuple):
    """What a unit says. ends: its turn ends in it."""

    text: str
    ends: bool


# Session, number of the unit from 1, the client's message -> what the unit says; None: it listens.
UnitScript = Callable[[str, int, AudioChunk], ScriptedUnit | None]


class WorkerBehaviour(Protocol):
    """Behaviour of the worker, which may change at any time.

    Times in s. thawed: nothing is sent until it is set. script: decides in place of the cycle.
    """

    think_s: float
    n_listen: int
    n_speak: int
    speaks: bool
    pause_timeout: float
    script: UnitScript | None
    n_rebuilt: int
    thawed: asyncio.Event

    def count(self, ms: float) -> None:
        """Count an answered unit."""


class QueuedMessage(NamedTuple):
    """A message that waits for its turn. received: monotonic seconds. message: None after a disconnect."""

    message: ClientMessage | WireError | None
    received: float


@cache
def tone(form: Form, n_samples: int) -> Sound:
    """A tone at 24 kHz in the requested encoding. Its period divides half a second, so pieces join without a click."""
    wave = LOUDNESS * np.sin(2 * np.pi * TONE_HZ / SOUND_RATE * np.arange(n_samples))
    held: Form = "pcm16" if form == "pcm16" else "float32"
    return Sound(Sound(wave.astype(np.float32)).packed(held), held)


class FakeConversation:
    """Answers one client; `run` lasts from the handshake to the close.

    name: the session's. units: number since the last `prepare`. paused: rejects units now. is_thinking: a unit runs.
    """

    def __init__(self, worker: WorkerBehaviour, name: str, socket: ServerConnection, free: Callable[[], None]):
        """free: releases the slot."""
        self.name, self.units, self.paused = name, 0, False
        self._worker, self._socket, self._free = worker, socket, free
        self._inbox: asyncio.Queue[QueuedMessage] = asyncio.Queue(MAX_WAITING)
        self._n_chunks = 0  # received and not started
        self._spec = PLAIN_SPEC
        self._config = SessionConfig()
        self._prepared = self._sounds = self._turn_open = False
        self._cycle_position = 0  # position in the cycle of listening and speaking units
        self._pause_ends: float | None = None
        self._frames: list[VideoFrame] = []
        self._second = OpenSecond()
        self._n_held = 0  # pictures of the unit whose sound waits
        self._decided: Decided | None = None
        self._interrupt_requested = asyncio.Event()
        self.is_thinking = False

    async def run(self) -> None:
        """Serve the client. Raises: ConnectionClosed if it disconnects."""
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._read())
            await self._answer_all()
            reading.cancel()

    async def _read(self) -> None:
        spec = PLAIN_SPEC
        try:
            async for data in self._socket:
                received = time.monotonic()
                try:
                    message = read_text(data) if isinstance(data, str) else read_binary(data, spec)
                except WireError as error:
                    message = error
                match message:
                    case Prepare():
                        spec = message.spec
                    case AudioChunk():
                        self._n_chunks += 1
                    case Interrupt() if self._turn_open or self.is_thinking:
                        self._interrupt_requested.set()
                await self._inbox.put(QueuedMessage(message, received))
        finally:
            with suppress(asyncio.QueueFull):  # sending then raises
                self._inbox.put_nowait(QueuedMessage(None, 0.0))

    async def _answer_all(self) -> None:
        while True:
            try:
                async with asyncio.timeout_at(self._pause_ends):
                    waiting = await self._inbox.get()
            except TimeoutError:
                reason = f"Pause timeout ({self._pause_s:.1f}s)"
                await self._close(Timeout(reason=reason), "Pause timeout")
                return
            message = waiting.message
            if message is None:
                return
            try:
                if isinstance(message, WireError):
                    raise message
                if isinstance(message, Stop):
                    await self._close(Stopped(session_id=self.name), "stopped")
                    return
                await self._answer(message, waiting.received)
            except ModelError as error:
                code = ErrorCode.BAD_CONFIG if isinstance(error, SettingsError) else ErrorCode.INTERNAL
                await self._send(Error.of(error, code))

    async def _close(self, last: ServerMessage, reason: str) -> None:
        self._free()  # before the client receives the close, since it may reconnect at once
        await self._send(last)
        await self._socket.close(NORMAL, reason)

    async def _answer(self, message: ClientMessage, received: float) -> None:
        answer: Callable[[Any], Coroutine[Any, Any, None]] | None = {
            Prepare: self._prepare,
            Pause: self._pause,
            Resume: self._resume,
            Interrupt: self._interrupt,
            Adjust: self._adjust,
            InsertText: self._insert_text,
        }.get(type(message))
        if isinstance(message, AudioChunk):
            await self._unit(message, received)
        elif isinstance(message, VideoFrame):
            self._frames.append(message)
        elif isinstance(message, Decided):
            self._decided = message
        elif answer is not None:
            await answer(message)

    async def _prepare(self, message: Prepare) -> None:
        self._config, notes = SessionConfig.of(SessionConfig(), message.config)
        message.tts_ref_audio()
        self._sounds = self._config.generate_audio and self._worker.speaks
        self._prepared, self._spec = True, message.spec
        self._turn_open = self.paused = False
        self._pause_ends = None
        self.units = self._cycle_position = 0
        self._frames.clear()
        self._second, self._n_held = OpenSecond(), 0
        await self._send(
            Prepared(
                prompt_length=len(message.system_prompt), session_id=self.name, spec=message.spec, notes=list(notes)
            )
        )

    async def _pause(self, message: Pause) -> None:
        self._pause_s = self._worker.pause_timeout if message.timeout is None else message.timeout
        self.paused, self._pause_ends = True, asyncio.get_running_loop().time() + self._pause_s
        await self._send(Paused(timeout=self._pause_s))

    async def _resume(self, _: Resume) -> None:
        self.paused, self._pause_ends = False, None
        await self._send(Resumed())

    async def _interrupt(self, _: Interrupt) -> None:
        await self._send(Interrupted())

    async def _adjust(self, message: Adjust) -> None:
        if not self._prepared:
            raise _not_now(ErrorCode.NOT_PREPARED, "Not prepared yet")
        self._config = self._config.adjusted(message.settings())
        self._sounds = self._config.generate_audio and self._worker.speaks
        await self._send(Adjusted.of(message, self._config.model_dump(mode="json"), self.units + 1, []))

    async def _insert_text(self, message: InsertText) -> None:
        if not self._prepared:
            raise _not_now(ErrorCode.NOT_PREPARED, "Not prepared yet")
        await self._send(TextInserted(n_rows=len(message.text.split())))

    # --- units ---------------------------------------------------------------------------------

    async def _unit(self, chunk: AudioChunk, received: float) -> None:
        started, self.is_thinking = time.monotonic(), True
        self._n_chunks -= 1
        frames, self._frames = self._frames, []
        decided, self._decided = self._decided, None
        try:
            if not self._prepared:
                raise _not_now(ErrorCode.NOT_PREPARED, "Not prepared yet")
            if self.paused:
                raise _not_now(ErrorCode.PAUSED, "Worker is paused")
            samples = chunk.samples()
            n_pictures = len(frames) + len(chunk.pictures())
            for frame in frames:
                frame.picture()
            shift_ms = 0.0
            if self._config.runs_early:
                speaks = self._worker.script is None and self._cycle_position >= self._worker.n_listen
                n_missing = self._second.missing(samples, speaks=speaks and not self._turn_open and decided is None)
                if n_missing is None:
                    self._n_held += n_pictures
                    await self._send(self._result(received, started, is_listen=True, incomplete=True))
                    return
                n_pictures, self._n_held = n_pictures + self._n_held, 0
                shift_ms = n_missing / 16
            if decided is not None:
                await self._rebuild(decided, received, started)
                return
            await self._think()
            await self._decide(chunk, n_pictures, shift_ms, received, started)
        finally:
            self.is_thinking = False

    async def _rebuild(self, decided: Decided, received: float, started: float) -> None:
        """Answer a unit that another worker has decided. Its message has the state after it."""
        if decided.unit == self._worker.dies_rebuilding:
            self._worker.crash()
            return
        self._worker.n_rebuilt += 1
        self.units, self._cycle_position, self._turn_open = decided.unit, decided.seed, decided.listens
        await self._send_decided()
        await self._send(self._result(received, started, is_listen=True))

    async def _send_decided(self) -> None:
        if self._spec.resume:
            state = Decided(
                unit=self.units, seed=self._cycle_position, listens=self._turn_open, sampled=[], remembered=[]
            )
            await self._socket.send(write(state))

    async def _think(self) -> None:
        if self._worker.think_s > 0 and not self._interrupt_requested.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._worker.think_s):
                    await self._interrupt_requested.wait()

    async def _decide(
        self, chunk: AudioChunk, n_pictures: int, shift_ms: float, received: float, started: float
    ) -> None:
        decided, self.units = time.monotonic(), self.units + 1
        worker, was_open, text = self._worker, self._turn_open, ""
        if chunk.force_listen or self._interrupt_requested.is_set():
            self._interrupt_requested.clear()
            self._cycle_position, is_listen, ends = 0, True, was_open
        elif worker.script is not None:
            scripted = worker.script(self.name, self.units, chunk)
            is_listen, ends = scripted is None, scripted is not None and scripted.ends
            text = "" if scripted is None else scripted.text
        else:
            if chunk.force_speak and worker.n_speak:
                self._cycle_position = max(self._cycle_position, worker.n_listen)
            is_listen = self._cycle_position < worker.n_listen
            self._cycle_position = (self._cycle_position + 1) % (worker.n_listen + worker.n_speak)
            ends = not is_listen and self._cycle_position == 0
            text = "" if is_listen else f"second {self.units}. "
        self._turn_open = not is_listen and not ends
        sounds, first_sound, n_parts = self._sounds and not is_listen, None, 0
        if sounds and self._spec.partial_results:
            n_parts = N_PARTS
            for part in range(1, N_PARTS + 1):
                sound = tone(self._spec.sound_out, SOUND_RATE // N_PARTS)
                words = text if part == 1 else ""
                await self._send(Partial(current_time=self.units, part=part, text=words, audio_data=sound))
                first_sound = first_sound or 1000 * (time.monotonic() - started)
        sound = tone(self._spec.sound_out, SOUND_RATE) if sounds and not n_parts else None
        now = time.monotonic()
        if sound:
            first_sound = 1000 * (now - started)
        think_ms, sound_ms = 1000 * (decided - started), 1000 * (now - decided)
        worker.count(1000 * (now - started))
        await self._send_decided()
        await self._send(
            self._result(
                received,
                started,
                is_listen=is_listen,
                text=text,
                audio_data=sound,
                end_of_turn=ends,
                cost_llm_ms=think_ms,
                cost_tts_prep_ms=0.0,
                cost_tts_ms=0.0,
                cost_token2wav_ms=sound_ms if sounds else 0.0,
                n_tokens=0 if is_listen else 2,
                n_tts_tokens=25 if sounds else 0,
                vision_slices=n_pictures,
                n_parts=n_parts,
                stages={
                    "wait": 0.0,
                    "decode": think_ms,
                    "sound": sound_ms if sounds else 0.0,
                    "first_sound": first_sound,
                    "first_vocoder": None if first_sound is None else max(first_sound - think_ms, 0.0),
                },
                early=True if shift_ms else None,
                shift_ms=shift_ms or None,
            )
        )

    def _result(self, received: float, started: float, **fields: Any) -> Result:
        """A result with the fields that every one has."""
        now = time.monotonic()
        return Result(
            current_time=self.units,
            cost_all_ms=1000 * (now - started),
            server_send_ts=time.time(),
            wall_clock_ms=1000 * (now - started),
            kv_cache_length=self.units,
            lag_ms=1000 * (started - received),
            backlog_units=self._n_chunks,
            headroom_ms=UNIT_MS - 1000 * (now - received),
            **fields,
        )

    async def _send(self, message: ServerMessage) -> None:
        await self._worker.thawed.wait()
        await self._socket.send(write(message, self._spec))


def _not_now(code: ErrorCode, text: str) -> WireError:
    """An error with the texts that clients match."""
    return WireError(code, "audio_chunk", expected="a prepared session that is not paused", got=code, text=text)
