"""Streaming sessions: a slot for each turn, several turns on one socket, in front of a reference-like worker."""

import json
from typing import Any

import pytest

from server.live import streaming
from tests.server.live_gateway import Client, RunningGateway, run, running_gateway, wait_until
from tests.server.reference_worker import reference_worker
from worker.protocol.codes import ErrorCode

MESSAGES = [{"role": "user", "content": "hello"}]
PREFILL = {"type": "prefill", "messages": MESSAGES, "session_id": "s1", "is_last_chunk": True}
GENERATE = {"type": "generate", "session_id": "s1", "generate_audio": False, "max_new_tokens": 100}
TURN = ["queue_done", "prefill_done", "chunk", "chunk", "done"]


async def connect(gateway: RunningGateway, name: str = "s1") -> Client:
    return await gateway.connect(name, path="/ws/streaming/")


async def kinds(client: Client, n: int) -> list[str]:
    return [json.loads(await client.receive_raw())["type"] for _ in range(n)]


def test_each_turn_holds_a_slot_from_prefill_to_done() -> None:
    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port) as gateway:
            await gateway.wait_for_slot()
            leases, client = gateway.gateway.dispatcher.workers, await connect(gateway)
            for n in (1, 2):
                assert not leases.leases, "expected no slot between turns"
                await client.send({**PREFILL, "messages": MESSAGES * n})
                await client.receive("queue_done")
                done = await client.receive("prefill_done")
                assert (done["message_count"], done["input_tokens"]) == (n, 10 * n), done
                [task] = (await gateway.get("/status"))["running_tasks"]
                assert (task["request_type"], task["session_id"]) == ("chat", "s1"), task
                await client.send(GENERATE)
                assert await kinds(client, 3) == ["chunk", "chunk", "done"]
                await wait_until(lambda: not leases.leases, "the slot to be free")
            first = worker.received[0]
            assert first.pop("clear_kv_cache") is True and first == PREFILL, first
            await client.send({"type": "close"})
            assert await client.wait_closed() == (1000, "closed")
            await gateway.wait_idle()
            assert (await gateway.get("/api/config/eta"))["ema_chat_samples"] == 2

    run(scenario)


def test_two_turns_sent_at_once_are_answered_in_order() -> None:
    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port) as gateway:
            await gateway.wait_for_slot()
            client = await gateway.connect("", path="/ws/streaming")
            await client.send(PREFILL, PREFILL, GENERATE, PREFILL, GENERATE)
            first = ["queue_done", "prefill_done", "prefill_done", "chunk", "chunk", "done"]
            assert await kinds(client, 11) == first + TURN
            cleared = [message.get("clear_kv_cache") for message in worker.received]
            assert cleared == [True, None, None, True, None], f"expected a new context at each turn, got {cleared}"
            await client.close()
            await gateway.wait_idle()

    run(scenario)


def test_waiting_turn_gets_gateway_messages_after_its_prefill() -> None:
    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port) as gateway:
            await gateway.wait_for_slot()
            first, second = await connect(gateway, "s1"), await connect(gateway, "s2")
            await first.send(PREFILL)
            assert await kinds(first, 2) == ["queue_done", "prefill_done"]
            with pytest.raises(TimeoutError):
                await second.receive_raw(0.2)
            await second.send(PREFILL, GENERATE)
            assert (await second.receive("queued"))["position"] == 1
            await first.send(GENERATE)
            await second.receive_until("queue_done")
            assert await kinds(second, 4) == TURN[1:]
            for client in (first, second):
                await client.close()

    run(scenario)


def test_stop_reaches_the_running_turn_of_its_session() -> None:
    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port) as gateway:
            await gateway.wait_for_slot()
            worker.go.clear()
            client = await connect(gateway)
            await client.send(PREFILL, GENERATE)
            assert await kinds(client, 2) == TURN[:2]
            stopped: dict[str, Any] = (await gateway.http.post("/api/streaming/stop", json={"session_id": "s1"})).json()
            assert stopped == {"success": True, "stopped": ["s1"], "message": "Stopped"}
            assert worker.received[-1] == {"session_id": "s1"}
            other = (await gateway.http.post("/api/streaming/stop", json={"session_id": "s2"})).json()
            assert (other["success"], other["stopped"]) == (False, []), other
            half = (await gateway.http.post("/api/half_duplex/stop", json={"session_id": "s1"})).json()
            assert half["success"] is False, "expected no half-duplex session of this id"
            worker.go.set()
            assert await kinds(client, 3) == TURN[2:]
            await client.close()

    run(scenario)


def test_invalid_messages_between_turns_are_answered() -> None:
    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port) as gateway:
            await gateway.wait_for_slot()
            client = await connect(gateway)
            await client.send("{", b"\x00", "[]", json.dumps({"messages": []}), {"type": 3}, GENERATE, {"type": "stop"})
            codes = [(await client.receive("error"))["code"] for _ in range(6)]
            assert codes == [ErrorCode.BAD_JSON, *[ErrorCode.BAD_MESSAGE] * 5], codes
            await client.send({"session_id": "s1", **PREFILL}, GENERATE)  # the type is not the first field
            assert await kinds(client, 5) == TURN
            await client.close()
            assert not worker.received[0].keys() - PREFILL.keys() - {"clear_kv_cache"}

    run(scenario)


def test_turn_without_generate_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "IDLE_S", 0.3)

    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port) as gateway:
            await gateway.wait_for_slot()
            client = await connect(gateway)
            await client.send(PREFILL)
            assert await kinds(client, 2) == TURN[:2]
            assert "generate" in (await client.receive("error"))["error"]
            await wait_until(lambda: not gateway.gateway.dispatcher.workers.leases, "the slot to be free")
            await client.send(PREFILL, GENERATE)
            await client.receive_until("queue_done")
            assert await kinds(client, 4) == TURN[1:]
            await client.close()

    run(scenario)


def test_client_that_leaves_during_a_turn_frees_the_slot() -> None:
    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port) as gateway:
            await gateway.wait_for_slot()
            worker.go.clear()
            for closes in (True, False):
                client = await connect(gateway)
                await client.send(PREFILL, GENERATE, PREFILL)
                await client.receive_until("queue_done")
                await client.receive("prefill_done")
                if closes:
                    await client.close()
                else:
                    client.abort()
                await gateway.wait_idle()
            assert (await gateway.get("/api/config/eta"))["ema_chat_samples"] == 0

    run(scenario)
