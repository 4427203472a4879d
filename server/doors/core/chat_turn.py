"""One chat or one given text through a slot of a worker, as typed events. Used by every door that answers by turns.

Waits in the gateway's queue as other chats do. Contains no HTTP, no encoding of sound and no names of the OpenAI API
but those of errors.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from copy import copy
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from server.access.identity import Identity
from server.access.shares import run_shared
from server.dispatch.placement import voice_of
from server.dispatch.queue import Needs, RequestType
from server.dispatch.workers import Worker, WorkerLease
from server.doors.errors import ApiError
from server.live.closes import BUSY, CANCELLED, DRAINING, SessionEnd
from server.live.kinds import Kind, new_session_id
from server.live.live_sessions import LiveSession
from server.live.recorder import Recorder
from server.live.slot_wait import SlotWait
from server.live.worker_link import WorkerLostError, close_link, open_link_to
from server.recording.recordings import Recordings
from worker.protocol.chat_messages import PrefillDone, ReplyChunk, ReplyDone, ReplyUsage
from worker.protocol.codec import Message
from worker.protocol.codes import ErrorCode
from worker.protocol.gateway_messages import Queued, QueueUpdate
from worker.protocol.messages import Error, Timeout
from worker.protocol.takeover.message_bytes import ByteBudget
from worker.protocol.wire import json_text, read_object

LOG = logging.getLogger(__name__)
MAX_REQUESTS = 512 * 2**20  # bytes of all requests that wait or run
MAX_UNREAD = 64  # events that wait for a slow client; the worker's messages are not read meanwhile
RETRY_AFTER_S = 2
NO_RETRY = {"x-should-retry": "false"}
STATUS = {
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.BUSY: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.QUEUE_FULL: 503,
    ErrorCode.CANCELLED: 503,
    ErrorCode.ENGINE: 500,
    ErrorCode.INTERNAL: 500,
    ErrorCode.WORKER_LOST: 500,
}
BUSY_CODES = frozenset({ErrorCode.BUSY, ErrorCode.DRAINING})


class TurnPath(StrEnum):
    """What a worker is asked for: its socket's path."""

    CHAT = "/ws/chat"
    SPEECH = "/ws/speech"
    CONVERSION = "/ws/conversion"
    SPEAK = "/ws/speak"  # of the speech model


# What occupies slots of another model than the omni model.
REQUEST_TYPES: dict[TurnPath, RequestType] = {TurnPath.SPEAK: "speech", TurnPath.CONVERSION: "conversion"}


@dataclass(frozen=True)
class TurnRequest:
    """The request to a worker. fields: of the path's request; the worker checks them."""

    path: TurnPath
    fields: Mapping[str, object]


@dataclass(frozen=True)
class TurnQueued:
    """The turn waits for a slot."""

    position: int
    wait_s: float


@dataclass(frozen=True)
class TurnStarted:
    """The conversation is in the context."""

    input_tokens: int


@dataclass(frozen=True)
class TurnText:
    """Further text of the answer."""

    text: str


@dataclass(frozen=True)
class TurnSound:
    """Further sound of the answer, [n] float32 at 24 kHz."""

    pcm: np.ndarray


@dataclass(frozen=True)
class TurnFinished:
    """The answer is complete; the last event. stopped: `stop`, `length` or `interrupted`."""

    text: str
    stopped: str
    usage: ReplyUsage


TurnEvent = TurnQueued | TurnStarted | TurnText | TurnSound | TurnFinished


class ChatTurns:
    """All turns of the doors. slots: gives slots to turns, and has the list of sessions."""

    def __init__(self, slots: SlotWait, recordings: Recordings):
        self._slots, self._recordings = slots, recordings
        self._budget = ByteBudget(MAX_REQUESTS)
        self._labels: frozenset[str] = frozenset()

    def at(self, labels: frozenset[str]) -> "ChatTurns":
        """The same turns, at workers that have these labels."""
        turns = copy(self)
        turns._labels = labels
        return turns

    @asynccontextmanager
    async def open(self, request: TurnRequest, identity: Identity) -> AsyncIterator["DoorTurn"]:
        """A turn, which ends with the context: its slot is free as soon as the worker's step in flight is over.

        Raises: ApiError 503 if the server does not accept turns now.
        """
        live = self._slots.live
        if live.draining:
            raise error_of_end(SessionEnd(DRAINING))
        if self._budget.is_exhausted:
            raise error_of_end(SessionEnd(BUSY))
        text = await run_shared(json_text, request.fields)  # sounds and pictures take long
        tts = request.fields.get("tts")
        needs = Needs(self._labels, voice_of(tts if isinstance(tts, dict) else request.fields))
        session = LiveSession(new_session_id(Kind.CHAT), Kind.CHAT, identity, needs=needs)
        turn = DoorTurn(self._slots, session, request.path, text)
        if request.path is TurnPath.CHAT:
            turn.record_with(Recorder(self._recordings, Kind.CHAT, session.session_id, session.identity))
        self._budget.used += len(text)
        live.add(session)
        try:
            turn.start()
            yield turn
        finally:
            try:
                await turn.close()
            finally:  # also if it is cancelled meanwhile
                live.remove(session)
                self._budget.used -= len(text)


