"""POST /api/chat, and the routes of live sessions."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from server import request_guard
from server.access.identity import Identity
from server.live import http_chat
from server.live.kinds import Kind
from server.live.live_sessions import LiveSession
from tests.server.live_gateway import PREPARE, RunningGateway, run, running_gateway, wait_until
from tests.server.reference_worker import ReferenceWorker, reference_worker
from tests.server.routes.asgi_gateway import asgi_client, gateway_of

REQUEST = {"messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def serving(**service: Any) -> AsyncIterator[tuple[ReferenceWorker, RunningGateway]]:
    async with reference_worker() as worker, running_gateway(worker.port, **service) as gateway:
        await gateway.wait_for_slot()
        yield worker, gateway


async def ask(gateway: RunningGateway, request: object = REQUEST, status: int = 200) -> Any:
    answer = await gateway.http.post("/api/chat", json=request)
    assert answer.status_code == status, f"expected {status}, got {answer.status_code}: {answer.text[:200]}"
    return answer.json()


def test_chat_is_answered_with_waiting_times() -> None:
    async def scenario() -> None:
        async with serving() as (worker, gateway):
            got = await ask(gateway)
            assert got.items() >= {"text": "hello", "success": True, "audio_data": None}.items(), got
            assert type(got["queue_wait_ms"]) is int and got["queue_wait_ms"] < 5000, got
            assert got["estimated_queue_wait_s"] == 0.0, got
            assert worker.received == [REQUEST]
            assert (await gateway.get("/api/config/eta"))["ema_chat_samples"] == 1
            await gateway.wait_idle()

    run(scenario)


def test_waiting_chats_are_answered_one_after_the_other() -> None:
    async def scenario() -> None:
        async with serving() as (worker, gateway):
            worker.go.clear()
            asked = [asyncio.create_task(ask(gateway)) for _ in range(5)]
            await wait_until(lambda: len(gateway.gateway.dispatcher.queue) == 4, "four waiting chats")
            items = (await gateway.get("/api/queue"))["items"]
            assert {one["request_type"] for one in items} == {"chat"}
            worker.go.set()
            answers = await asyncio.gather(*asked)
            assert all(one["success"] for one in answers)
            estimates = sorted(one["estimated_queue_wait_s"] for one in answers)
            assert estimates[0] == 0 and 10 < estimates[1] <= 15 and estimates[4] > 50, estimates

    run(scenario)


def test_client_that_disconnects_is_removed() -> None:
    async def scenario() -> None:
        async with serving() as (worker, gateway):
            worker.go.clear()
            dispatcher = gateway.gateway.dispatcher
            first, second = (asyncio.create_task(ask(gateway)) for _ in range(2))
            await wait_until(lambda: worker.received and len(dispatcher.queue) == 1, "one running and one waiting chat")
            second.cancel()
            await wait_until(lambda: not len(dispatcher.queue), "the ticket to be removed", 3)
            first.cancel()
            await wait_until(lambda: worker.cancelled == 1, "the worker to see that the client left", 3)
            await gateway.wait_idle()
            assert (await gateway.get("/api/config/eta"))["ema_chat_samples"] == 0

    run(scenario)


@pytest.mark.parametrize("status", [400, 422, 500])
def test_errors_of_worker_keep_their_status(status: int) -> None:
    async def scenario() -> None:
        async with serving() as (worker, gateway):
            worker.chat_status = status
            assert await ask(gateway, status=status) == {"detail": "refused by the worker"}
            assert (await gateway.get("/api/config/eta"))["ema_chat_samples"] == 0

    run(scenario)


def test_chat_is_sent_again_after_a_busy_worker() -> None:
    async def scenario() -> None:
        async with serving() as (worker, gateway):
            worker.chat_status = 429
            asked = asyncio.create_task(ask(gateway))
            await wait_until(lambda: len(worker.received) == 2, "a second try")
            worker.chat_status = 200
            assert (await asked)["success"] is True

    run(scenario)


def test_refusals() -> None:
    async def scenario() -> None:
        async with serving(max_queue_size=1) as (worker, gateway):
            await gateway.http.put("/api/admin/apps/turnbased", json={"enabled": False})
            assert "turnbased" in (await ask(gateway, status=403))["detail"]
            await gateway.http.put("/api/admin/apps/turnbased", json={"enabled": True})
            for request in ([], {}, {"messages": []}, {"messages": "hello"}):
                assert "expected" in (await ask(gateway, request, 422))["detail"]
            answer = await gateway.http.post("/api/chat", content=b"{")
            assert answer.status_code == 422 and "JSON" in answer.json()["detail"], answer.text
            foreign = await gateway.http.post("/api/chat", json=REQUEST, headers={"Origin": "https://foreign.example"})
            assert foreign.status_code == 403
            worker.go.clear()
            running, waiting = asyncio.create_task(ask(gateway)), asyncio.create_task(ask(gateway, status=503))
            await wait_until(lambda: len(gateway.gateway.dispatcher.queue) == 1, "a waiting chat")
            assert await ask(gateway, status=503) == {"detail": "Queue full (1 requests)"}
            [item] = (await gateway.get("/api/queue"))["items"]
            await gateway.http.delete(f"/api/queue/{item['ticket_id']}")
            assert await waiting == {"detail": "Request cancelled"}
            gateway.gateway.live.drain()
            assert "shutting down" in (await ask(gateway, status=503))["detail"]
            worker.go.set()
            assert (await running)["success"] is True, "expected a running chat to finish during the drain"

    run(scenario)


def test_lost_worker_is_a_bad_gateway() -> None:
    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port) as gateway:
            await gateway.wait_for_slot()
            worker.go.clear()
            asked = asyncio.create_task(ask(gateway, status=502))
            await wait_until(lambda: worker.received, "the request at the worker")
            lost = gateway.gateway.dispatcher.workers
            lost.record_loss(lost.all[0])
            assert "worker was lost" in (await asked)["detail"]
            await gateway.wait_idle()

    run(scenario)


def test_only_chat_may_have_a_long_body(monkeypatch: pytest.MonkeyPatch) -> None:
    [pattern] = [one for one in request_guard.LARGE_BODIES if one.fullmatch("/api/chat")]
    assert request_guard.LARGE_BODIES[pattern] == 128 * 2**20
    monkeypatch.setitem(request_guard.LARGE_BODIES, pattern, 3 * 2**20)

    async def scenario() -> None:
        async with serving() as (worker, gateway):
            large = {"messages": [{"role": "user", "content": "x" * 2**21}]}
            assert (await ask(gateway, large))["success"] is True
            assert worker.received == [large]
            larger = {"messages": [{"role": "user", "content": "x" * 2**22}]}
            assert "3145728" in (await ask(gateway, larger, 413))["detail"]
            for path in ("/api/streaming/stop", "/api/chat/x"):
                answer = await gateway.http.post(path, json=large)
                assert answer.status_code in (404, 413), f"{path}: got {answer.status_code}"

    run(scenario)


def test_chats_are_refused_while_requests_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_chat, "MAX_BODIES", 1000)

    async def scenario() -> None:
        async with serving() as (worker, gateway):
            worker.go.clear()
            large = {"messages": [{"role": "user", "content": "x" * 1000}]}
            asked = asyncio.create_task(ask(gateway, large))
            await wait_until(lambda: worker.received, "the request at the worker")
            assert "too many" in (await ask(gateway, status=503))["detail"]
            worker.go.set()
            assert (await asked)["success"] is True
            assert (await ask(gateway))["success"] is True

    run(scenario)


# --- live sessions ----------------------------------------------------------------------------------


def test_live_sessions_are_listed_and_ended() -> None:
    async def scenario() -> None:
        async with serving() as (_worker, gateway):
            assert await gateway.get("/sessions") == {"total": 0, "sessions": []}
            client = await gateway.connect("d1")
            await client.receive("queue_done")
            await client.send(PREPARE)
            await client.receive("prepared")
            waiting = await gateway.connect("hdx_2", path="/ws/half_duplex/")
            await waiting.receive("queued")
            got = await gateway.get("/sessions")
            assert got["total"] == 2, got
            first, second = got["sessions"]
            assert (first["session_id"], first["kind"], first["worker_id"]) == ("d1", "duplex", "worker_0"), first
            assert (second["session_id"], second["worker_id"]) == ("hdx_2", None), second
            [queued] = (await gateway.get("/api/queue"))["items"]
            assert second["ticket_id"] == queued["ticket_id"] != first["ticket_id"], got
            assert first["messages_hash"] == "" and first["last_active"] <= second["last_active"], got
            for name, socket in (("hdx_2", waiting), ("d1", client)):
                assert (await gateway.http.delete(f"/sessions/{name}")).json() == {"success": True, "ended": 1}
                assert (await socket.receive_until("error"))["code"] == "cancelled"
                assert await socket.wait_closed() == (1008, "Session ended")
            await gateway.wait_idle()
            unknown = await gateway.http.delete("/sessions/d1")
            assert (unknown.status_code, unknown.json()) == (404, {"detail": "Session not found: d1"})

    run(scenario)


def test_ending_an_http_chat_answers_it() -> None:
    async def scenario() -> None:
        async with serving() as (worker, gateway):
            worker.go.clear()
            asked = asyncio.create_task(ask(gateway, status=503))
            await wait_until(lambda: worker.received, "the request at the worker")
            [session] = (await gateway.get("/sessions"))["sessions"]
            assert session["session_id"].startswith("chat_"), session
            await gateway.http.delete(f"/sessions/{session['session_id']}")
            assert "ended" in (await asked)["detail"]

    run(scenario)


def test_stop_without_a_session_stops_nothing() -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of()) as http:
            for path in ("/api/streaming/stop", "/api/half_duplex/stop"):
                await http.request("POST", path, 422, json={"session_id": 3})
                for body in (None, {}, {"session_id": None}, {"session_id": "x"}):
                    got = (await http.request("POST", path, json=body)).json()
                    assert (got["success"], got["stopped"]) == (False, []), got
            assert await http.get("/api/cache") == await http.get("/cache")

    asyncio.run(scenario())


def test_stop_of_a_worker_without_the_route_fails() -> None:
    async def scenario() -> None:
        async with serving() as (_, gateway):
            session = LiveSession("hdx_1", Kind.HALF_DUPLEX, Identity())
            session.pending = gateway.gateway.dispatcher.submit("half_duplex_audio", "hdx_1")
            gateway.gateway.live.add(session)
            answer = await gateway.http.post("/api/half_duplex/stop", json={"session_id": "hdx_1"})
            assert (answer.status_code, answer.json()["success"], answer.json()["stopped"]) == (200, False, [])

    run(scenario)
