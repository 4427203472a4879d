"""The duplex lane: the client's sound becomes units, and the model's turns become responses.

Everything here runs on the event loop, one call after another: the client's events, the worker's answers, what the
detector hears, and the unit timer. Contains no reading of events.
"""

import logging
from collections.abc import Callable

import numpy as np

from server.doors.core.unit_session import UnitSession
from server.doors.live.event_error import EventError
from server.doors.live.sound.detector import Heard, SpeechHeard, SpeechOver
from server.doors.live.sound.detector_feed import DetectorFeed
from server.doors.live.sound.unit_buffer import UnitBuffer
from server.doors.live.sound.unit_edges import UnitEdges
from server.doors.live.sound.unit_pieces import UnitPieces
from server.doors.live.sound.wire_sound import without_padding
from server.doors.live.wake_timer import WakeTimer
from server.doors.realtime.engine_context import EngineContext
from server.doors.realtime.lane_host import LaneHost
from server.doors.realtime.responses import (
    COMPLETED,
    TOO_LONG,
    CancelReason,
    RealtimeResponse,
    ResponseEnd,
    cancelled,
    context_full,
    failed,
    out_of_room,
)
from server.doors.realtime.session_config import TurnDetection
from server.doors.realtime.turns.barge_in import BargeIn
from server.doors.realtime.turns.idle_timeout import IdleTimeout
from server.doors.realtime.turns.side_calls import drop_calls, send_calls
from server.doors.realtime.turns.turn_policy import TurnPolicy, UnitDecision
from server.doors.realtime.turns.unit_in_flight import UnitInFlight
from server.doors.realtime.turns.unit_timer import TimerState, UnitTimer, send_at
from server.doors.realtime.turns.user_turns import UserTurns
from server.doors.realtime.usage import TokenUsage, usage_of
from worker.protocol.codec import FromClient
from worker.protocol.messages import AudioChunk, Error, Interrupt, Partial, Prepare, Result, ServerMessage
from worker.protocol.text_messages import InsertText

LOG = logging.getLogger(__name__)
FAST_AHEAD_S = 0.3  # of sound that a client still has when the next unit of fast speech begins
PAUSE_AFTER_S = 5.0  # seconds without sound before the worker gets `pause`


