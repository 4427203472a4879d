"""Tickets of clients that know no queue: their slot, its refusal, and clients that have gone."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.websockets import WebSocketDisconnect

from server.access.identity import Identity
from server.dispatch.dispatcher import Dispatcher, PendingSession
from server.dispatch.eta import Eta, EtaConfig
from server.dispatch.queue import ANY_WORKER, Queue
from server.dispatch.workers import WorkerAddress, Workers
from server.doors.core import door_ticket
from server.doors.core.door_ticket import accept_socket, ticket_within_wait
from server.doors.errors import ApiError
from server.live.kinds import Kind
from server.live.live_sessions import LiveSession, LiveSessions

HEALTH: dict[str, object] = {"state": "IDLE", "worker_status": "idle", "slots": {"total": 1, "free": 1}}


class Slots:
    """Tickets of one worker with one slot."""

    def __init__(self) -> None:
        workers = Workers([WorkerAddress("w", 1)])
        workers.record_health(workers.all[0], HEALTH)
        self.dispatcher, self.live = Dispatcher(workers, Queue(9), Eta(EtaConfig())), LiveSessions()

    def submit(self, request_type: Any, session_id: str, *_: object) -> PendingSession:
        return self.dispatcher.submit(request_type, session_id, needs=ANY_WORKER)

    async def answered(self, pending: PendingSession) -> None:
        """At once."""

    def request(self) -> asyncio.Task[PendingSession]:
        session = LiveSession("b", Kind.DUPLEX, Identity())
        return asyncio.create_task(ticket_within_wait(cast(Any, self), session))


def test_a_slot_whose_session_has_just_ended_is_waited_for() -> None:
    async def scenario() -> None:
        slots = Slots()
        ending = slots.submit("audio_duplex", "a")
        assert slots.dispatcher.eta.remaining("audio_duplex", 0.0) > door_ticket.MAX_WAIT_S
        task = slots.request()
        await asyncio.sleep(0.01)  # the client of `a` has gone; its worker has not closed the connection yet
        assert not task.done()
        slots.dispatcher.finish(ending)
        pending = await task
        assert pending.lease is not None and len(slots.dispatcher.queue) == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_slot_that_stays_taken_is_refused_and_its_ticket_removed(
    monkeypatch: pytest.MonkeyPatch, *, is_ready: bool
) -> None:
    monkeypatch.setattr(door_ticket, "SETTLE_S", 0.02 if is_ready else 60.0)

    async def scenario() -> None:
        slots = Slots()
        slots.submit("audio_duplex", "a")
        if not is_ready:
            slots.dispatcher.workers.record_health(slots.dispatcher.workers.all[0], {})
        with pytest.raises(ApiError) as raised:
            await slots.request()
        assert raised.value.status == 503, raised.value
        assert len(slots.dispatcher.queue) == 0

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_client_that_has_gone_while_its_slot_is_waited_for_keeps_no_ticket() -> None:
    async def scenario() -> None:
        slots = Slots()
        slots.submit("audio_duplex", "a")
        task = slots.request()
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(slots.dispatcher.queue) == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_client_that_has_gone_keeps_no_slot(*, is_gone: bool) -> None:
    given_back: list[object] = []

    async def accept(subprotocol: str | None) -> None:
        if is_gone:
            raise WebSocketDisconnect(1006)

    slots: Any = SimpleNamespace(dispatcher=SimpleNamespace(finish=given_back.append))
    websocket, ticket = cast(Any, SimpleNamespace(accept=accept)), cast(Any, object())
    if is_gone:
        with pytest.raises(WebSocketDisconnect):
            asyncio.run(accept_socket(websocket, slots, ticket))
    else:
        asyncio.run(accept_socket(websocket, slots, ticket))
    assert given_back == ([ticket] if is_gone else [])
