"""The chat mode of the MiniCPM-o ecosystem: each input is a whole conversation, answered by a turn of its own."""

import time
from typing import Any

import numpy as np

from server.access.identity import Identity
from server.access.shares import run_shared
from server.doors.core.chat_turn import (
    ChatTurns,
    DoorTurn,
    TurnFinished,
    TurnPath,
    TurnQueued,
    TurnRequest,
    TurnSound,
    TurnStarted,
    TurnText,
)
from server.doors.dialects.minicpm_o.client_messages import InputAppend, ModeInit, ModeMessage, voice_sound
from server.doors.dialects.minicpm_o.forms import NewerForm, Put, error_event
from server.doors.errors import ApiError
from worker.describe import shown
from worker.protocol.chat_messages import ChatRequest
from worker.protocol.codes import ErrorCode
from worker.protocol.wire import Sound, WireError

FIELDS = frozenset(ChatRequest.model_fields) - {"type", "streaming", "report_usage"}
REASONS = {"stop": "turn_end"}


class ModeChats:
    """One session's turns.

    Args:
        put: sends an event.
        session_id: shown to the client.
        turns: chats of all doors.
        identity: whose session it is.
    """

    def __init__(self, put: Put, session_id: str, turns: ChatTurns, identity: Identity):
        self._put, self._turns, self._identity = put, turns, identity
        self._form = NewerForm(put, session_id, "chat")
        self._prompt: str | None = None
        self._voice: Sound | None = None
        self._is_created = False
        self.is_answering = False

    async def handle(self, message: ModeMessage) -> None:
        """React to a message; an input is answered before the next one. Raises: WireError."""
        if isinstance(message, ModeInit):
            given = message.voice
            name, text = (
                ("tts_ref_audio", given.tts_ref_audio) if given.tts_ref_audio else ("ref_audio", given.ref_audio)
            )
            self._voice = await run_shared(voice_sound, text, name)
            self._prompt, self._is_created = message.payload.system_prompt, True
            self._form.created(None)
        elif not isinstance(message, InputAppend):
            raise WireError(ErrorCode.UNKNOWN_TYPE, "type", expected="session.init, input.append", got=message.type)
        elif not self._is_created:
            raise WireError(ErrorCode.NOT_PREPARED, message.type, expected="session.created before it", got="none")
        else:
            await self._answer(message.input)

    async def _answer(self, given: dict[str, Any]) -> None:
        is_streamed = given.get("streaming")
        if not isinstance(is_streamed, bool | None):
            raise _refused("input.streaming", "true or false", is_streamed)
        request = TurnRequest(TurnPath.CHAT, self._fields(given))
        self.is_answering = True
        try:
            async with self._turns.open(request, self._identity) as turn:
                await self._pass_on(turn, is_streamed=is_streamed is not False)
        except ApiError as error:
            fields = error.fields()
            self._put(error_event(str(fields["code"]), str(fields["message"]), fields["type"]))
            self._form.begin_response()
        finally:
            self.is_answering = False

    async def _pass_on(self, turn: DoorTurn, *, is_streamed: bool) -> None:
        """Send the answer's events."""
        begun, first_ms, metrics = time.monotonic(), None, {"input_tokens": 0}
        sounds: list[np.ndarray] = []
        async for event in turn.events():
            if first_ms is None and isinstance(event, TurnText | TurnSound):
                first_ms = _ms_since(begun)
            match event:
                case TurnQueued():  # not `queue_done`: clients answer each of them with `session.init`
                    wait = {"position": event.position, "estimated_wait_s": round(event.wait_s, 1)}
                    self._put({"type": "session.queue_update", **wait})
                case TurnStarted():
                    metrics["input_tokens"] = event.input_tokens
                case TurnText() if is_streamed:
                    self._form.delta(kind="text", text=event.text)
                case TurnSound() if is_streamed:
                    self._form.delta(kind="audio", audio=Sound(event.pcm).base64())
                case TurnSound():
                    sounds.append(event.pcm)
                case TurnFinished():
                    usage = event.usage
                    counts = {"n_tokens": usage.text_tokens, "n_tts_tokens": usage.speech_tokens}
                    times = {"first_output_ms": first_ms, "wall_clock_ms": _ms_since(begun)}
                    audio = {"audio": Sound(np.concatenate(sounds)).base64()} if sounds else {}
                    reason = REASONS.get(event.stopped, event.stopped)
                    self._form.done(text=event.text, **audio, reason=reason, metrics={**metrics, **counts, **times})

    def _fields(self, given: dict[str, Any]) -> dict[str, object]:
        """The request to the worker, which checks it. Raises: WireError."""
        fields = {name: value for name, value in given.items() if name in FIELDS and value is not None}
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _refused("input.messages", "a list of messages", messages)
        has_prompt = isinstance(messages[0], dict) and messages[0].get("role") == "system"
        if self._prompt and not has_prompt:
            fields["messages"] = [{"role": "system", "content": self._prompt}, *messages]
        tts = fields.get("tts")
        if (
            self._voice is not None
            and isinstance(tts, dict)
            and not (tts.keys() & {"ref_audio_data", "ref_audio_path"})
        ):
            fields["tts"] = {**tts, "ref_audio_data": self._voice.base64()}
        return {**fields, "streaming": True, "report_usage": True}


def _ms_since(begun: float) -> float:
    return round(1000 * (time.monotonic() - begun), 1)


def _refused(name: str, expected: str, got: object) -> WireError:
    return WireError(ErrorCode.BAD_MESSAGE, name, expected=expected, got=shown(got))
