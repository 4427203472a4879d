"""The choice of a dialect for a socket of Realtime sessions, by its query."""

from typing import Protocol

from starlette.websockets import WebSocket


class SocketDoor(Protocol):
    """Serves the connections of one dialect."""

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one connection, from the handshake to the close."""


class RealtimeDialects:
    """The dialects that share a path.

    Args:
        standard: the Realtime API, for all other queries.
        modes: the MiniCPM-o ecosystem's, for a query with `mode`.
    """

    def __init__(self, standard: SocketDoor, modes: SocketDoor):
        self._standard, self._modes = standard, modes

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one connection in the dialect that its query names."""
        door = self._modes if websocket.query_params.get("mode") else self._standard
        await door.serve(websocket)
