"""Chats over WebSockets through the gateway, in front of a worker like those of the public implementation."""

import asyncio
import json

import pytest
import websockets

from benchmarks.serve.fake_worker import FakeWorker
from server.live import slot_wait, sockets
from tests.server.live_gateway import (
    CHUNK,
    STOP,
    Client,
    RunningGateway,
    run,
    running_gateway,
    scripted_worker,
    wait_until,
)
from tests.server.reference_worker import reference_worker
from worker.protocol.codes import ErrorCode

REQUEST = {"messages": [{"role": "user", "content": "Hi"}], "streaming": True}
MB = 2**20


async def ask(gateway: RunningGateway, request: object = REQUEST) -> Client:
    client = await gateway.connect("", path="/ws/chat")
    await client.send(json.dumps(request))
    return client


def test_chat_is_forwarded_and_closed() -> None:
    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port) as gateway:
            await gateway.wait_for_slot()
            client = await ask(gateway)
            for kind in ("queue_done", "prefill_done", "chunk", "done"):
                await client.receive(kind)
            assert (await client.wait_closed())[0] == 1000, "expected a normal end without a close frame of the worker"
            assert worker.received == [REQUEST]
            await gateway.wait_idle()
            eta = await gateway.get("/api/config/eta")
            assert eta["ema_chat_samples"] == 1 and eta["ema_chat_s"] < 5, eta
            assert 'replies_total{request_type="chat"} 1.0' in (await gateway.http.get("/metrics")).text

    run(scenario)


def test_waiting_chat_gets_gateway_messages_and_nothing_else() -> None:
    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port) as gateway:
            await gateway.wait_for_slot()
            worker.go.clear()
            first = await ask(gateway)
            await first.receive("queue_done")
            await first.receive("prefill_done")
            waiting = await ask(gateway)
            queued = await waiting.receive("queued")
            assert queued["position"] == 1 and queued["reason"] == "busy" and 0 < queued["estimated_wait_s"] <= 15, (
                queued
            )
            [one] = (await gateway.get("/workers"))["workers"]
            assert (one["status"], one["current_request_type"]) == ("busy_chat", "chat"), one
            status = await gateway.get("/status")
            assert (status["duplex_workers"], status["busy_workers"], status["queue_length"]) == (0, 1, 1), status
            worker.go.set()
            await waiting.receive_until("queue_done")
            assert [json.loads(await waiting.receive_raw())["type"] for _ in range(3)] == [
                "prefill_done",
                "chunk",
                "done",
            ]

    run(scenario)


def test_closing_waiting_chat_frees_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_wait, "UPDATE_S", 1000.0)  # a position is sent when it changes, not periodically

    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port) as gateway:
            await gateway.wait_for_slot()
            worker.go.clear()
            await (await ask(gateway)).receive("queue_done")
            left, stays = await ask(gateway), await ask(gateway, {**REQUEST, "streaming": False})
            await left.receive("queued")
            assert (await stays.receive("queued"))["position"] == 2
            await left.close()
            update = await stays.receive("queue_update")
            assert (update["position"], update["queue_length"]) == (1, 1), update

    run(scenario)


@pytest.mark.parametrize("abort", [False, True])
def test_closing_running_chat_cancels_it_on_worker(abort: bool) -> None:
    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port) as gateway:
            await gateway.wait_for_slot()
            worker.go.clear()
            client = await ask(gateway)
            await client.receive("queue_done")
            await client.receive("prefill_done")
            if abort:
                client.abort()
            else:
                await client.close()
            await wait_until(lambda: worker.cancelled == 1, "the worker to see the end of its client", 2)
            await gateway.wait_idle()
            assert (await gateway.get("/api/config/eta"))["ema_chat_samples"] == 0, (
                "expected no sample of a cancelled chat"
            )

    run(scenario)


def test_chat_without_request_takes_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "REQUEST_TIMEOUT_S", 0.5)

    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port) as gateway:
            await gateway.wait_for_slot()
            silent = await gateway.connect("", path="/ws/chat")
            await wait_until(lambda: len(gateway.gateway.live) == 1, "the connection")
            assert not gateway.gateway.dispatcher.workers.leases
            assert await silent.wait_closed() == (1008, "No request")
            await gateway.wait_idle()

    run(scenario)


