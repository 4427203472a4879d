"""Sessions that leave a worker that goes on: one that shuts down, or is short of memory."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx

from benchmarks.serve.fake_worker import FakeWorker
from server.access.identity import Identity
from server.dispatch.dispatcher import PendingSession
from server.dispatch.queue import Queue
from server.dispatch.workers import Worker, WorkerAddress, WorkerLease
from server.live.kinds import Kind
from server.live.live_sessions import LiveSession, LiveSessions
from server.live.moves.handover import Handover, further_steps
from server.live.moves.move_watch import MEMORY_INTERVAL_S, MoveWatch
from server.live.moves.rebuild import ContextRebuild
from tests.server.live.moves.test_moving import FRAME, JournalTalk
from tests.server.live.test_resumption import Talker, sample
from tests.server.live_gateway import CHUNK, STOP, run, running_gateway, wait_until
from tests.server.routes.asgi_gateway import IDLE, asgi_client, gateway_of


def test_a_session_leaves_a_draining_worker_after_its_turn() -> None:
    """Its worker answers until another one has the context; a session that cannot move stays."""

    async def scenario() -> None:
        cycle: dict[str, Any] = {"n_listen": 2, "n_speak": 3}
        one, other = FakeWorker(slots=2, **cycle), FakeWorker(slots=2, **cycle)
        other.state = "LOADING"
        async with one, other, running_gateway(one, other) as gateway:
            stays = await (await gateway.connect("omni_stays")).prepared()
            talker = await Talker.prepared(gateway)
            other.state = "IDLE"
            await wait_until(lambda: gateway.gateway.dispatcher.workers.n_ready == 2, "the other worker")
            for _ in range(3):
                await talker.client.send(CHUNK)
                await talker.take("result")
            one.state = "DRAINING"
            await wait_until(lambda: other.n_rebuilt == 3, "the context on the other worker")
            for _ in range(2):
                await talker.client.send(CHUNK)
                await talker.take("result")
            assert one.total_requests == 5, f"expected the turn to end where it began, got {one.total_requests}"
            moved = await talker.take("session_moved")
            assert (moved["reason"], moved["seconds"], moved["restored"]) == ("draining", 0.0, 5), moved
            await talker.client.send(CHUNK)
            await talker.take("result")
            assert talker.units == [1, 2, 3, 4, 5, 6] and other.total_requests == 1, talker.units
            assert (await stays.unit())["current_time"] == 1 and set(one.sessions) == {"omni_stays"}
            await talker.client.send(STOP)
            await talker.take("stopped")
            await stays.close()
            await gateway.wait_idle()
            assert sample(gateway, "move_seconds_count", outcome="handed over") == 1

    run(scenario)


def test_administrators_drain_a_worker() -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path))
        return httpx.Response(202, json={"state": "DRAINING"})

    async def scenario() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            gateway = replace(gateway_of(), http=http)
            worker = gateway.dispatcher.workers.all[0]
            gateway.dispatcher.workers.record_health(worker, IDLE)
            async with asgi_client(gateway) as client:
                path = "/api/admin/workers/worker_{}/drain"
                body = (await client.request("POST", path.format(0), 202)).json()
                await client.request("POST", path.format(7), 404)
            assert body == {"worker_id": "worker_0", "state": "DRAINING", "moving": 0, "waiting": 0}
            assert asked == [("POST", "/drain")] and worker.is_closing and not worker.n_free

    run(scenario)


class Asked:
    """Records what a session is asked."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.can_move = True

    def ask(self, reason: str) -> None:
        self.reason = reason

    def withdraw(self) -> None:
        self.reason = None


def test_the_least_active_session_leaves_a_worker_that_is_short_of_memory() -> None:
    now, live, tickets = [0.0], LiveSessions(), Queue(10)
    watch, worker = MoveWatch(live, lambda: now[0]), Worker(0, WorkerAddress("127.0.0.1", 1))
    sessions = []
    for name, active_at, is_paused in (("old", 1.0, False), ("paused", 3.0, True), ("new", 2.0, False)):
        session = LiveSession(name, Kind.DUPLEX, Identity(), active_at=active_at)
        lease = WorkerLease(worker, "omni_duplex", name, 0.0, 0.0, paused=is_paused)
        session.pending = PendingSession(tickets.new_ticket("omni_duplex", name, ""), lease)
        session.handover = Asked()  # type: ignore[assignment]
        live.add(session)
        sessions.append(session)

    def asked() -> list[str]:
        watch.poll()
        return [one.session_id for one in sessions if one.handover is not None and one.handover.reason is not None]

    assert asked() == []
    worker.health = {"memory_share": 0.95}
    assert asked() == ["paused"] and asked() == ["paused"], "expected one at a time"
    live.remove(sessions[1])
    sessions[1].handover = None
    assert asked() == [], "expected some time for the memory"
    now[0] = MEMORY_INTERVAL_S
    assert asked() == ["old"]
    worker.health = {"memory_share": 0.5}
    assert asked() == []
    worker.health = {"state": "DRAINING"}
    assert asked() == ["old", "new"]


def test_what_follows_a_context_that_another_worker_has() -> None:
    talk = JournalTalk().prepared()
    talk.unit(1)
    fed = list(talk.journal.steps)
    talk.unit(2)
    assert further_steps(fed, talk.journal.steps) == [talk.journal.steps[-1]]
    assert further_steps(fed, (talk.journal.steps[0], talk.journal.steps[2])) == [talk.journal.steps[2]]
    talk.send({"type": "interrupt"})
    talk.answer("interrupted")
    fed = list(talk.journal.steps)
    talk.unit(3)
    assert further_steps(fed, talk.journal.steps) is None, "expected an interrupt that has had its effect to count"


def test_a_move_that_waits_for_an_edge_ends_once_the_session_may_stay() -> None:
    async def scenario() -> None:
        talk = JournalTalk().prepared()
        talk.send(FRAME)  # without a chunk, so no edge comes
        handover = Handover(None, None, None, None, talk.journal)
        rebuild = ContextRebuild(None, None, one_by_one=False)
        rebuild.fed = list(talk.journal.steps)
        handover.ask("memory")
        waiting = asyncio.create_task(handover._catch_up(rebuild, lambda: True))
        await asyncio.sleep(0)
        handover.withdraw()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert waiting.done() and not waiting.result(), "expected the other worker's slot to be given up"

    run(scenario)
