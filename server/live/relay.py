"""Forwards messages between a client and its worker, in two tasks, each at the pace of its receiver.

Messages are forwarded byte for byte; in a recorded session those of `recorder.STAMPED` get the recording's id, and
`prepared` gets the secret for resumption. The header of each message from the worker is read for metrics. Messages that
`intercept` accepts, such as client diagnostics, are not forwarded.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from server.dispatch.workers import WorkerLease, Workers
from server.live.client_end import ClientEnd
from server.live.inbox import ReceivedMessage
from server.live.kinds import LAST_MESSAGES, Kind
from server.live.live_sessions import LiveSession
from server.live.recorder import STAMPED, Recorder
from server.live.worker_link import WorkerDrainsError, WorkerLostError, frames_of
from server.metrics import GatewayMetrics
from worker.protocol.codec import peek_header
from worker.protocol.codes import CloseCode, CloseReason, ErrorCode
from worker.protocol.messages import Error, Paused, Prepared, Result, Resumed, write
from worker.protocol.takeover.journal_steps import DECIDED, KEEP
from worker.protocol.takeover.message_bytes import Data
from worker.protocol.takeover.session_journal import SessionJournal
from worker.protocol.takeover.slot_messages import KEPT_FIELD

FRAGMENT = 2**20  # characters or bytes
NOT_FOR_CLIENTS = Error(error=f"Unknown message type: {DECIDED} or {KEEP}", code=ErrorCode.UNKNOWN_TYPE)
REPLIES = frozenset({"done", "turn_done"})  # the whole answer of a turn
RESULT, PAUSED, RESUMED, PREPARED, ERROR = (one.kind() for one in (Result, Paused, Resumed, Prepared, Error))


@dataclass(frozen=True)
class WorkerClose:
    """Code and reason of the close frame with which the worker ended the session."""

    code: int
    reason: str


@dataclass(frozen=True)
class Successor:
    """Another worker, which has the session's context and goes on with it."""

    lease: WorkerLease
    link: ClientConnection


class MessageSource(Protocol):
    """Messages of a client, in order."""

    def __len__(self) -> int:
        """Number of messages that are received and not read yet."""

    async def get(self) -> ReceivedMessage:
        """Remove and return the next message. Raises: ClientDisconnected."""


@dataclass(frozen=True)
class RelayEnds:
    """Both ends of a relay.

    client: for sending. source: messages received from the client. link: connection to the worker. lease: the session's
    slot. journal: of a duplex session. n_repeated: first messages of the worker that the journal has already.
    """

    client: ClientEnd
    source: MessageSource
    link: ClientConnection
    lease: WorkerLease
    journal: SessionJournal | None = None
    n_repeated: int = 0


