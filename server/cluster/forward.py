"""Passes the connection of a client that resumes its session on to the gateway that has the session.

The other gateway accepts the identity found here, because the connection has the secret of the cluster.
"""

import asyncio
import logging
import ssl
from contextlib import suppress

from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from server.access.forwarded import forwarded_headers
from server.access.identity import Identity
from server.cluster.messages import TLS_SCHEME
from server.cluster.shared_dispatcher import SharedDispatcher
from worker.protocol.codes import CloseCode
from worker.protocol.connection import MAX_FRAME
from worker.protocol.takeover.message_bytes import Data

LOG = logging.getLogger(__name__)
NO_TRUST = "it has TLS; this gateway needs service.ssl_cafile, or the same certificate"
OPEN_TIMEOUT_S = 3.0
MAX_UNREAD = 4  # messages of each direction that are buffered


class ResumeForward:
    """Passes connections on.

    Args:
        dispatcher: gets from the authority the gateways that have a session.
        secret: of the cluster.
        tls: how gateways with TLS are checked; None: sessions are not resumed at them.
    """

    def __init__(self, dispatcher: SharedDispatcher, secret: str, tls: ssl.SSLContext | None = None):
        self._dispatcher, self._secret, self._tls = dispatcher, secret, tls

    async def serve(self, websocket: WebSocket, session_id: str, path: str, first: Data, identity: Identity) -> bool:
        """Serve a connection with the gateway that has its session, until its end.

        Args:
            websocket: the client's connection, whose first message is read.
            session_id: of its session.
            path: where gateways resume such sessions, with the query.
            first: that message.
            identity: of the client.
        Returns:
            False if no other gateway has the session.
        """
        headers = forwarded_headers(identity, self._secret)
        for address in await self._dispatcher.locate(session_id):
            has_tls = address.startswith(TLS_SCHEME)
            if has_tls and self._tls is None:
                LOG.warning("no session is resumed at %s: %s", address, NO_TRUST)
                continue
            base = address if has_tls else f"ws://{address}"
            try:
                link = await connect(
                    f"{base}{path}",
                    ssl=self._tls if has_tls else None,
                    additional_headers=headers,
                    compression=None,
                    proxy=None,
                    max_size=MAX_FRAME,
                    max_queue=MAX_UNREAD,
                    open_timeout=OPEN_TIMEOUT_S,
                    close_timeout=1,
                    ping_interval=None,
                    user_agent_header=None,
                )
            except ssl.SSLError as error:
                LOG.warning("no session is resumed at %s: %s", address, error)
                continue
            except (OSError, WebSocketException):
                continue
            async with link:
                with suppress(ConnectionClosed):  # `_pass_on` reads the close code
                    await link.send(first)
                await _pass_on(websocket, link)
            return True
        return False


async def _pass_on(websocket: WebSocket, link: ClientConnection) -> None:
    """Pass messages in both directions until one side closes, and close the other one alike."""
    up = asyncio.create_task(_up(websocket, link), name="client-to-gateway")
    down = asyncio.create_task(_down(websocket, link), name="gateway-to-client")
    try:
        await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (up, down):
            task.cancel()
        await asyncio.gather(up, down, return_exceptions=True)


async def _up(websocket: WebSocket, link: ClientConnection) -> None:
    with suppress(ConnectionClosed):
        while True:
            event = await websocket.receive()
            if event["type"] == "websocket.disconnect":
                code = event.get("code")
                if code in (CloseCode.NORMAL, CloseCode.GOING_AWAY, CloseCode.NO_STATUS):
                    await link.close(CloseCode.NORMAL)
                else:
                    link.transport.abort()  # a lost connection, after which the client may come back
                return
            await link.send(event["bytes"] if event.get("text") is None else event["text"])


async def _down(websocket: WebSocket, link: ClientConnection) -> None:
    with suppress(WebSocketDisconnect, RuntimeError):
        try:
            while True:
                data = await link.recv()
                await (websocket.send_text(data) if isinstance(data, str) else websocket.send_bytes(data))
        except ConnectionClosed as closed:
            if closed.rcvd is None or closed.rcvd.code == CloseCode.NO_STATUS:
                await websocket.close(CloseCode.SERVICE_RESTART)  # the client tries again
            else:
                await websocket.close(closed.rcvd.code, closed.rcvd.reason)
