"""The server's events in both forms of the MiniCPM-o ecosystem: of a session, a unit and an answer."""

import secrets
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

from worker.protocol.codes import ErrorCode
from worker.protocol.messages import Prepared, Result

Mode = Literal["audio", "video", "chat"]
Put = Callable[[dict[str, Any]], None]
METRICS = ("wall_clock_ms", "cost_all_ms", "lag_ms", "kv_cache_length", "n_tokens", "n_tts_tokens", "vision_slices")
SERVER_CODES = frozenset({ErrorCode.ENGINE, ErrorCode.INTERNAL, ErrorCode.WORKER_LOST, ErrorCode.BUSY})


class EventForm(Protocol):
    """The events of one form."""

    def created(self, prepared: Prepared) -> None:
        """Report the context."""

    def unit(self, result: Result, input_id: str | int | None) -> None:
        """Report the outcome of a unit. input_id: the client's name of it."""


class NewerForm:
    """The form that begins with `session.init`: one kind of output in each event.

    Args:
        put: sends an event.
        session_id: shown to the client.
        mode: of the session.
    """

    def __init__(self, put: Put, session_id: str, mode: Mode):
        self._put, self._session_id, self._mode = put, session_id, mode
        self._response_id = new_response_id()

    def created(self, prepared: Prepared | None) -> None:
        """Report the context. prepared: None in chat mode."""
        length = {} if prepared is None else {"prompt_length": prepared.prompt_length}
        self._put({"type": "session.created", "session_id": self._session_id, "mode": self._mode, **length})

    def unit(self, result: Result, input_id: str | int | None) -> None:
        outputs: list[dict[str, Any]] = []
        if result.is_listen:
            outputs.append({"kind": "listen"})
        else:
            if result.text or result.audio_data is None:
                outputs.append({"kind": "text", "text": result.text})
            if result.audio_data is not None:
                outputs.append({"kind": "audio", "audio": result.audio_data.base64()})
            outputs[-1]["end_of_turn"] = result.end_of_turn
        common: dict[str, Any] = {} if input_id is None else {"input_id": input_id}
        metrics = {name: getattr(result, name) for name in METRICS}
        metrics |= {"generate_ms": result.cost_all_ms, "vision_tokens": result.vision_tokens}
        common |= {"metrics": metrics}
        outputs[0] |= {"chunk_index": result.current_time, "usage": {"context_tokens": result.kv_cache_length}}
        if result.usage is not None:
            outputs[0]["chunk_usage"] = result.usage.model_dump()
        for output in outputs:
            self.delta(**output, **common)
        if result.end_of_turn:
            self.begin_response()

    def delta(self, **fields: object) -> None:
        """Send a part of an answer."""
        head = {"type": "response.output.delta", "response_id": self._response_id, "session_id": self._session_id}
        self._put({**head, **fields, "server_send_ts": time.time()})

    def done(self, **fields: object) -> None:
        """Send the end of an answer."""
        head = {"type": "response.done", "response_id": self._response_id, "session_id": self._session_id}
        self._put({**head, **fields, "server_send_ts": time.time()})
        self.begin_response()

    def begin_response(self) -> None:
        """Give the following events another response's id."""
        self._response_id = new_response_id()


class OlderForm:
    """The form of April 2026, which begins with `session.update`: one event for each unit."""

    def __init__(self, put: Put, session_id: str):
        self._put, self._session_id = put, session_id

    def created(self, prepared: Prepared) -> None:
        length = prepared.prompt_length
        self._put({"type": "session.created", "session_id": self._session_id, "prompt_length": length})

    def unit(self, result: Result, input_id: str | int | None) -> None:
        rows = result.kv_cache_length
        if result.is_listen:
            self._put({"type": "response.listen", "kv_cache_length": rows})
            return
        audio = None if result.audio_data is None else result.audio_data.base64()
        event = {"type": "response.output_audio.delta", "text": result.text, "audio": audio}
        self._put({**event, "end_of_turn": result.end_of_turn, "kv_cache_length": rows})


def error_event(code: str, message: str, kind: str | None = None) -> dict[str, Any]:
    """An `error` event. kind: class of the error; None: the usual one for the code."""
    kind = kind or ("server_error" if code in SERVER_CODES else "invalid_request_error")
    return {"type": "error", "error": {"code": code, "message": message, "type": kind}}


def new_response_id() -> str:
    return f"resp_{secrets.token_hex(12)}"
