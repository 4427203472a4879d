"""One duplex session on a worker: typed messages in, typed answers out. Doors translate their clients' events to it.

Each message has one answer, and answers come in the order of the messages; the partial results of a unit come before
its result. Contains no rules about turns and no client.
"""

import asyncio
import logging
from collections import deque
from typing import Any, Protocol

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from server.dispatch.dispatcher import PendingSession
from server.dispatch.workers import WorkerLease
from server.live.kinds import Kind
from server.live.live_sessions import LiveSession
from server.live.recorder import Recorder
from server.live.slot_wait import Notify, SlotWait
from server.live.worker_link import WorkerLostError, close_link, open_link
from worker.protocol.codec import FromClient
from worker.protocol.codes import CloseCode
from worker.protocol.messages import (
    AudioChunk,
    Error,
    Partial,
    Pause,
    Paused,
    Prepare,
    Prepared,
    Result,
    Resume,
    Resumed,
    ServerMessage,
    Spec,
    Timeout,
    VideoFrame,
    read_server,
    write,
)

LOG = logging.getLogger(__name__)
# Sound crosses the link as bytes: float32 to the worker, PCM16 from it, which most doors pass on as it is.
UNIT_SPEC = Spec(partial_results=True, sound_in="float32", sound_out="pcm16", counters=True)


class UnitListener(Protocol):
    """Receives what the worker answers, on the event loop."""

    def on_partial(self, partial: Partial) -> None:
        """A part of the unit that is answered next."""

    def on_answer(self, request: FromClient, answer: ServerMessage) -> None:
        """The answer to a message: the kind that belongs to it, or an `Error`."""


