"""Sends one client's events in order, from a bounded queue."""

import asyncio
import binascii
from contextlib import suppress
from typing import Any, Protocol

from pydantic_core import to_json
from starlette.websockets import WebSocketDisconnect

from worker.protocol.connection import STUCK_S

MAX_UNSENT = 16 * 2**20  # characters of events that the client does not read
CLOSE_S = 2.0


class Base64Text(str):
    """Base64 that was made here, so that none of it needs to be escaped in JSON."""

    __slots__ = ()

    @classmethod
    def of(cls, data: bytes) -> "Base64Text":
        return cls(binascii.b2a_base64(data, newline=False).decode("ascii"))


def event_text(event: dict[str, Any]) -> str:
    """The event as JSON. The field `delta` comes last if it is a `Base64Text`."""
    sound = event.get("delta")
    if type(sound) is not Base64Text:
        return to_json(event).decode()
    head = to_json({name: value for name, value in event.items() if name != "delta"}).decode()
    # As text: searching the sound for characters to escape would take most of the time.
    return f'{head[:-1]},"delta":"{sound}"}}'


class ClientGoneError(Exception):
    """The client does not read, or its connection is closed."""


class TextSender(Protocol):
    """A connection to a client, such as a WebSocket."""

    async def send_text(self, data: str) -> None:
        """Send a text."""

    async def close(self, code: int, reason: str | None) -> None:
        """Close the connection. code: of a WebSocket's close frame."""


class EventWriter:
    """Events on their way to a client."""

    def __init__(self, client: TextSender):
        self._client = client
        self._unsent: asyncio.Queue[str] = asyncio.Queue()
        self._n_unsent = 0

    def put(self, event: dict[str, Any]) -> None:
        """Send an event after all earlier ones; returns at once."""
        self.put_text(event_text(event))

    def put_text(self, text: str) -> None:
        """Send an event, as JSON, after all earlier ones; returns at once."""
        self._n_unsent += len(text)
        self._unsent.put_nowait(text)

    async def run(self) -> None:
        """Send events until cancelled. Raises: ClientGoneError."""
        while True:
            text = await self._unsent.get()
            try:
                async with asyncio.timeout(STUCK_S):
                    await self._client.send_text(text)
            except (WebSocketDisconnect, RuntimeError, TimeoutError):
                raise ClientGoneError from None
            self._n_unsent -= len(text)
            if self._n_unsent > MAX_UNSENT:
                raise ClientGoneError

    async def close(self, code: int, reason: str) -> None:
        """Send what is unsent and the close frame. Call it after `run` has ended."""
        with suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
            async with asyncio.timeout(CLOSE_S):
                while not self._unsent.empty():
                    await self._client.send_text(self._unsent.get_nowait())
                await self._client.close(code, reason)
