"""Forwards messages between a client and its worker, in two tasks, each at the pace of its receiver.

Messages are forwarded byte for byte. The header of each message from the worker is read for metrics. Messages that
`intercept` accepts, such as client diagnostics, are not forwarded.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from server.dispatch.workers import WorkerLease, Workers
from server.live.inbox import ClientDisconnected, Data, Inbox
from server.live.worker_link import WorkerLostError
from server.metrics import GatewayMetrics
from worker.protocol.codec import peek_header
from worker.protocol.codes import CloseCode
from worker.protocol.connection import STUCK_S
from worker.protocol.messages import Error, Paused, Prepared, Result, Resumed

RESULT, PAUSED, RESUMED, PREPARED, ERROR = (one.kind() for one in (Result, Paused, Resumed, Prepared, Error))


@dataclass(frozen=True)
class WorkerClose:
    """Code and reason of the close frame with which the worker ended the session."""

    code: int
    reason: str


class Relay:
    """The message flow of one session.

    Args:
        websocket: connection to the client, for sending.
        inbox: messages received from the client.
        link: connection to the worker.
        lease: the session's slot.
        workers: records the activity of the worker.
        metrics: counts results and errors.
        intercept: called with each message of the client; True if it must not be forwarded.
    """

    def __init__(
        self,
        websocket: WebSocket,
        inbox: Inbox,
        link: ClientConnection,
        lease: WorkerLease,
        workers: Workers,
        metrics: GatewayMetrics,
        intercept: Callable[[Data], bool],
    ):
        self._websocket, self._inbox, self._link, self._lease = websocket, inbox, link, lease
        self._workers, self._metrics, self._intercept = workers, metrics, intercept
        self._started_at = time.monotonic()

    async def run(self) -> WorkerClose:
        """Forward messages until the worker ends the session.

        Raises: ClientDisconnected; WorkerLostError.
        """
        up = asyncio.create_task(self._up(), name="client-to-worker")
        down = asyncio.create_task(self._down(), name="worker-to-client")
        lost = asyncio.create_task(self._lease.worker.lost.wait(), name="worker-lost")
        tasks = (down, up, lost)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if down.done():
                return down.result()
            if up.done():
                up.result()  # raises
            raise WorkerLostError(self._lease.worker.name, expected="a message or an answer", got="none")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _up(self) -> NoReturn:
        while True:
            data, received_at, _ = await self._inbox.get()
            if self._intercept(data):
                continue
            try:
                await self._link.send(data)
            except ConnectionClosed:
                await asyncio.Event().wait()  # wait for cancellation: the read task ends with the close code
            if received_at > self._started_at:
                self._metrics.record_relay("up", time.monotonic() - received_at)
            if len(self._inbox):
                await asyncio.sleep(0)  # `get` does not suspend while messages are buffered; let other tasks run

    async def _down(self) -> WorkerClose:
        while True:
            try:
                data = await self._link.recv()
            except ConnectionClosed as closed:
                if closed.rcvd is None:
                    raise WorkerLostError(self._lease.worker.name, expected="a close frame", got="none") from None
                code = CloseCode.NORMAL if closed.rcvd.code == CloseCode.NO_STATUS else closed.rcvd.code
                return WorkerClose(code, closed.rcvd.reason)
            received_at = time.monotonic()
            self._record(data)
            try:
                async with asyncio.timeout(STUCK_S):
                    if isinstance(data, str):
                        await self._websocket.send_text(data)
                    else:
                        await self._websocket.send_bytes(data)
            except (WebSocketDisconnect, RuntimeError, TimeoutError):
                raise ClientDisconnected from None
            self._metrics.record_relay("down", time.monotonic() - received_at)

    def _record(self, data: Data) -> None:
        """Record a message of the worker in its lease and in the metrics."""
        self._workers.record_activity(self._lease.worker)
        header: Mapping[str, object] = peek_header(data)
        kind = header.get("type")
        if kind == RESULT:
            self._workers.record_result(self._lease)
            self._metrics.record_result(header, self._lease.request_type)
        elif kind in (PAUSED, RESUMED, PREPARED):
            self._workers.record_pause(self._lease, kind == PAUSED)
        elif kind == ERROR:
            self._metrics.record_error(str(header.get("code")))