class UnitSession:
    """A session with a leased slot.

    Args:
        slots: give slots.
        session: counts as the owner of the slot, from `open` to `close`.
        recorder: records the messages.
        spec: options of the protocol.
    """

    def __init__(self, slots: SlotWait, session: LiveSession, recorder: Recorder, spec: Spec = UNIT_SPEC):
        self._slots, self._session, self._recorder, self._spec = slots, session, recorder, spec
        self._unanswered: deque[FromClient] = deque()
        self._unsent: asyncio.Queue[FromClient] = asyncio.Queue()
        self._link: ClientConnection | None = None
        self._lease: WorkerLease | None = None
        self._is_paused = False

    @property
    def has_side_lane(self) -> bool:
        """Whether the worker's model writes calls of functions beside its speech."""
        return self._lease is not None and self._lease.worker.has_side_lane

    @property
    def runs_early(self) -> bool:
        """Whether units may run before their seconds are full, if their sound comes in pieces."""
        return self._lease is not None and self._lease.worker.runs_early

    @property
    def n_unanswered(self) -> int:
        """Messages that were sent and are not answered yet."""
        return len(self._unanswered)

    @property
    def max_context_len(self) -> int | None:
        """Rows of the slot's context; None if the worker does not report them."""
        health = {} if self._lease is None else self._lease.worker.health
        match health:
            case {"kv": {"total": int(n_rows)}, "slots": {"total": int(n_slots)}} if n_slots > 0:
                return n_rows // n_slots or None
        return None

    async def open(self, pending: PendingSession, notify: Notify | None = None) -> None:
        """Wait for a slot and connect to its worker.

        Args:
            pending: the session's ticket.
            notify: sends messages about the queue; None for a client that gets none.
        Raises: SessionEnd.
        """

        async def connect(lease: WorkerLease) -> ClientConnection:
            return await open_link(self._slots.http, lease, Kind.DUPLEX)

        self._session.pending = pending
        self._lease, self._link = await self._slots.open(pending, connect, notify)

    def send(self, message: FromClient) -> None:
        """Send a message after all earlier ones. `prepare` gets the session's options."""
        if isinstance(message, Prepare):
            message = message.model_copy(update={"spec": self._spec})
            self._is_paused = False
        elif isinstance(message, Pause):
            self._is_paused = True
        elif isinstance(message, AudioChunk) and self._is_paused:
            self.send(Resume())
        elif isinstance(message, Resume):
            self._is_paused = False
        self._unsent.put_nowait(message)
        if not isinstance(message, VideoFrame):
            self._unanswered.append(message)

    @property
    def is_paused(self) -> bool:
        """Whether the worker's session is paused; the next unit ends the pause."""
        return self._is_paused

    async def run(self, listener: UnitListener) -> None:
        """Pass messages until the worker closes the session. Raises: WorkerLostError."""
        lease, link = self._opened
        receiving = asyncio.create_task(self._receive(link, lease, listener), name="units-from-worker")
        sending = asyncio.create_task(self._transmit(link, lease), name="units-to-worker")
        lost = asyncio.create_task(lease.worker.lost.wait(), name="worker-lost")
        tasks: tuple[asyncio.Future[Any], ...] = (receiving, sending, lost)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()
            elif sending.done():
                sending.result()
            else:
                raise WorkerLostError(lease.worker.name, expected="a message or an answer", got="none")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            del receiving, sending, lost, tasks, task  # their errors have this frame

    async def close(self, *, graceful: bool = True) -> None:
        """Close the connection and free the slot. graceful: wait for the worker's close frame."""
        pending, self._session.pending = self._session.pending, None
        try:
            if self._link is not None:
                await close_link(self._link, graceful=graceful)
        finally:
            if self._lease is not None:
                elapsed = self._slots.dispatcher.elapsed(self._lease)
                self._slots.metrics.record_session_end(self._lease.request_type, elapsed)
            self._link = self._lease = None
            if pending is not None:
                self._slots.dispatcher.finish(pending)

    @property
    def _opened(self) -> tuple[WorkerLease, ClientConnection]:
        assert self._lease is not None and self._link is not None, "expected an open session"
        return self._lease, self._link

    async def _transmit(self, link: ClientConnection, lease: WorkerLease) -> None:
        while True:
            data = write(await self._unsent.get(), self._spec)
            self._session.touch()
            self._recorder.from_client(data, lease)
            try:
                await link.send(data)
            except ConnectionClosed:
                await asyncio.Event().wait()  # until the read task ends with the close code

    async def _receive(self, link: ClientConnection, lease: WorkerLease, listener: UnitListener) -> None:
        while True:
            try:
                data = await link.recv()
            except ConnectionClosed as closed:
                code = None if closed.rcvd is None else closed.rcvd.code
                if code in (CloseCode.NORMAL, CloseCode.NO_STATUS):
                    return
                got = "none" if closed.rcvd is None else f"{code} {closed.rcvd.reason}"
                raise WorkerLostError(lease.worker.name, expected="an open session", got=got) from None
            self._recorder.from_worker(data)
            message = read_server(data, self._spec)
            self._count(message, lease)
            if isinstance(message, Partial):
                listener.on_partial(message)
            elif isinstance(message, Timeout):
                LOG.info("session %s: the worker ends it: %s", self._session.session_id, message.reason)
            elif self._unanswered:
                request = self._unanswered.popleft()
                listener.on_answer(request, message)
            else:  # a failing engine sends one to every session
                LOG.warning("session %s: unasked message %s", self._session.session_id, message.type)

    def _count(self, message: ServerMessage, lease: WorkerLease) -> None:
        """Record an answer in the session, in its lease and in the metrics."""
        workers, metrics = self._slots.dispatcher.workers, self._slots.metrics
        workers.record_activity(lease.worker)
        self._session.touch()
        if isinstance(message, Result) and not message.incomplete:
            workers.record_result(lease)
            fields = ("is_listen", "wall_clock_ms", "lag_ms", "headroom_ms", "stages")
            metrics.record_result({name: getattr(message, name) for name in fields}, lease.request_type)
        elif isinstance(message, Paused | Resumed | Prepared):
            workers.record_pause(lease, isinstance(message, Paused))
        elif isinstance(message, Error):
            metrics.record_error(str(message.code))
