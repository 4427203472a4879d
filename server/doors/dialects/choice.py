"""The choice of a dialect for a socket of Realtime sessions, by its query."""

from typing import Protocol

from fastapi import FastAPI, WebSocket

DUPLEX_PATH = "/v1/duplex"
TRUE = ("1", "true", "yes", "on")


class SocketDoor(Protocol):
    """Serves the connections of one dialect."""

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one connection, from the handshake to the close."""


class RealtimeDialects:
    """The dialects that share a path.

    Args:
        standard: the Realtime API, for all other queries.
        modes: the MiniCPM-o ecosystem's, for a query with `mode`.
        duplex: vLLM-Omni's, for a query with a true `duplex`.
        calls: sockets that follow a call, for a query with `call_id`.
    """

    def __init__(self, standard: SocketDoor, modes: SocketDoor, duplex: SocketDoor, calls: SocketDoor):
        self._standard, self._modes, self._duplex, self._calls = standard, modes, duplex, calls

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one connection in the dialect that its query names."""
        query = websocket.query_params
        if query.get("mode"):
            await self._modes.serve(websocket)
        elif query.get("duplex", "").lower() in TRUE:
            await self._duplex.serve(websocket)
        elif query.get("call_id"):
            await self._calls.serve(websocket)
        else:
            await self._standard.serve(websocket)


def add_duplex_socket(app: FastAPI, door: SocketDoor) -> None:
    """Serve the path of vLLM-Omni sessions alone."""

    @app.websocket(DUPLEX_PATH)
    async def duplex(websocket: WebSocket) -> None:
        await door.serve(websocket)