class Relay:
    """The message flow of one session, or of one turn of a streaming session.

    Args:
        ends: client and worker.
        session: records that messages pass.
        workers: records the activity of the worker.
        metrics: counts results and errors.
        intercept: called with each message of the client; True if it must not be forwarded.
        recorder: records the forwarded messages.
    """

    def __init__(
        self,
        ends: RelayEnds,
        session: LiveSession,
        workers: Workers,
        metrics: GatewayMetrics,
        intercept: Callable[[Data], bool],
        recorder: Recorder,
    ):
        self._client, self._source, self._link, self._lease = ends.client, ends.source, ends.link, ends.lease
        self._journal, self._n_repeated = ends.journal, ends.n_repeated
        self._session, self._workers, self._metrics, self._intercept = session, workers, metrics, intercept
        self._recorder = recorder
        self._last_messages = LAST_MESSAGES[session.kind]
        self._is_over = False
        self._started_at = time.monotonic()
        self._up_task: asyncio.Task[NoReturn] | None = None
        if self._journal is not None:
            self._client.n_frames = frames_of(self._link)
        self._n_up = 0  # messages forwarded to the worker
        self._reported: tuple[object, ...] | None = None  # terms of the last `keep_slot`

    @property
    def is_kept_by_worker(self) -> bool:
        """Whether the worker keeps the session for another gateway, if this connection is lost."""
        return self._reported is not None and self._client.is_kept and not self._lease.worker.is_closing

    def hold(self) -> bool:
        """Forward nothing more to the worker, which has answered everything. Returns: False if the session is over."""
        if self._is_over or self._up_task is None or self._up_task.done():
            return False
        self._up_task.cancel()
        return True

    async def run(self, handing: "asyncio.Task[Successor] | None" = None) -> WorkerClose | Successor:
        """Forward messages until the worker ends the session, or a turn of a streaming session is over.

        handing: a worker that takes over, after `hold`.
        Raises: ClientDisconnected; WorkerLostError; the errors of the source.
        """
        up = self._up_task = asyncio.create_task(self._up(), name="client-to-worker")
        down = asyncio.create_task(self._down(), name="worker-to-client")
        lost = asyncio.create_task(self._lease.worker.lost.wait(), name="worker-lost")
        is_handed = False
        tasks: tuple[asyncio.Task[Any], ...] = (down, up, lost, *(() if handing is None else (handing,)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if handing is not None and handing.done():
                is_handed = True
                return handing.result()
            if down.done():
                return down.result()
            if up.done():
                up.result()  # raises
            raise WorkerLostError(self._lease.worker.name, expected="a message or an answer", got="none")
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            except asyncio.CancelledError:
                is_handed = False  # the caller does not get it
                raise
            finally:
                if not is_handed:
                    _abort_successor(handing)
                # Their errors have this frame, which would keep the whole session until a full garbage collection.
                self._up_task = None
                del up, down, lost, tasks, task

    async def _up(self) -> NoReturn:
        await self._keep_slot()
        while True:
            data, received_at, _ = await self._source.get()
            self._session.touch()
            is_for_worker = not self._intercept(data)
            if is_for_worker and self._journal is not None and not self._journal.sent(data):
                await self._client.send(write(NOT_FOR_CLIENTS), is_own=True)
                is_for_worker = False
            if not is_for_worker:
                self._client.n_forwarded += 1
                await self._keep_slot()
                continue
            self._recorder.from_client(data, self._lease)
            self._client.n_forwarded += 1
            self._n_up += 1
            try:
                await self._link.send(fragments(data))
            except ConnectionClosed:
                await asyncio.Event().wait()  # wait for cancellation: the read task ends with the close code
            del data  # a request may have 128 MiB, and the next message may come much later
            await self._keep_slot()
            if received_at > self._started_at:
                self._metrics.record_relay("up", time.monotonic() - received_at)
            if len(self._source):
                await asyncio.sleep(0)  # `get` does not suspend while messages are buffered; let other tasks run

    async def _down(self) -> WorkerClose:
        while True:
            try:
                data = await self._link.recv()
            except ConnectionClosed as closed:
                if closed.rcvd is None:
                    if self._is_over:  # workers of the public implementation send no close frame
                        return WorkerClose(CloseCode.NORMAL, "")
                    raise WorkerLostError(self._lease.worker.name, expected="a close frame", got="none") from None
                if closed.rcvd.reason == CloseReason.ENGINE and self._journal is not None and self._journal.can_rebuild:
                    expected, got = "an engine that runs", "one that failed"
                    raise WorkerLostError(self._lease.worker.name, expected=expected, got=got) from None
                code = CloseCode.NORMAL if closed.rcvd.code == CloseCode.NO_STATUS else closed.rcvd.code
                return WorkerClose(code, closed.rcvd.reason)
            received_at = time.monotonic()
            header = peek_header(data)
            kind = self._record(header)
            if self._journal is not None:
                if header.get("code") == ErrorCode.DRAINING and self._journal.can_rebuild:
                    raise WorkerDrainsError(self._lease.worker.name, expected="a worker that goes on", got="a drain")
                is_repeated, self._n_repeated = self._n_repeated > 0, max(0, self._n_repeated - 1)
                if not is_repeated and self._journal.answered(kind, data, header):
                    self._client.n_frames += kind != DECIDED
                    continue
            if kind in STAMPED:
                data = self._recorder.stamped(data)
            self._recorder.from_worker(data)
            if kind == PREPARED and self._journal is not None:
                data = self._client.offer(data)  # after the recorder, since it has a secret
                self._journal.keep(self._client.is_kept)
            if self._is_over:
                self._client.is_kept = False  # nothing is left to continue
            await self._client.send(data)
            await self._keep_slot()
            self._metrics.record_relay("down", time.monotonic() - received_at)
            if self._is_over and self._session.kind is Kind.STREAMING:
                return WorkerClose(CloseCode.NORMAL, "")  # the worker keeps its socket open for further turns

    async def _keep_slot(self) -> None:
        """Send the worker `keep_slot`, if its terms have changed since the last one."""
        if self._journal is None or KEPT_FIELD not in self._lease.worker.health:
            return
        identity = self._session.identity
        owner = identity.owner if identity.has_key else ""
        message = self._client.keep_slot(owner, self._journal.n_after_suspect)
        if message is None:
            return
        offsets = message.number - message.n_frames, message.received - self._n_up
        terms = (message.tokens, message.acknowledged, offsets)
        if terms != self._reported:
            self._reported = terms
            with suppress(ConnectionClosed):  # the read task ends with the close code
                await self._link.send(write(message))

    def _record(self, header: Mapping[str, object]) -> str:
        """Record a message of the worker in the session, in its lease and in the metrics. Returns: its type, or ""."""
        self._workers.record_activity(self._lease.worker)
        self._session.touch()
        kind = header.get("type")
        if not isinstance(kind, str):
            return ""
        self._is_over = self._is_over or kind in self._last_messages
        if kind == RESULT and header.get("incomplete") is not True:
            self._workers.record_result(self._lease)
            self._metrics.record_result(header, self._lease.request_type)
        elif kind in REPLIES:
            self._workers.record_result(self._lease)
            self._metrics.record_reply(self._lease.request_type)
        elif kind in (PAUSED, RESUMED, PREPARED):
            self._workers.record_pause(self._lease, kind == PAUSED)
        elif kind == ERROR:
            self._metrics.record_error(str(header.get("code")))
        return kind


def _abort_successor(handing: "asyncio.Task[Successor] | None") -> None:
    """Close the connection to a worker that would have taken over."""
    if handing is not None and handing.done() and not handing.cancelled() and handing.exception() is None:
        handing.result().link.transport.abort()


def fragments(data: Data) -> Data | Iterator[Data]:
    """What to send: a long message in parts, so that sending it does not block the event loop for long."""
    if len(data) <= FRAGMENT:
        return data
    return (data[start : start + FRAGMENT] for start in range(0, len(data), FRAGMENT))
