"""The paths of Realtime sessions."""

from fastapi import FastAPI, WebSocket

from server.doors.realtime.socket import RealtimeDoor

# The second one is for clients that append `/realtime` to the address of the host.
REALTIME_PATHS = ("/v1/realtime", "/realtime")


def add_realtime_sockets(app: FastAPI, door: RealtimeDoor) -> None:
    """Serve the sockets of Realtime sessions."""
    for path in REALTIME_PATHS:

        @app.websocket(path)
        async def realtime(websocket: WebSocket) -> None:
            await door.serve(websocket)
