"""Messages and close frames of the gateway itself."""

import asyncio
from contextlib import suppress

from starlette.websockets import WebSocket, WebSocketDisconnect

from server.live.closes import SocketClose
from server.live.inbox import ClientDisconnected
from server.metrics import GatewayMetrics
from worker.protocol.codec import Message
from worker.protocol.messages import write

CLOSE_TIMEOUT_S = 2.0


async def send_own(websocket: WebSocket, message: Message) -> None:
    """Send a message without sound. Raises: ClientDisconnected."""
    text = write(message)
    assert isinstance(text, str), "expected a message without sound"
    try:
        await websocket.send_text(text)
    except (WebSocketDisconnect, RuntimeError):
        raise ClientDisconnected from None


async def close_socket(websocket: WebSocket, close: SocketClose, metrics: GatewayMetrics) -> None:
    """Send the error and the close frame of an end, and count it."""
    metrics.record_connection_end(close.how)
    with suppress(TimeoutError, WebSocketDisconnect, RuntimeError, ClientDisconnected):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            if close.error is not None:
                metrics.record_error(close.error.code)
                await send_own(websocket, close.error)
            await websocket.close(close.code, close.reason)
