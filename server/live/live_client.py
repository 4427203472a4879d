"""One client of the gateway's WebSockets, what is read from it, and the gateways that may have its session instead."""

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.websockets import WebSocket

from server.access.identity import Identity
from server.live.client_end import Attachment, ClientEnd
from server.live.closes import REPLACED, RESUME_EXPIRED, SocketClose
from server.live.inbox import Inbox
from server.live.live_sessions import LiveSession
from server.live.picture_pace import pace_pictures
from server.live.recorder import Recorder
from server.metrics import GatewayMetrics
from worker.protocol.codes import CloseCode
from worker.protocol.takeover.message_bytes import Data

FINAL_CODES = (CloseCode.NORMAL, CloseCode.GOING_AWAY, CloseCode.NO_STATUS)  # of a client that does not come back


class OtherGateways(Protocol):
    """The other gateways of a cluster."""

    async def serve(self, websocket: WebSocket, session_id: str, path: str, first: Data, identity: Identity) -> bool:
        """Serve a connection that continues a session, if another gateway has the session.

        Args:
            websocket: the client's connection, whose first message is read.
            session_id: of its session.
            path: where gateways resume such sessions, with the query.
            first: that message.
            identity: of the client.
        Returns:
            False if none has it.
        """


@dataclass(frozen=True, eq=False)
class LiveClient:
    """One client and what belongs to it. end: its connection. inbox: its messages that are not forwarded yet.

    diagnostics_name: of its reports; differs from the session id while another session has the same one.
    """

    end: ClientEnd
    session: LiveSession
    inbox: Inbox
    recorder: Recorder
    diagnostics_name: str


async def read_messages(client: LiveClient, connection: Attachment) -> int:
    """Put received messages into the inbox until the client disconnects. Returns: the close code."""
    await client.inbox.room()  # so each connection adds at most one message above the limit
    while True:
        event = await connection.websocket.receive()
        if event["type"] == "websocket.disconnect":
            return int(event.get("code") or CloseCode.ABNORMAL)
        if connection.replaced.is_set():
            continue
        data: Data = event["bytes"] if event.get("text") is None else event["text"]
        await pace_pictures(data)
        if connection.replaced.is_set():
            continue
        client.end.count_message(connection)
        waiting = client.inbox.put(data)
        del event, data  # they may have 128 MiB, and the next message may come much later
        await waiting


def is_final(reading: "asyncio.Task[int]") -> bool:
    """Whether the client has closed the connection in a way that ends the session."""
    has_code = reading.done() and not reading.cancelled() and reading.exception() is None
    return has_code and reading.result() in FINAL_CODES


async def wait_for_return(
    client: LiveClient,
    connection: Attachment,
    tasks: "tuple[asyncio.Task[Any], ...]",
    grace_s: float,
    metrics: GatewayMetrics,
) -> SocketClose | None:
    """Wait for a client that has lost its connection.

    Args:
        client: whose session is kept.
        connection: its last connection.
        tasks: the session, the reading of the connection, and the wait for another one.
        grace_s: for which it is kept.
        metrics: counts the wait.
    Returns:
        How to close; None if the session is over, or its client has closed the connection.
    """
    running, reading, _ = tasks
    client.end.lose(connection)
    metrics.record_detached(1)
    try:
        async with asyncio.timeout(grace_s):
            while not (connection.replaced.is_set() or running.done()):
                if is_final(reading):
                    return None
                waiting = [task for task in tasks if not task.done()]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        if not connection.replaced.is_set():
            metrics.record_resumption("expired")
            return RESUME_EXPIRED
    finally:
        metrics.record_detached(-1)
    return REPLACED if connection.replaced.is_set() else None
