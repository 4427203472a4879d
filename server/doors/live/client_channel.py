"""The client of a live session as its door sees it: text in both directions, over any connection."""

from typing import Protocol

from starlette.types import Message
from starlette.websockets import WebSocket

from worker.protocol.connection import until_gone


class ClientChannel(Protocol):
    """Events of one client, in both directions."""

    async def receive(self) -> Message:
        """The next message, in the form of ASGI: `websocket.receive` with `text`, or `websocket.disconnect`."""

    async def send_text(self, data: str) -> None:
        """Send an event."""

    async def close(self, code: int, reason: str | None) -> None:
        """End the connection. code: of a WebSocket's close frame."""

    async def wait_gone(self) -> bool:
        """Wait until the connection is lost, also while it is not read. Returns: whether its end was asked for."""


class WebSocketChannel:
    """The channel of a WebSocket."""

    def __init__(self, websocket: WebSocket):
        self._websocket = websocket
        self.receive, self.send_text, self.close = websocket.receive, websocket.send_text, websocket.close

    async def wait_gone(self) -> bool:
        await until_gone(self._websocket)
        return False
