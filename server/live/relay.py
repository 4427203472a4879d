"""Two pumps between a client and its worker, each no faster than whoever takes what it brings.

Bytes go through as they are. What is looked at: the type of what a worker says, for counting; and a client's
diagnostics, which stay here.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

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
class Ended:
    """The worker has ended the session. code: of its close frame."""

    code: int
    reason: str


class Relay:
    """One session. keep: takes what is not for the worker; returns whether it did."""

    def __init__(
        self,
        websocket: WebSocket,
        inbox: Inbox,
        link: ClientConnection,
        lease: WorkerLease,
        workers: Workers,
        metrics: GatewayMetrics,
        keep: Callable[[Data], bool],
    ):
        self._websocket, self._inbox, self._link, self._lease = websocket, inbox, link, lease
        self._workers, self._metrics, self._keep = workers, metrics, keep
        self._since = time.monotonic()

    async def run(self) -> Ended:
        """Until the worker ends the session. Raises: ClientDisconnected, when the client is; WorkerLostError."""
        up = asyncio.create_task(self._up(), name="client-to-worker")
        down = asyncio.create_task(self._down(), name="worker-to-client")
        lost = asyncio.create_task(self._lease.worker.lost.wait(), name="worker-lost")
        tasks = (down, up, lost)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if down.done() or up.done():
                first = down if down.done() else up
                return first.result()
            raise WorkerLostError(self._lease.worker.name, expected="a sign of life", got="none")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _up(self) -> Ended:
        while True:
            data, received, _ = await self._inbox.get()
            if self._keep(data):
                continue
            try:
                await self._link.send(data)
            except ConnectionClosed:
                return await asyncio.Future()  # reading tells why
            if received > self._since:
                self._metrics.relayed("up", time.monotonic() - received)
            if len(self._inbox):
                await asyncio.sleep(0)  # taking what lies ready does not wait, and others have their turn too

    async def _down(self) -> Ended:
        while True:
            try:
                data = await self._link.recv()
            except ConnectionClosed as closed:
                if closed.rcvd is None:
                    raise WorkerLostError(self._lease.worker.name, expected="a close frame", got="none") from None
                code = CloseCode.NORMAL if closed.rcvd.code == CloseCode.NO_STATUS else closed.rcvd.code
                return Ended(code, closed.rcvd.reason)
            received = time.monotonic()
            self._look_at(data)
            try:
                async with asyncio.timeout(STUCK_S):
                    await (
                        self._websocket.send_text(data) if isinstance(data, str) else self._websocket.send_bytes(data)
                    )
            except (WebSocketDisconnect, RuntimeError, TimeoutError):
                raise ClientDisconnected from None
            self._metrics.relayed("down", time.monotonic() - received)

    def _look_at(self, data: Data) -> None:
        self._workers.alive(self._lease.worker)
        message = peek_header(data)
        kind = message.get("type")
        if kind == RESULT:
            self._lease.n_units += 1
            self._lease.worker.n_requests += 1
            self._metrics.unit(message, self._lease.request_type)
        elif kind in (PAUSED, RESUMED, PREPARED):
            self._lease.paused = kind == PAUSED
        elif kind == ERROR:
            self._metrics.error(str(message.get("code")))
