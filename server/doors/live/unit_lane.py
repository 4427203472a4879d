"""A live session's units: one second of the client's sound each, with silence for what is missing.

Everything here runs on the event loop, one call after another. Contains no reading of events and no pacing of output.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from server.doors.core.unit_session import UnitSession
from server.doors.live.sound.resample import floats_of
from server.doors.live.sound.unit_buffer import UnitBuffer
from server.doors.live.sound.unit_edges import UnitEdges
from server.doors.live.sound.unit_pieces import UnitPieces
from server.doors.live.sound.wire_sound import without_padding
from server.doors.live.wake_timer import WakeTimer
from worker.protocol.codec import FromClient
from worker.protocol.messages import (
    MAX_PAUSE_S,
    AudioChunk,
    Error,
    Interrupt,
    Partial,
    Pause,
    Prepare,
    Prepared,
    Result,
    ServerMessage,
)
from worker.protocol.text_messages import InsertText, TextInserted

LOG = logging.getLogger(__name__)
UNIT_S = 1.0
GRACE_S = 0.3  # by which sound may be late; then silence replaces it
REST_AFTER_S = 10.0  # seconds without sound, text or speech before the worker gets `pause`
MAX_AHEAD_MS = 1500  # of speech that waits for its time
MAX_TEXTS = 32  # texts that are not in the context yet; sessions refuse further ones


class LiveHost(Protocol):
    """The session that a lane belongs to."""

    @property
    def waiting_ms(self) -> int:
        """Length of the speech that the client has not received yet."""

    def on_ready(self, error: Error | None) -> None:
        """The context is prepared, or refused with an error."""

    def on_history_refused(self, error: Error) -> None:
        """A text that the context should begin with is not in it."""

    def on_speech(self, text: str, sound: np.ndarray) -> None:
        """The model says something. sound: [n] float32 at 24 kHz."""

    def on_unit(self) -> None:
        """A unit is over."""


@dataclass(frozen=True)
class _Text:
    """A text for the model. is_said: the model must speak next. on_done: gets None, or the error."""

    message: InsertText
    is_said: bool
    on_done: Callable[[Error | None], None]


class LiveLane:
    """One session's units. clock: monotonic s."""

    def __init__(self, host: LiveHost, clock: Callable[[], float]):
        self._host, self._clock = host, clock
        self._buffer = UnitBuffer()
        self._pieces, self._edges = UnitPieces(self._buffer), UnitEdges(self._buffer)
        self._texts: deque[_Text] = deque()
        self._unconfirmed: deque[_Text] = deque()
        self._units: UnitSession | None = None
        self._is_ready = self._is_speaking = self._must_speak = self._must_listen = False
        self._text_sent = ""  # of the unit in flight
        self._in_flight = self._is_dropped = self._is_forced = False  # is_forced: to speak
        self._last_dropped: AudioChunk | None = None  # up to it, what a piece completes is dropped
        self._due: float | None = None  # when the next unit should be complete; None: units pause
        self._context_len = 0
        self._active_at = clock()
        self._timer = WakeTimer(clock)

    # --- the worker's session ------------------------------------------------------------------

    def attach(self, units: UnitSession, prepare: Prepare, history: list[InsertText]) -> None:
        """Begin a context on a worker. history: texts that come before the first unit."""
        self._units, self._is_ready = units, False
        self._is_speaking = self._is_dropped = self._must_listen = False
        self._last_dropped = None
        self._pieces.clear()
        units.send(prepare)
        for text in history:
            units.send(text)

    def detach(self) -> None:
        """Send no more units. What the unit in flight was asked to do is asked of the next one."""
        self._must_speak = self._must_speak or (self._in_flight and self._is_forced and not self._is_dropped)
        self._in_flight = False
        self._pieces.clear()
        self._units = None
        self._timer.stop()
        self._texts.extendleft(reversed(self._unconfirmed))
        self._unconfirmed.clear()

    @property
    def n_texts(self) -> int:
        """Number of inserted texts that are not in the context yet."""
        return len(self._texts) + len(self._unconfirmed)

    @property
    def is_answering(self) -> bool:
        """Whether the model's turn is open, or must open with the next unit."""
        return self._is_speaking or self._must_speak

    @property
    def context_ratio(self) -> float | None:
        """Used part of the context, 0 to 1; None if it is not known."""
        n_rows = None if self._units is None else self._units.max_context_len
        return round(min(1.0, self._context_len / n_rows), 4) if n_rows else None

    # --- the client's input --------------------------------------------------------------------

    def append(self, samples: np.ndarray) -> None:
        """Add sound, [n] float32 at 16 kHz."""
        self._touch()
        if dropped := self._buffer.append(samples):
            LOG.warning("dropped %d samples: the client sends sound faster than real time", dropped)
        self._edges.record_sound(len(samples), self._active_at)
        self._pump()

    def insert(self, message: InsertText, *, is_said: bool, on_done: Callable[[Error | None], None]) -> None:
        """Insert a text before the next unit. is_said: the unit after it speaks."""
        self._touch()
        self._texts.append(_Text(message, is_said, on_done))
        self._pump()

    def interrupt(self) -> None:
        """End the model's turn: what the unit in flight still makes is dropped, and the next unit listens."""
        self._must_listen, self._must_speak = self._is_speaking or self._in_flight, False
        if not self._in_flight:
            self._last_dropped = self._pieces.newest
        if (self._in_flight or self._last_dropped) and not self._is_dropped and self._units is not None:
            self._is_dropped = True
            self._units.send(Interrupt())

    def wake(self) -> None:
        """Look again whether a unit is due; the host has sent speech."""
        self._pump()

    # --- the worker's answers ------------------------------------------------------------------

    def on_partial(self, partial: Partial) -> None:
        """Pass on a part of the unit in flight, which a piece of its sound may have completed."""
        if not self._in_flight and self._pieces.oldest is not None:
            self._in_flight, self._is_forced = True, False
            self._must_listen = self._must_listen or self._is_dropped
        if self._is_dropped:
            return
        self._text_sent += partial.text
        sound = b"" if partial.audio_data is None else partial.audio_data.packed("pcm16")
        self._say(partial.text, sound)

    def on_answer(self, request: FromClient, answer: ServerMessage) -> None:
        """Handle the answer to a message."""
        error = answer if isinstance(answer, Error) else None
        if isinstance(request, Prepare):
            self._is_ready = isinstance(answer, Prepared)
            self._touch()
            self._due = self._edges.on_answer(answer, self._active_at) or self._due
            self._host.on_ready(error)
        elif isinstance(request, InsertText):
            if self._unconfirmed and self._unconfirmed[0].message is request:
                text = self._unconfirmed.popleft()
                if text.is_said and isinstance(answer, TextInserted):
                    self._must_speak = not self._is_speaking
                text.on_done(error)
            elif error is not None:
                self._host.on_history_refused(error)
        elif isinstance(request, AudioChunk):
            self._on_unit(request, answer)
        self._pump()

    def _on_unit(self, request: AudioChunk, answer: ServerMessage) -> None:
        is_piece = request is self._pieces.oldest
        is_last_dropped = request is self._last_dropped
        if not self._pieces.ends_unit(request, answer):
            if is_last_dropped:  # none of the pieces before the interrupt has completed a unit
                self._is_dropped, self._last_dropped = False, None
            return
        if is_piece and self._due is not None:
            self._due = self._clock() + UNIT_S  # it has run early
        self._in_flight = False
        if isinstance(answer, Result):
            self._is_speaking = not (answer.is_listen or answer.end_of_turn)
            self._context_len = answer.kv_cache_length
            if not self._is_dropped:
                self._on_result(answer)
        elif isinstance(answer, Error):
            LOG.warning("a unit failed: %s", answer.code)
        self._is_dropped, self._last_dropped, self._text_sent = False, None, ""
        self._host.on_unit()

    def _on_result(self, result: Result) -> None:
        sound = b""
        if result.audio_data is not None and not result.is_listen:
            sound = without_padding(result.audio_data.packed("pcm16"))
        self._say(result.text[len(self._text_sent) :], sound)

    def _say(self, text: str, pcm16: bytes) -> None:
        if text or pcm16:
            self._active_at = self._clock()
            self._host.on_speech(text, floats_of(pcm16))

    # --- units ---------------------------------------------------------------------------------

    def _touch(self) -> None:
        """Something happens: units go on at the pace of the clock."""
        now = self._active_at = self._clock()
        if self._due is None:
            self._due = now + UNIT_S

    def _pump(self) -> None:
        """Send the next unit if it is time, or wake up when it will be."""
        if self._units is None or not self._is_ready or self._in_flight:
            return
        while self._texts:
            text = self._texts.popleft()
            self._unconfirmed.append(text)
            self._units.send(text.message)
        if self._unconfirmed or self._due is None or self._host.waiting_ms > MAX_AHEAD_MS:
            return
        if self._may_run_early and not self._buffer.has_unit:
            self._pieces.send(self._units)
        if self._pieces.oldest is not None:
            return  # its answer, which tells whether the unit has run early
        now = self._clock()
        if not self._buffer.has_unit and now < self._due + GRACE_S:
            self._timer.set(self._due + GRACE_S, self._pump)
            return
        if not self._buffer.has_unit and self._is_at_rest(now):
            self._due = None
            self._units.send(Pause(timeout=MAX_PAUSE_S))
            return
        self._send_unit(now)

    @property
    def _may_run_early(self) -> bool:
        """Whether the next unit may run before its second is full: the model listens, and may do as it likes."""
        is_bound = self._is_speaking or self._must_speak or self._must_listen
        return self._units is not None and self._units.runs_early and not is_bound

    def _is_at_rest(self, now: float) -> bool:
        return not self._is_speaking and not self._must_speak and now - self._active_at > REST_AFTER_S

    def _send_unit(self, now: float) -> None:
        assert self._units is not None and self._due is not None
        self._due = self._due + UNIT_S if abs(now - self._due) < UNIT_S else now + UNIT_S
        force_listen, force_speak = self._decided()
        self._is_forced = force_speak
        self._text_sent, self._in_flight = "", True
        self._units.send(self._pieces.take_unit(force_listen=force_listen, force_speak=force_speak))

    def _decided(self) -> tuple[bool, bool]:
        """Whether the next unit must listen, and whether it must speak."""
        if self._must_listen:
            self._must_listen = False
            return True, False
        must_speak, self._must_speak = self._must_speak, False
        return False, must_speak
