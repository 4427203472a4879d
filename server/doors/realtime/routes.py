"""The paths of Realtime sessions."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, WebSocket

# The second one is for clients that append `/realtime` to the address of the host.
REALTIME_PATHS = ("/v1/realtime", "/realtime")


def add_realtime_sockets(app: FastAPI, serve: Callable[[WebSocket], Awaitable[None]]) -> None:
    """Serve the sockets of Realtime sessions. serve: serves one connection, from the handshake to the close."""
    for path in REALTIME_PATHS:

        @app.websocket(path)
        async def realtime(websocket: WebSocket) -> None:
            await serve(websocket)
