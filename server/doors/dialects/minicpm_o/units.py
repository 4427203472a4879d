"""The units of a duplex session of the MiniCPM-o ecosystem: each unit of the client is one of the worker.

Everything here runs on the event loop, but for the decoding of voices and pictures. Contains no socket.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from server.access.connection_pace import pace_pixels
from server.access.shares import run_shared
from server.doors.core.unit_session import UnitSession
from server.doors.dialects.ends import CONTEXT_FULL
from server.doors.dialects.minicpm_o.client_messages import (
    BufferAppend,
    InputAppend,
    ModeInit,
    ModeMessage,
    ModeUpdate,
    read_unit,
    voice_sound,
)
from server.doors.dialects.minicpm_o.forms import EventForm, Mode, NewerForm, OlderForm, Put, error_event
from server.doors.live.ends import SessionOverError
from server.live.picture_pace import picture_pixels
from worker.protocol.codec import FromClient
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import (
    MAX_PAUSE_S,
    AudioChunk,
    Error,
    Partial,
    Pause,
    Prepare,
    Prepared,
    Result,
    ServerMessage,
    Spec,
)
from worker.protocol.wire import WireError

LOG = logging.getLogger(__name__)
# These clients expect one answer a unit, with sound in float32.
WHOLE_UNITS = Spec(sound_in="float32", sound_out="float32", counters=True)
# Units that are not answered, and their bytes; further messages are not read.
MAX_WAITING, MAX_WAITING_BYTES = 60, 32 * 2**20
REST_AFTER_S = 10.0  # seconds without a unit before the worker gets `pause`


class ModeUnits:
    """One session's units.

    Args:
        put: sends an event.
        session_id: shown to the client.
        mode: of the session.
        clock: monotonic s.
    Attributes:
        is_prepared: the context is prepared.
        is_speaking: a turn of the model is open.
    """

    def __init__(self, put: Put, session_id: str, mode: Mode, clock: Callable[[], float]):
        self._put, self._session_id, self._mode, self._clock = put, session_id, mode, clock
        self._form: EventForm | None = None
        self._units: UnitSession | None = None
        self._input_ids: deque[str | int | None] = deque()  # of units that are not answered
        self._answered = asyncio.Event()
        self._n_bytes = 0  # of units that are not answered
        self.is_prepared = self.is_speaking = False
        self.used_at = clock()  # when the last unit came, or the context was prepared

    def attach(self, units: UnitSession) -> None:
        """Use a worker's session."""
        self._units = units

    async def handle(self, message: ModeMessage) -> None:
        """React to a message; waits while too many units are not answered. Raises: WireError."""
        units = self._units
        assert units is not None, "handle: expected a worker's session"
        if isinstance(message, ModeInit | ModeUpdate):
            prepare = await run_shared(_with_voice, message)
            put, name = self._put, self._session_id
            self._form = NewerForm(put, name, self._mode) if isinstance(message, ModeInit) else OlderForm(put, name)
            units.send(prepare)
        elif isinstance(message, InputAppend | BufferAppend):
            if self._form is None:
                raise _not_prepared(message.type)
            unit = read_unit(message)
            chunk = await run_shared(unit.chunk) if unit.frame_base64_list else unit.chunk()
            for picture in chunk.frame_base64_list:
                await pace_pixels(await run_shared(picture_pixels, picture))
            while len(self._input_ids) >= MAX_WAITING or self._n_bytes > MAX_WAITING_BYTES:
                self._answered.clear()
                await self._answered.wait()
            self._input_ids.append(unit.input_id)
            self._n_bytes += _size(chunk)
            self.used_at = self._clock()
            units.send(chunk)

    def rest_if_quiet(self) -> None:
        """Pause the session on the worker, if no unit has come for a while. The next unit ends the pause."""
        units = self._units
        if units is None or not self.is_prepared or units.is_paused or units.n_unanswered:
            return
        if self._clock() - self.used_at > REST_AFTER_S:
            units.send(Pause(timeout=MAX_PAUSE_S))

    # --- the worker's answers ------------------------------------------------------------------

    def on_partial(self, partial: Partial) -> None:
        """Not sent with these options."""

    def on_answer(self, request: FromClient, answer: ServerMessage) -> None:
        """Report the answer to a message. Raises: SessionOverError when the context is full."""
        input_id: str | int | None = None
        if isinstance(request, AudioChunk):
            input_id = self._input_ids.popleft()
            self._n_bytes -= _size(request)
            self._answered.set()
        if isinstance(answer, Error):
            if answer.code == ErrorCode.CONTEXT_FULL:
                raise SessionOverError(CONTEXT_FULL)
            if isinstance(request, AudioChunk | Prepare):
                self._put(error_event(str(answer.code), answer.error))
            else:
                LOG.warning("%s was refused: %s", request.type, answer.code)
            return
        assert self._form is not None, "on_answer: expected a form"
        if isinstance(answer, Prepared):
            self.is_prepared, self.used_at = True, self._clock()
            self._form.created(answer)
        elif isinstance(answer, Result):
            self.is_speaking = not (answer.is_listen or answer.end_of_turn)
            self._form.unit(answer, input_id)


def _with_voice(message: ModeInit | ModeUpdate) -> Prepare:
    """The message that begins the context. Slow. Raises: WireError."""
    given = message.voice
    voices = {
        "ref_audio_base64": voice_sound(given.ref_audio, "ref_audio"),
        "tts_ref_audio_base64": voice_sound(given.tts_ref_audio, "tts_ref_audio"),
    }
    return message.prepare().model_copy(update={name: voice for name, voice in voices.items() if voice is not None})


def _size(chunk: AudioChunk) -> int:
    """Bytes of a unit, about."""
    return 4 * len(chunk.audio_base64.data) + sum(map(len, chunk.frame_base64_list))


def _not_prepared(kind: str) -> WireError:
    return WireError(ErrorCode.NOT_PREPARED, kind, expected="session.created before it", got="none")