class DoorTurn:
    """One turn: `async for event in turn.events()`. Made by `ChatTurns.open`."""

    def __init__(self, slots: SlotWait, session: LiveSession, path: TurnPath, request: str):
        self._slots, self._session, self._path, self._request = slots, session, path, request
        self._events: deque[TurnEvent] = deque()
        self._changed, self._room = asyncio.Event(), asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._recorder: Recorder | None = None
        self._has_begun = self._is_sent = False
        self._later: list[str] = []  # messages after the request
        self._n_later_sent = 0  # of them to the worker in `_link`
        self.slot_given = asyncio.Event()  # set when a worker has accepted the turn
        self._link: ClientConnection | None = None
        self._sending = asyncio.Lock()

    @property
    def session_id(self) -> str:
        """The session's id in logs and in the list of sessions."""
        return self._session.session_id

    def record_with(self, recorder: Recorder) -> None:
        """Record the turn."""
        self._recorder = recorder

    async def send(self, message: Message) -> None:
        """Send a further message to the worker, after the request; it waits for the slot with it."""
        self._later.append(json_text(message.model_dump(mode="json")))
        await self._send_later()

    async def _send_later(self) -> None:
        async with self._sending:
            while self._link is not None and self._n_later_sent < len(self._later):
                text = self._later[self._n_later_sent]
                self._n_later_sent += 1
                with suppress(ConnectionClosed):  # the turn's task reads why
                    await self._link.send(text)

    def start(self) -> None:
        """Begin to wait for a slot."""
        self._running = self._session.task = asyncio.create_task(self._run(), name=self.session_id)
        self._running.add_done_callback(lambda _: self._changed.set())

    async def close(self) -> None:
        """End the turn, wherever it stands."""
        running = self._running
        if running is not None:
            if not running.cancelling():  # a second time would leave its connection to the worker open
                running.cancel()
            await asyncio.gather(asyncio.shield(running), return_exceptions=True)
            self._running = self._session.task = None  # its error, if any, has frames with this turn

    async def events(self) -> AsyncIterator[TurnEvent]:
        """The events, the last of which is `TurnFinished`.

        Raises: ApiError for a refused request, a failed answer, and an end by the server.
        """
        running = self._running
        assert running is not None, "events: expected a turn that was started"
        while True:
            while self._events:
                yield self._events.popleft()
                self._room.set()
            if running.done():
                break
            self._changed.clear()
            await self._changed.wait()
        error: BaseException | None = None
        try:
            if running.cancelled():
                raise error_of_end(SessionEnd(self._session.forced_close or CANCELLED))
            if (error := running.exception()) is not None:
                raise self._api_error(error)
        finally:
            del running, error  # whose frames would keep the turn until a full garbage collection

    # --- the turn's task -----------------------------------------------------------------------

    async def _run(self) -> None:
        slots, session = self._slots, self._session
        kind = REQUEST_TYPES.get(self._path, "chat")
        session.pending = pending = slots.submit(kind, session.session_id, session.identity, session.needs)
        try:
            while True:
                lease, link = await slots.open(pending, self._connect, self._notify, needs_model=True)
                begun = time.monotonic()
                self.slot_given.set()
                try:
                    if await self._converse(lease, link):
                        return
                finally:
                    slots.metrics.record_session_end(lease.request_type, time.monotonic() - begun)
                    await close_link(link, graceful=not lease.worker.lost.is_set())
                slots.dispatcher.workers.suspend(lease.worker)
                slots.dispatcher.requeue(pending)
        finally:
            if self._recorder is not None:
                self._recorder.end()
            slots.dispatcher.finish(pending)

    async def _connect(self, lease: WorkerLease) -> ClientConnection:
        return await open_link_to(self._slots.http, lease, self._path)

    async def _notify(self, message: Message) -> None:
        if isinstance(message, Queued | QueueUpdate):
            self._emit(TurnQueued(message.position, message.estimated_wait_s))

    async def _converse(self, lease: WorkerLease, link: ClientConnection) -> bool:
        """Send the request and pass on the answer. Returns: False if the worker has no slot after all.

        Raises: WorkerLostError; ApiError.
        """
        recorder, workers = self._recorder, self._slots.dispatcher.workers
        if recorder is not None and recorder.is_enabled and not self._is_sent:
            recorder.from_client(self._request, lease)  # once, although another worker may get the request again
        self._is_sent = True
        losing = asyncio.create_task(_abort_if_lost(lease.worker, link))
        try:
            await link.send(self._request)
            self._link, self._n_later_sent = link, 0
            await self._send_later()
            while True:
                data = await link.recv()
                workers.record_activity(lease.worker)
                self._session.touch()
                if recorder is not None:
                    recorder.from_worker(recorder.stamped(data))
                given = read_object(data)
                kind = given.get("type")
                if kind == Error.kind() and not self._has_begun and given.get("code") in BUSY_CODES:
                    return False
                await self._take(given)
                if kind == ReplyDone.kind():
                    workers.record_result(lease)
                    self._slots.metrics.record_reply(lease.request_type)
                    return True
        except ConnectionClosed as closed:
            if closed.rcvd is None or lease.worker.lost.is_set():
                raise WorkerLostError(lease.worker.name, expected="an answer", got="none") from None
            raise ApiError(500, f"worker: expected an answer, got the end: {closed.rcvd.reason}") from None
        finally:
            self._link = None
            losing.cancel()
            await asyncio.gather(losing, return_exceptions=True)

    async def _take(self, given: dict[str, object]) -> None:
        """Turn a message of the worker into events. Raises: ApiError for its errors."""
        kind = given.get("type")
        if kind == PrefillDone.kind():
            self._has_begun = True
            self._emit(TurnStarted(_number(given.get("input_tokens"))))
        elif kind == ReplyChunk.kind():
            while len(self._events) >= MAX_UNREAD:
                self._room.clear()
                await self._room.wait()
            chunk = _chunk_of(given)
            if chunk.text_delta:
                self._emit(TurnText(chunk.text_delta))
            if chunk.audio_data:
                self._emit(TurnSound(chunk.audio_data.samples("audio_data")))
        elif kind == ReplyDone.kind():
            usage = given.get("usage")
            counted = ReplyUsage.model_validate(usage if isinstance(usage, dict) else dict(NO_USAGE))
            self._emit(TurnFinished(str(given.get("text", "")), str(given.get("stopped", "stop")), counted))
        elif kind in (Error.kind(), Timeout.kind()):
            self._slots.metrics.record_error(str(given.get("code", "")))
            raise error_of_worker(str(given.get("code", "")), str(given.get("error") or given.get("reason")))

    def _emit(self, event: TurnEvent) -> None:
        self._events.append(event)
        self._changed.set()

    def _api_error(self, error: BaseException) -> ApiError:
        if isinstance(error, SessionEnd):
            return error_of_end(error)
        if not isinstance(error, ApiError):
            LOG.error("session %s: %s", self.session_id, error, exc_info=error)
            text = f"The worker was lost: {error}" if isinstance(error, WorkerLostError) else "Internal server error"
            error = ApiError(500, text)
        if self._has_begun:  # a client that tries again would cause the same work again
            error.headers = {**(error.headers or {}), **NO_RETRY}
        return error