class DuplexLane:
    """One session's units.

    Args:
        host: the session.
        turns: the user's turns.
        detection: settings in force.
        clock: monotonic s.
    """

    def __init__(self, host: LaneHost, turns: UserTurns, detection: TurnDetection, clock: Callable[[], float]):
        self._host, self._turns, self._clock = host, turns, clock
        self.policy = TurnPolicy(detection)
        self.detector = DetectorFeed(detection.detector_settings())
        self._barge_in, self._timer, self._idle = BargeIn(), UnitTimer(), IdleTimeout()
        self._buffer = UnitBuffer()
        self._pieces, self._edges = UnitPieces(self._buffer), UnitEdges(self._buffer)
        self._usage = TokenUsage()  # since the last response
        self._context = EngineContext(host, self.policy)
        self._is_limited = self._is_refused = False  # the response is at its number of tokens; the error is sent
        self._in_flight: UnitInFlight | None = None
        self._wake = WakeTimer(clock)
        self._sound_at = clock()
        self._spoke_at: float | None = None

    # --- the worker's session ------------------------------------------------------------------

    def attach(self, units: UnitSession, history: list[InsertText]) -> None:
        """Use this session of a worker from now on. history: texts that its context begins with."""
        self._in_flight = None
        self._pieces.clear()
        self.policy.is_turn_open = self._is_refused = False
        self._context.attach(units, history)
        self._pump()

    def detach(self) -> None:
        """The worker's session is over. An open response fails."""
        self.stop()
        if self._response is not None:
            self._finish(failed("worker_lost", "The worker was lost"))

    def stop(self) -> None:
        """Send no more units."""
        self._context.units = None
        self._wake.stop()

    def configure(self, detection: TurnDetection) -> None:
        """Change the settings of turns."""
        self.policy.detection = detection
        self.detector.configure(detection.detector_settings())

    def refresh(self) -> None:
        """The session's settings may have changed."""
        self._is_refused = self._is_refused and self._context.is_full
        self._pump()

    @property
    def refusal(self) -> EventError | None:
        """Why no unit can run until the client changes its settings; None: one can."""
        return self._context.refusal

    # --- the client's input --------------------------------------------------------------------

    def append(self, samples: np.ndarray) -> None:
        """Add sound, [n] float32 at 16 kHz."""
        now, was_paused = self._clock(), self._timer.is_paused
        self._sound_at = now
        self._timer.record_sound(now)
        self.detector.push(samples)
        if not self._is_refused and (dropped := self._buffer.append(samples)):
            self._host.report_overflow(dropped)
        self._edges.record_sound(len(samples), now)
        self._context.begin()
        self._send_piece()
        # Fifty times a second: sound alone makes nothing due before the time that is set already.
        if was_paused or self._buffer.has_unit or not self._wake.is_set:
            self._pump()

    def clear(self) -> None:
        """Drop sound that no unit has taken."""
        self._buffer.clear_sound()

    def add_text(self, text: InsertText) -> None:
        """Insert a text before the next unit."""
        self._context.add_text(text)
        self._pump()

    def add_picture(self, data: bytes, max_slices: int) -> None:
        """Add an encoded picture to the unit that is being filled."""
        is_live = self._context.is_prepared and not self._timer.is_paused
        self._pieces.add_picture(data, max_slices, self._context.units if is_live else None)

    def ask(self, *, has_options: bool) -> None:
        """The client has asked for the response that is open now, or has been quiet for so long that one begins.

        has_options: the response differs from the session, so that a unit which runs already is not part of it.
        """
        if has_options:
            self.step_aside()
        self.policy.ask(self._buffer.n_units)
        self._barge_in.begin_response(self.detector.pushed_ms)
        self._timer.start(self._clock())
        self._context.begin()
        self._pump()

    def step_aside(self) -> None:
        """The unit in flight is no part of the open response. If a chat answers it, units only listen until its end."""
        if self._in_flight is not None:
            self._discard(self._in_flight)
            self.policy.cut(is_running=True)
        self.policy.begin_response()

    def check_idle(self) -> None:
        """Let the model speak if the user has been quiet for the idle timeout. Call this twice a second."""
        timeout_ms = self.policy.detection.idle_timeout_ms
        due_at = self._idle.due_at(timeout_ms)
        if due_at is None or timeout_ms is None or self._clock() < due_at or self._host.response is not None:
            return
        self._idle.record_speech()
        end_ms = round(self.detector.pushed_ms)
        self._turns.time_out(max(0, end_ms - timeout_ms), end_ms)
        if self.policy.detection.create_response:
            self.ask(has_options=False)

    def cancel(self, reason: CancelReason) -> None:
        """End the open response now; what the worker still makes of it is dropped."""
        unit = self._in_flight
        if unit is not None:
            self._discard(unit)
        self.policy.cut(is_running=unit is not None or self.policy.is_turn_open)
        self._finish(cancelled(reason))
        self._pump()

    def _discard(self, unit: UnitInFlight) -> None:
        """Drop what the worker still makes of a unit, and let it stop."""
        if not unit.is_discarded and self._context.units is not None:
            unit.is_discarded = True
            self._context.units.send(Interrupt())

    # --- what the detector hears ---------------------------------------------------------------

    def on_heard(self, heard: Heard) -> None:
        """Follow the user's speech."""
        self._spoke_at = self._clock()
        self._idle.record_speech()
        is_answering = self._host.response is not None or self._host.is_playing
        if isinstance(heard, SpeechOver):
            self._barge_in.end_turn()
            if self._turns.end(heard.end_ms) is not None and not self._barge_in.is_answered(heard.end_ms):
                self.policy.end_user_turn(self._buffer.n_units)
            self._pump()
            return
        if isinstance(heard, SpeechHeard):
            self._barge_in.begin_turn(heard.start_ms)
        self._barge_in.hear(heard.speech_ms, heard.at_ms, self._turns.committed_ms)
        start_ms = self._barge_in.due(heard.speech_ms, heard.at_ms, is_responding=is_answering)
        if start_ms is not None:
            self.policy.begin_user_turn()
            self._turns.begin(start_ms)
        if not is_answering or not self.policy.detection.interrupt_response:
            return
        if self._barge_in.is_confirmed(heard.speech_ms):
            self._host.stop_playback()
            self._host.cancel_response("turn_detected")

    # --- the worker's answers ------------------------------------------------------------------

    def on_partial(self, partial: Partial) -> None:
        """Send a part of the unit in flight."""
        unit = self._in_flight = self._in_flight or self._early_unit()
        if unit is None or unit.is_discarded:
            return
        unit.text += partial.text
        self._send(partial.text, b"" if partial.audio_data is None else partial.audio_data.packed("pcm16"))

    def on_answer(self, request: FromClient, answer: ServerMessage) -> None:
        """Handle the answer to a message."""
        if isinstance(request, AudioChunk):
            unit = self._in_flight or self._early_unit()
            if self._pieces.ends_unit(request, answer):
                self._on_unit(unit, answer)
        else:
            self._context.on_answer(request, answer)
            self._edges.on_answer(answer, self._clock())
            if isinstance(answer, Error) and isinstance(request, Prepare) and self._response is not None:
                self._finish(failed("internal_error", answer.error))
        self._pump()

    @property
    def _response(self) -> RealtimeResponse | None:
        """The open response, unless a chat answers it."""
        response = self._host.response
        return None if response is None or response.is_chat else response

    def _early_unit(self) -> UnitInFlight | None:
        """The unit that the oldest piece completes, if it does; None: no piece waits for its answer."""
        piece = self._pieces.oldest
        return None if piece is None else UnitInFlight(piece, False, ran_early=True)

    def _on_unit(self, unit: UnitInFlight | None, answer: ServerMessage) -> None:
        self._in_flight = None
        if unit is None:
            return
        if unit.ran_early:
            self._timer.record_unit(self._clock(), is_filled=False)
        if isinstance(answer, Result):
            self._on_result(unit, answer)
        elif isinstance(answer, Error):
            LOG.warning("a unit failed: %s", answer.code)
            if unit.is_forced or self._response is not None:
                self._finish(failed(str(answer.code), answer.error))

    def _on_result(self, unit: UnitInFlight, result: Result) -> None:
        self._usage.add(usage_of(result))
        self._context.record(result)
        self.policy.record_result(is_listen=result.is_listen, end_of_turn=result.end_of_turn)
        if unit.is_discarded or unit.chunk.force_listen:  # the latter only ends the turn of a cancelled response
            drop_calls(result, self._context.add_text)
            return
        sound = b""
        if result.audio_data is not None and not result.is_listen:
            sound = without_padding(result.audio_data.packed("pcm16"))
        self._send(result.text[len(unit.text) :], sound)
        send_calls(result, lambda: self._opened_response(with_message=False), self._context.add_text)
        response = self._response
        if response is None:
            return
        if result.marks:
            for mark in result.marks:
                response.mark(mark.text_chars, mark.audio_ms)
        elif not result.is_listen:
            response.mark()
        has_content = bool(response.text or response.sent_ms or response.n_calls)
        self._is_limited = self._is_limited or bool(result.turn_limit)
        if result.end_of_turn or (result.is_listen and (has_content or unit.is_forced)):
            self._finish(TOO_LONG if self._is_limited else COMPLETED)

    def _send(self, text: str, sound: bytes) -> None:
        """Send text and sound of the model; the first of a turn opens a response."""
        if not text and not sound:
            return
        response = self._opened_response()
        response.add_text(text)
        if sound:
            if response.first_sound_at is None:
                response.first_sound_at = self._clock()
            self._host.add_sound(response, sound)

    def _opened_response(self, *, with_message: bool = True) -> RealtimeResponse:
        """The open response, or a new one. with_message: false for a call of a function."""
        response = self._response
        if response is None or self.policy.is_asked:  # the model speaks already
            self.policy.begin_response()
        if response is None:
            response = self._host.begin_response(with_message=with_message)
            self._barge_in.begin_response(self.detector.pushed_ms)
        return response

    def _finish(self, end: ResponseEnd) -> None:
        response = self._response
        if response is not None:
            response.usage.add(self._usage)
            self._usage = TokenUsage()
            self._is_limited = False
            now = self._clock()
            played_at = now if response.first_sound_at is None else response.first_sound_at + response.sent_ms / 1000
            self._idle.record_response(max(now, played_at))
            self._host.finish_response(end)

    # --- units ---------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send the next unit if it is time, or wake up when it will be."""
        if not self._context.is_prepared or self._in_flight is not None or self._pieces.oldest is not None:
            return
        self._context.send_texts()
        now, is_late = self._clock(), False
        if not self._buffer.has_unit:
            state = TimerState(self._response is not None, self._spoke_at, is_idle=True)
            late_at, early_at = self._timer.fill_at(state, now), self._early_at(now)
            dues = [at for at in (late_at, early_at) if at is not None]
            if not dues:
                rest_at = self._sound_at + PAUSE_AFTER_S
                if now < rest_at:
                    self._wake.set(rest_at, self._pump)
                else:
                    self._context.rest()
                return
            if (at := min(dues)) > now:
                self._wake.set(at, self._pump)
                return
            is_late = early_at is None or early_at > now
        response = self._response
        sent_ms, sounds_at = (0.0, None) if response is None else (response.sent_ms, response.first_sound_at)
        if sounds_at is not None and (at := send_at(sounds_at, sent_ms, now)) > now:
            self._wake.set(at, self._pump)
            return
        if self._context.is_full:
            self._refuse()
        else:
            self._send_unit(now, is_late=is_late)

    def _send_piece(self) -> None:
        """Send sound of the open unit, so that it may run early, while the model decides by itself."""
        is_free = self._in_flight is None and self._host.response is None and self.policy.is_free
        if is_free and not self._buffer.has_unit and (units := self._context.early_units) is not None:
            self._pieces.send(units)

    def _early_at(self, now: float) -> float | None:
        """When the unit must run although its sound has not come yet; None: it waits for it."""
        if self.policy.is_answer_due:
            return now
        response = self._response
        if response is None or response.first_sound_at is None or response.shape.speed <= 1:
            return None
        # Fast speech lasts less than the second of a unit: the client must not run out of it.
        return max(now, response.first_sound_at + response.sent_ms / 1000 - FAST_AHEAD_S)

    def _refuse(self) -> None:
        """Send the error about the full context, once. Sound is dropped from now on."""
        self.policy.cut(is_running=self.policy.is_turn_open)
        self._buffer.clear_sound()
        if self._response is not None:
            self._finish(out_of_room())
        elif not self._is_refused:
            self._host.report(context_full())
        self._is_refused = True

    def _send_unit(self, now: float, *, is_late: bool) -> None:
        units = self._context.units
        assert units is not None, "expected a session of a worker"
        self._context.update()
        n_missing = self._buffer.n_missing
        if is_late and n_missing:
            self.detector.push(np.zeros(n_missing, np.float32))  # so that it finds the end of speech
        if self._response is self._host.response:
            is_responding, n_waiting = self._response is not None, max(self._buffer.n_units - 1, 0)
            decision = self.policy.next_unit(is_responding=is_responding, n_waiting=n_waiting)
        else:
            decision = UnitDecision(force_listen=True)
        chunk = self._pieces.take_unit(force_listen=decision.force_listen, force_speak=decision.force_speak)
        self._timer.record_unit(now, is_filled=n_missing > 0)
        self._in_flight = UnitInFlight(chunk, decision.force_speak)
        units.send(chunk)
