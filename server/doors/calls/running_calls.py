"""The calls of one door: their begin, while their clients wait for the answers, and their end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from server.access.clients import Clients
from server.access.guard import LIMIT_REASON
from server.access.identity import Identity
from server.access.refusal import AccessRefusedError
from server.dispatch.dispatcher import PendingSession
from server.doors.calls.call import CallSession, WebRtcCall
from server.doors.calls.processes import PeerProcesses
from server.doors.core.door_ticket import ticket_within_wait
from server.doors.core.turn_response import until_disconnected
from server.doors.errors import ApiError, limit_message
from server.doors.live.door_context import DoorContext
from server.live.inbox import ClientDisconnected
from server.live.live_sessions import LiveSession
from worker.protocol.codes import CloseCode

LOG = logging.getLogger(__name__)
FAILED = (CloseCode.INTERNAL_ERROR, "Internal error")


@dataclass(frozen=True)
class CallSetup:
    """The session of a call that begins.

    Attributes:
        call_id: the id that its client knows.
        session: gets the client's sound and pictures.
        serve: runs the session until it is over. Takes its ticket.
        drop: frees a session that does not begin.
    """

    call_id: str
    session: CallSession
    serve: Callable[[PendingSession], Coroutine[Any, Any, None]]
    drop: Callable[[], None]


class RunningCalls:
    """The calls of one door.

    Args:
        context: the gateway's parts.
        processes: hold the connections of the calls.
        clients: limits of the events that a client sends.
        id_name: name of a call's id in errors.
    """

    def __init__(self, context: DoorContext, processes: PeerProcesses, clients: Clients, id_name: str):
        self._context, self._processes, self._clients, self._id_name = context, processes, clients, id_name
        self._calls: dict[str, WebRtcCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def check(self, request: Request) -> None:
        """Raises: ApiError if the client may not begin a call."""
        self._processes.check()
        refusal = self._context.admission.refusal(request, "audio_duplex")
        if refusal is not None:
            raise ApiError(403, refusal)

    async def begin(
        self, request: Request, live: LiveSession, sdp: str, set_up: Callable[[WebRtcCall], Awaitable[CallSetup]]
    ) -> tuple[str, str]:
        """Begin a call.

        Args:
            request: the client's, whose body is read.
            live: the session's entry in the list of sessions.
            sdp: the client's offer.
            set_up: makes the session.
        Returns: the call's id, and the answer.
        Raises: ApiError; ClientDisconnected if the client has gone before the answer; the errors of `set_up`.
        """
        slots, identity = self._context.slots, live.identity
        pending = await ticket_within_wait(slots, live)
        call: WebRtcCall | None = None
        made: CallSetup | None = None

        async def refuse(error: AccessRefusedError) -> None:
            assert call is not None, "expected a call with messages, got none"
            await call.send_text(limit_message(request.url.path, str(error)))
            await call.close(CloseCode.POLICY_VIOLATION, LIMIT_REASON)

        try:
            # Between the choice and the call, which counts towards the process's limit, nothing is waited for.
            process, pace = self._processes.choose(), self._clients.pace_of(identity, {})
            call = WebRtcCall(identity, process, lambda receive: pace.paced(receive, refuse))
            made = await set_up(call)
            answer = await _answer(request, call, sdp)
        except BaseException:
            if made is not None:
                made.drop()
            if call is not None:
                await call.close(1000, "")
            slots.dispatcher.finish(pending)
            raise
        call.attach(made.session)
        self._calls[made.call_id] = call
        slots.metrics.record_call(1)
        LOG.info("call %s is session %s", made.call_id, live.session_id)
        task = asyncio.create_task(_serve(call, made, pending), name="call")
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._end(made.call_id, done))
        return made.call_id, answer

    def find(self, call_id: str, identity: Identity) -> WebRtcCall:
        """A running call. Raises: ApiError for one that the identity does not own."""
        call = self._calls.get(call_id)
        if call is None or not identity.owns(call.identity.owner):
            name = self._id_name
            raise ApiError(404, f"{name}: expected a call that is running, got {call_id[:60]}", param=name)
        return call

    def _end(self, call_id: str, task: "asyncio.Task[None]") -> None:
        del self._calls[call_id]
        self._context.slots.metrics.record_call(-1)
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("call %s failed", call_id, exc_info=error)


async def _serve(call: WebRtcCall, made: CallSetup, pending: PendingSession) -> None:
    """Run the session of a call, and end the call with it."""
    try:
        await made.serve(pending)
    finally:
        await call.close(*FAILED)  # without effect if the session has closed it


async def _answer(request: Request, call: WebRtcCall, sdp: str) -> str:
    """The answer to an offer, if its client still waits for it. Raises: ApiError; ClientDisconnected."""
    opening = asyncio.create_task(call.open(sdp), name="call-open")
    leaving = asyncio.create_task(until_disconnected(request.receive), name="call-client")
    tasks: tuple[asyncio.Task[Any], ...] = (opening, leaving)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            raise ClientDisconnected
        return opening.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
