"""The events of one vLLM-Omni session and their numbers."""

import secrets
from collections.abc import Callable
from itertools import count
from typing import Any

from server.doors.errors import ApiError
from server.doors.live.event_error import EventError


class OmniEvents:
    """Sends events with an id and a number that rises by one.

    Args:
        put: takes an event and its number, None for an event without one, and returns at once.
        session_id: shown in each event.
    """

    def __init__(self, put: Callable[[dict[str, Any], int | None], None], session_id: str):
        self._put, self._session_id = put, session_id
        self._numbers = count(1)

    def __call__(self, kind: str, **fields: object) -> None:
        """Send an event. kind: its type."""
        number = next(self._numbers)
        self._put({**self._head(kind), "server_event_seq": number, **fields}, number)

    def unnumbered(self, kind: str, **fields: object) -> None:
        """Send an event about the connection alone, which is not repeated on another one."""
        self._put({**self._head(kind), **fields}, None)

    def error(self, error: ApiError | EventError, event_id: str | None) -> None:
        """Send an `error` event. event_id: of the client's event that caused it."""
        fields = error.fields(event_id) if isinstance(error, EventError) else {**error.fields(), "event_id": event_id}
        self("error", error=fields)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "event_id": f"event_{secrets.token_hex(10)}", "session_id": self._session_id}