def test_chat_is_refused_while_requests_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_BUFFERED_TOTAL", 2 * MB)

    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port) as gateway:
            await gateway.wait_for_slot()
            worker.go.clear()
            await (await ask(gateway)).receive("queue_done")
            large = {"messages": [{"role": "user", "content": "x" * (MB + MB // 2)}]}
            await (await ask(gateway, large)).receive("queued")
            refused = await ask(gateway, large)
            assert (await refused.receive("error"))["code"] == ErrorCode.QUEUE_FULL
            assert (await refused.wait_closed())[0] == 1013

    run(scenario)


def test_conversations_with_reference_worker() -> None:
    """Few fields in results, no slots in /health, and no close frame after `stopped`."""

    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port) as gateway:
            await gateway.wait_for_slot()
            client = await gateway.connect("d1")
            await client.receive("queue_done")
            await client.send({"type": "prepare", "system_prompt": "mock", "config": {"max_kv_tokens": 8000}})
            assert (await client.receive("prepared"))["prompt_length"] == 50
            for _ in range(3):
                assert (await client.unit())["is_listen"] is True
            await client.send(STOP)
            await client.receive("stopped")
            assert (await client.wait_closed())[0] == 1000
            assert worker.received[1] == CHUNK
            await gateway.wait_idle()

    run(scenario)


@pytest.mark.parametrize("path", ["/ws/half_duplex/", "/ws/half_duplex_omni/"])
def test_half_duplex_has_its_own_paths_and_type(path: str) -> None:
    async def scenario() -> None:
        paths = []

        async def talk(connection: websockets.ServerConnection) -> None:
            paths.append(connection.request.path)
            await connection.recv()
            await connection.send(json.dumps({"type": "prepared", "session_id": "hdx_1", "timeout_s": 300}))
            await connection.send(json.dumps({"type": "turn_done", "turn_index": 1, "text": "yes"}))
            await connection.wait_closed()

        async with scripted_worker(talk, slots=1) as port, running_gateway(port) as gateway:
            await gateway.wait_for_slot()
            client = await gateway.connect("hdx_1", path=path)
            await client.send({"type": "prepare"})  # before any message of the queue
            for kind in ("queue_done", "prepared", "turn_done"):
                await client.receive(kind)
            assert paths == ["/ws/half_duplex?session_id=hdx_1"], paths
            [one] = (await gateway.get("/workers"))["workers"]
            assert (one["status"], one["current_request_type"]) == ("busy_half_duplex", "half_duplex_audio"), one
            [task] = (await gateway.get("/status"))["running_tasks"]
            assert (task["request_type"], task["units"]) == ("half_duplex_audio", 1), task
            await client.close()
            await gateway.wait_idle()
            assert (await gateway.get("/api/config/eta"))["ema_half_duplex_samples"] == 1

    run(scenario)


@pytest.mark.parametrize(
    ("app", "paths"),
    [
        ("turnbased", ("/ws/chat", "/ws/streaming", "/ws/streaming/s")),
        ("half_duplex_audio", ("/ws/half_duplex/h", "/ws/half_duplex_omni/h")),
        ("omni", ("/ws/duplex/d1",)),
    ],
)
def test_disabled_app_refuses_its_sockets(app: str, paths: tuple[str, ...]) -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            await gateway.http.put("/api/admin/apps", json={"app_id": app, "enabled": False})
            for path in paths:
                with pytest.raises(websockets.InvalidStatus) as refused:
                    await gateway.connect("", path=path)
                assert refused.value.response.status_code == 403, path
                assert app in json.loads(refused.value.response.body)["detail"]
            await gateway.http.put("/api/admin/apps", json={"app_id": app, "enabled": True})
            for path in paths:
                await (await gateway.connect("", path=path)).close()

    run(scenario)


def test_unknown_socket_path_is_not_found() -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            for path in (
                "/ws/duplex",
                "/ws/duplex/a/b",
                "/ws/nothing/a",
                "/",
                "/static/x",
                "/ws/chat/x",
                "/ws/half_duplex",
            ):
                with pytest.raises(websockets.InvalidStatus) as refused:
                    await gateway.connect("", path=path)
                response = refused.value.response
                assert response.status_code == 404, f"{path}: got {response.status_code}"
                assert "/ws/half_duplex" in json.loads(response.body)["detail"]

    run(scenario)


def test_drain_closes_waiting_chats_and_lets_running_ones_finish() -> None:
    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port) as gateway:
            await gateway.wait_for_slot()
            worker.go.clear()
            running = await ask(gateway)
            await running.receive("queue_done")
            await running.receive("prefill_done")
            waiting = await ask(gateway)
            await waiting.receive("queued")
            gateway.gateway.live.drain()
            assert (await waiting.receive("error"))["code"] == ErrorCode.DRAINING
            assert (await waiting.wait_closed())[0] == 1012
            worker.go.set()
            await running.receive("chunk")
            await running.receive("done")
            await asyncio.wait_for(running.socket.wait_closed(), 5)

    run(scenario)
