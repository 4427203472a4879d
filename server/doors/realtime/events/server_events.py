"""Sends the events of a session: each with its type and a unique id. Contains no rules about their order."""

import secrets
from collections.abc import Callable
from itertools import count
from typing import Any

from server.doors.live.event_error import EventError

Json = dict[str, Any]


class EventSender:
    """Sends events in order. send: takes the event as an object and returns at once."""

    def __init__(self, send: Callable[[Json], None]):
        self._send = send
        self._prefix, self._numbers = secrets.token_hex(6), count(1)

    def __call__(self, kind: str, **fields: object) -> None:
        """Send an event. kind: its type. fields: the others, without `event_id`."""
        self._send({"type": kind, "event_id": f"event_{self._prefix}{next(self._numbers):06x}", **fields})

    def error(self, error: EventError, event_id: str | None = None) -> None:
        """Send an `error` event. event_id: of the client's event that caused it."""
        self("error", error=error.fields(event_id))