NO_USAGE = dict.fromkeys(ReplyUsage.model_fields, 0)


def error_of_end(end: SessionEnd) -> ApiError:
    """The error of a turn that the gateway has ended or refused."""
    close = end.close
    text = close.reason if close.error is None else close.error.error
    is_limit = close.error is not None and close.error.code == ErrorCode.LIMIT_REACHED
    retry_s = RETRY_AFTER_S if close.retry_after_s is None else max(1, math.ceil(close.retry_after_s))
    return ApiError(429 if is_limit else 503, text, headers={"retry-after": str(retry_s)})


def error_of_worker(code: str, text: str) -> ApiError:
    """The error of an `error` message. Its text begins with the name of the field, which becomes `param`."""
    status = next((status for known, status in STATUS.items() if known == code), 400)
    if status == 503:
        return ApiError(status, text, headers={"retry-after": str(RETRY_AFTER_S)})
    if status != 400:
        return ApiError(status, text)
    name, colon, _ = text.partition(":")
    param = name if colon and " " not in name else None
    return ApiError(400, text, param=param, code=CODES.get(code, "invalid_value"))


CODES = {ErrorCode.CONTEXT_FULL.value: "context_length_exceeded"}


async def _abort_if_lost(worker: Worker, link: ClientConnection) -> None:
    """Break the connection to a worker that is lost, so that reading from it raises."""
    await worker.lost.wait()
    link.transport.abort()


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _chunk_of(given: dict[str, object]) -> ReplyChunk:
    known = {name: given[name] for name in ReplyChunk.model_fields if given.get(name) is not None}
    return ReplyChunk.model_validate(known)
