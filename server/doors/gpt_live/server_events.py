"""Sends the events of a GPT-Live session, each with its type and, but for sound, a unique id."""

import secrets
from collections.abc import Callable
from itertools import count
from typing import Any

from server.doors.live.event_error import EventError


class GptLiveEventSender:
    """Sends events in order. send: takes the event as an object and returns at once."""

    def __init__(self, send: Callable[[dict[str, Any]], None]):
        self._send = send
        self._prefix, self._numbers = secrets.token_hex(6), count(1)

    def __call__(self, kind: str, **fields: object) -> None:
        """Send an event. kind: its type. fields: the others, without `event_id`."""
        self._send({"type": kind, "event_id": f"event_{self._prefix}{next(self._numbers):06x}", **fields})

    def plain(self, kind: str, **fields: object) -> None:
        """Send an event without an id."""
        self._send({"type": kind, **fields})

    def error(self, error: EventError, client_event_id: str | None = None) -> None:
        """Send an `error` event. client_event_id: of the client's event that caused it."""
        fields = error.fields(None)
        del fields["event_id"]
        self("error", error={**fields, "client_event_id": client_event_id})
