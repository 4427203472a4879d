"""Chats over HTTP: a slot of a worker, the request forwarded to it, and its response.

Contains no validation of requests.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import httpx

from server.access.identity import Identity
from server.dispatch.dispatcher import QueuePosition
from server.dispatch.queue import ANY_WORKER, Needs
from server.dispatch.workers import WorkerLease
from server.live.closes import BUSY, CANCELLED, DRAINING, SessionEnd
from server.live.inbox import ClientDisconnected
from server.live.kinds import Kind, new_session_id
from server.live.live_sessions import LiveSession
from server.live.recorder import Recorder
from server.live.slot_wait import SlotWait
from server.live.worker_link import OPEN_TIMEOUT_S, WorkerLostError, probe
from server.recording.recordings import Recordings
from worker.protocol.takeover.message_bytes import ByteBudget

BUSY_STATUSES = frozenset({429, 503})  # the worker has no free slot after all
MAX_BODIES = 512 * 2**20  # bytes of all requests that wait or run
MAX_TRIES = 5  # workers that refuse one chat, before their response is forwarded
# A worker computes for as long as it needs; one that hangs is detected by its health.
TIMEOUT = httpx.Timeout(None, connect=OPEN_TIMEOUT_S)


@dataclass(frozen=True)
class ForwardedAnswer:
    """A worker's response. body: JSON. waited_s: until the slot. estimated_s: the wait that was expected at first."""

    status: int
    body: bytes
    waited_s: float
    estimated_s: float


class HttpChats:
    """All chats over HTTP."""

    def __init__(self, slots: SlotWait, recordings: Recordings):
        self._slots, self._recordings = slots, recordings
        self._budget = ByteBudget(MAX_BODIES)

    async def ask(
        self,
        body: bytes,
        until_gone: Callable[[], Coroutine[Any, Any, None]],
        identity: Identity,
        needs: Needs = ANY_WORKER,
    ) -> ForwardedAnswer:
        """The answer of a worker.

        Args:
            body: the request, in JSON.
            until_gone: waits until the client has disconnected.
            identity: who asks.
            needs: of the worker.
        Raises:
            SessionEnd if the gateway ends the chat; ClientDisconnected; WorkerLostError.
        """
        live = self._slots.live
        if live.draining:
            raise SessionEnd(DRAINING)
        if self._budget.is_exhausted:
            raise SessionEnd(BUSY)
        self._budget.used += len(body)
        session = LiveSession(new_session_id(Kind.CHAT), Kind.CHAT, identity, needs=needs)
        running = asyncio.create_task(self._run(session, body), name="chat")
        leaving = asyncio.create_task(until_gone())
        session.task = running
        live.add(session)
        try:
            await asyncio.wait((running, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise ClientDisconnected
            if running.cancelled():
                raise SessionEnd(session.forced_close or CANCELLED)
            return running.result()
        finally:
            running.cancel()
            leaving.cancel()
            await asyncio.gather(running, leaving, return_exceptions=True)
            live.remove(session)
            self._budget.used -= len(body)

    async def _run(self, session: LiveSession, body: bytes) -> ForwardedAnswer:
        slots, begun = self._slots, time.monotonic()
        session.pending = pending = slots.submit("chat", session.session_id, session.identity, session.needs)
        position: QueuePosition | None = None

        async def check(lease: WorkerLease) -> None:
            await probe(slots.http, lease.worker)

        recorder = Recorder(self._recordings, Kind.CHAT, session.session_id, session.identity)
        try:
            await slots.answered(pending)
            position = slots.dispatcher.position_of(pending)
            for n_tries in range(1, MAX_TRIES + 1):
                lease, _ = await slots.open(pending, check, None)
                waited_s = time.monotonic() - begun
                if n_tries == 1 and recorder.is_enabled:
                    recorder.from_client(body.decode(errors="replace"), lease)
                response = await self._post(lease, body)
                if response.status_code not in BUSY_STATUSES or n_tries == MAX_TRIES:
                    break
                slots.dispatcher.workers.suspend(lease.worker)
                slots.dispatcher.requeue(pending)
            answer = response.content
            if response.is_success:
                if recorder.is_enabled:
                    text = recorder.stamped(response.text)
                    recorder.from_worker(text)
                    answer = text.encode()
                slots.dispatcher.workers.record_result(lease)
                slots.metrics.record_reply(lease.request_type)
            estimated_s = position.wait_s if position else 0.0
            return ForwardedAnswer(response.status_code, answer, waited_s, estimated_s)
        finally:
            recorder.end()
            slots.dispatcher.finish(pending)

    async def _post(self, lease: WorkerLease, body: bytes) -> httpx.Response:
        """Send the request to the worker. Raises: WorkerLostError."""
        worker, begun = lease.worker, time.monotonic()
        url, headers = f"http://{worker.address}/chat", {"Content-Type": "application/json"}
        posting = asyncio.ensure_future(self._slots.http.post(url, content=body, headers=headers, timeout=TIMEOUT))
        lost = asyncio.create_task(worker.lost.wait())
        try:
            await asyncio.wait((posting, lost), return_when=asyncio.FIRST_COMPLETED)
            if not posting.done():
                raise WorkerLostError(worker.name, expected="an answer", got="none")
            return posting.result()
        except httpx.HTTPError as error:
            got = str(error) or type(error).__name__
            raise WorkerLostError(worker.name, expected="an answer", got=got) from None
        finally:
            posting.cancel()
            lost.cancel()
            await asyncio.gather(posting, lost, return_exceptions=True)
            self._slots.metrics.record_session_end(lease.request_type, time.monotonic() - begun)
