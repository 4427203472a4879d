"""The gateway's duplex socket: messages about the queue, early messages, and closing."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
import websockets

from benchmarks.serve.fake_worker import FakeWorker
from server.live import slot_wait, sockets, worker_link
from tests.server.live_gateway import (
    CHUNK,
    PREPARE,
    STOP,
    Client,
    RunningGateway,
    run,
    running_gateway,
    scripted_worker,
    wait_until,
)
from worker.protocol.codes import ErrorCode
from worker.status import State

QUEUED = {"type", "reason", "position", "estimated_wait_s", "ticket_id", "queue_length", "eta_seconds"}
UPDATE = QUEUED - {"ticket_id"}


async def queued(gateway: RunningGateway, name: str = "omni_waits", position: int = 1) -> Client:
    """A client that received `queued` with this position."""
    client = await gateway.connect(name)
    first = await client.receive("queued")
    assert first["position"] == position, f"expected position {position}, got {first}"
    return client


def test_session_from_open_to_close() -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            client = await gateway.connect()
            await client.send(PREPARE, CHUNK)
            await client.receive("queue_done")
            assert type((await client.receive("prepared"))["prompt_length"]) is int
            assert (await client.receive("result"))["current_time"] == 1
            [task] = (await gateway.get("/status"))["running_tasks"]
            assert (task["units"], task["session_id"], task["worker_id"]) == (1, "omni_me", "worker_0"), task
            await client.send(STOP)
            await client.receive("stopped")
            assert await client.wait_closed() == (1000, "stopped")
            await gateway.wait_idle()
            # `stop` is forwarded even if the connection ends right after it.
            client = await (await gateway.connect()).prepared()
            await client.send(STOP)
            client.abort()
            await gateway.wait_idle()
            await wait_until(lambda: not worker.sessions, "the worker's slot to be free")

    run(scenario)


def test_early_messages_are_processed_once_and_in_order() -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            first = await (await gateway.connect("first")).prepared()
            early = await gateway.connect("early")
            await early.send(PREPARE, *[CHUNK] * 30)
            await early.receive("queued")
            await first.close()
            await early.receive_until("queue_done")
            await early.receive("prepared")
            units = [(await early.receive("result"))["current_time"] for _ in range(30)]
            assert units == list(range(1, 31)), f"expected units 1 to 30 in order, got {units}"
            await early.send(STOP)
            await early.receive("stopped")
            assert worker.total_requests == 30, f"expected each chunk once, got {worker.total_requests} units"

    run(scenario)


def test_reading_stops_when_buffer_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_BUFFERED", 100_000)

    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            first = await (await gateway.connect("first")).prepared()
            early = await queued(gateway)
            big = CHUNK | {"audio_base64": "A" * 40_000}
            sending = asyncio.create_task(early.send(PREPARE, *[big] * 300))
            await wait_until(lambda: gateway.gateway.sockets.buffered_bytes > 100_000, "the bound to be reached")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await asyncio.shield(sending)
            used = gateway.gateway.sockets.buffered_bytes
            assert used < 200_000, f"expected reading to stop after 100 kB and one message, got {used} bytes"
            await first.close()
            await early.receive_until("queue_done")
            await early.receive("prepared")
            for expected in range(1, 301):
                assert (await early.receive("result"))["current_time"] == expected
            await sending

    run(scenario)


def test_waiting_client_gets_position_and_countdown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slot_wait.UPDATE_S < 3, f"expected an update at least every 3 s, got every {slot_wait.UPDATE_S}"
    monkeypatch.setattr(slot_wait, "UPDATE_S", 0.2)

    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            await (await gateway.connect("first")).with_slot()
            client = await gateway.connect()
            first = await client.receive("queued")
            assert first.keys() == QUEUED, f"expected {QUEUED}, got {first.keys()}"
            assert (first["position"], first["queue_length"]) == (1, 1), first
            assert first["ticket_id"][:2] == "q_" and int(first["ticket_id"][2:], 16) >= 0, first
            assert len(first["ticket_id"]) == 34, first
            waits = [first["estimated_wait_s"]]
            for _ in range(4):
                update = await client.receive("queue_update")
                assert update.keys() == UPDATE, f"expected {UPDATE}, got {update.keys()}"
                assert update["estimated_wait_s"] == update["eta_seconds"] == round(update["eta_seconds"], 1)
                waits.append(update["estimated_wait_s"])
            assert waits == sorted(waits, reverse=True) and waits[-1] < waits[0], f"expected a countdown, got {waits}"
            assert 80 < waits[0] <= 90, f"expected the duration of omni sessions, got {waits[0]}"
            found = await gateway.get(f"/api/queue/{first['ticket_id']}")
            assert found["found"] and found["ticket"]["position"] == 1, found
            assert not (await gateway.get("/api/queue/q_nothing"))["found"]

    run(scenario)


def test_positions_are_updated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_wait, "UPDATE_S", 60)

    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            first = await (await gateway.connect("first")).with_slot()
            waiting = [await queued(gateway, f"omni_{i}", i + 1) for i in range(4)]
            waiting.pop(0).abort()
            positions = [(await client.receive("queue_update"))["position"] for client in waiting]
            assert positions == [1, 2, 3], f"expected all to move up, got {positions}"
            await waiting.pop(1).close()
            assert (await waiting[1].receive("queue_update"))["position"] == 2
            assert (await waiting[0].receive("queue_update"))["queue_length"] == 2
            await first.close()
            await waiting[0].receive("queue_done")
            assert (await waiting[1].receive("queue_update"))["position"] == 1
            assert len((await gateway.get("/api/queue"))["items"]) == 1

    run(scenario)


def test_cancelled_ticket_closes_connection() -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            await (await gateway.connect("first")).with_slot()
            client = await gateway.connect()
            path = f"/api/queue/{(await client.receive('queued'))['ticket_id']}"
            assert (await gateway.http.delete(path)).json() == {"success": True}
            error = await client.receive_until("error")
            assert error["code"] == ErrorCode.CANCELLED and error["error"] == error["message"], error
            assert (await client.wait_closed())[0] == 1013
            assert (await gateway.http.delete(path)).json() == {"success": False}

    run(scenario)


def test_full_queue_refuses_client() -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker, max_queue_size=2) as gateway:
            first = await (await gateway.connect("first")).with_slot()
            waiting = [await queued(gateway, f"omni_{i}", i + 1) for i in range(2)]
            late = await gateway.connect("late")
            error = await late.receive("error")
            assert (error["error"], error["code"]) == ("Queue full (2 requests)", ErrorCode.QUEUE_FULL), error
            assert await late.wait_closed() == (1013, "Queue full")
            await first.close()
            await waiting[0].receive_until("queue_done")
            await queued(gateway, "omni_again", 2)

    run(scenario)


@pytest.mark.parametrize(
    ("given", "session_id", "request_type"),
    [
        ("omni_a-B_9", "omni_a-B_9", "omni_duplex"),
        ("adx_1", "adx_1", "audio_duplex"),
        ("audio_duplex_1", "audio_duplex_1", "audio_duplex"),
        ("d1", "d1", "omni_duplex"),
        ("..%5C%00%C3%A9;x", "______x", "omni_duplex"),
        ("x" * 1000, "x" * 128, "omni_duplex"),
    ],
)
def test_session_id_and_request_type(given: str, session_id: str, request_type: str) -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            active = await (await gateway.connect(given)).prepared()
            assert list(worker.sessions) == [session_id], f"expected {session_id}, got {list(worker.loop.sessions)}"
            [task] = (await gateway.get("/status"))["running_tasks"]
            assert (task["request_type"], task["session_id"]) == (request_type, session_id), task
            await queued(gateway, given)
            body = await gateway.get("/api/queue")
            [item] = body["items"]
            assert (item["request_type"], item["session_id"]) == (request_type, session_id), item
            assert body["running_tasks"][0]["request_type"] == request_type
            await active.close()

    run(scenario)


def test_diagnostics_are_stored_and_not_forwarded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker, reports=tmp_path) as gateway:
            client = await (await gateway.connect("omni_..x")).prepared()
            await client.send({"type": "client_diagnostic", "event": "gap", "text": "é\n"}, CHUNK)
            await client.receive("result")
            await client.send('{"type": "client_diagnostic"', CHUNK | {"note": "client_diagnostic"})
            assert (await client.receive("error"))["code"] == ErrorCode.BAD_JSON
            await client.receive("result")
            path = tmp_path / "diag_omni___x.jsonl"
            await wait_until(path.exists, "a report on disk")
            await wait_until(lambda: path.read_text().endswith("\n"), "a whole line")
            [line] = path.read_text().splitlines()
            report = json.loads(line)
            assert (report["event"], report["text"]) == ("gap", "é\n"), report
            assert report["_server_recv_ts"] > 1e9, report
            await client.send(*[{"type": "client_diagnostic", "text": "x" * 60_000}] * 40)
            await client.unit()
            await wait_until(lambda: not gateway.gateway.sockets._diagnostics.n_writing, "all reports to be written")
            assert path.stat().st_size < 2**21, f"expected about a megabyte at most, got {path.stat().st_size}"

    run(scenario)


def test_sessions_of_one_id_have_diagnostics_of_their_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=2) as worker, running_gateway(worker, reports=tmp_path) as gateway:
            clients = [await (await gateway.connect("omni_x")).prepared() for _ in range(2)]
            for number, client in enumerate(clients):
                await client.send({"type": "client_diagnostic", "number": number}, CHUNK)
                await client.receive("result")

            def written() -> list[str]:
                return [line for path in tmp_path.glob("diag_omni_x*.jsonl") for line in path.read_text().splitlines()]

            await wait_until(lambda: len(written()) == 2, "two reports on disk")
            files = sorted(path.name for path in tmp_path.iterdir())
            assert len(files) == 2 and "diag_omni_x.jsonl" in files, files
            assert json.loads((tmp_path / "diag_omni_x.jsonl").read_text())["number"] == 0

    run(scenario)


def test_foreign_origins_are_refused() -> None:
    async def scenario() -> None:
        settings = {"allowed_origins": ("https://talk.example.org/",)}
        async with FakeWorker(slots=9) as worker, running_gateway(worker, **settings) as gateway:
            own = f"127.0.0.1:{gateway.port}"
            for origin in (f"http://{own}", f"HTTPS://{own}", "https://talk.example.org", None):
                await (await gateway.connect(origin=origin)).with_slot()
            foreign = "https://evil.example.org", "null", "http://127.0.0.1:1", f"http://{own}.evil.org", "http://[", ""
            for origin in foreign:
                with pytest.raises(websockets.InvalidStatus) as refused:
                    await gateway.connect(origin=origin)
                assert refused.value.response.status_code == 403, f"{origin!r}: expected 403"
            answer = await gateway.http.delete("/api/queue/q_1", headers={"Origin": foreign[0]})
            assert answer.status_code == 403, f"expected 403 for a foreign page, got {answer}"
            assert isinstance(await gateway.http.get("/status", headers={"Origin": foreign[0]}), httpx.Response)

    run(scenario)


def test_many_sessions_use_all_slots_of_two_workers() -> None:
    async def scenario() -> None:
        async with (
            FakeWorker(slots=2) as small,
            FakeWorker(slots=4) as large,
            running_gateway(small, large) as gateway,
        ):
            peak = [0, 0]

            async def talk(name: str) -> None:
                client = await gateway.connect(name)
                await client.send(PREPARE)
                await client.receive_until("queue_done")
                await client.receive("prepared")
                for i, worker in enumerate((small, large)):
                    peak[i] = max(peak[i], len(worker.sessions))
                for expected in range(1, 4):
                    assert (await client.unit())["current_time"] == expected
                await client.send(STOP)
                await client.receive("stopped")

            await asyncio.gather(*(talk(f"omni_{i}") for i in range(24)))
            assert small.total_requests + large.total_requests == 72
            assert peak == [2, 4], f"expected all slots of both to be used, got {peak}"
            await gateway.wait_idle()
            measured = (await gateway.get("/api/config/eta"))["ema_omni_duplex_samples"]
            assert measured == 24, f"expected all sessions to be measured, got {measured}"

    run(scenario)


def test_sessions_of_other_clients_of_the_worker_count() -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=2) as worker, running_gateway(worker) as gateway:
            url = f"ws://127.0.0.1:{worker.port}/ws/duplex?session_id=direct"
            async with websockets.connect(url):
                workers = gateway.gateway.dispatcher.workers
                await wait_until(lambda: workers.n_free == 1, "one of two slots to be free")
                active = await (await gateway.connect()).prepared()
                waiting = await queued(gateway)
                assert sorted(worker.sessions) == ["direct", "omni_me"]
            await waiting.receive_until("queue_done")
            await active.unit()

    run(scenario)


def test_refused_session_waits_and_is_retried() -> None:
    """A client that does not use the gateway took the slot between two health polls."""

    async def scenario() -> None:
        refused = 0

        async def talk(connection: websockets.ServerConnection) -> None:
            await connection.wait_closed()

        async with scripted_worker(talk, slots=1) as port, running_gateway(port) as gateway:
            workers = gateway.gateway.dispatcher.workers
            await wait_until(lambda: workers.n_free == 1, "a slot")

            async def refuse(*_: object, **__: object) -> None:
                nonlocal refused
                refused += 1
                raise worker_link.WorkerRefusedError("worker_0", expected="a free slot", got="HTTP 403")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sockets, "open_link", refuse)
                client = await gateway.connect()
                first = await client.receive("queued")
                assert first["position"] == 1, first
                await wait_until(lambda: refused >= 2, "a second try after the next health poll")
            await client.receive_until("queue_done")

    run(scenario)


def test_internal_error_ends_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=2) as worker, running_gateway(worker) as gateway:
            other = await (await gateway.connect("other")).prepared()

            async def fail(*_: object, **__: object) -> None:
                raise LookupError("unexpected")

            monkeypatch.setattr(sockets, "open_link", fail)
            client = await gateway.connect()
            error = await client.receive("error")
            assert (error["code"], error["error"]) == (ErrorCode.INTERNAL, "unexpected"), error
            assert (await client.wait_closed())[0] == 1011
            assert (await gateway.get("/status"))["slots"]["leased"] == 1
            await other.unit()

    run(scenario)


def test_waiting_client_learns_that_workers_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_wait, "UPDATE_S", 0.1)

    async def scenario() -> None:
        async with FakeWorker() as first, FakeWorker() as second, running_gateway(first, second) as gateway:
            workers = gateway.gateway.dispatcher.workers
            first.state, second.state = State.LOADING, State.WARMING_UP
            await wait_until(lambda: not workers.n_ready, "no ready worker")
            client = await gateway.connect()
            message = await client.receive("queued")
            assert (message["reason"], message["estimated_wait_s"]) == ("loading", 0.0), message
            assert message["progress"].keys() == {"what", "done", "total"}, message
            first.crash()
            second.crash()
            async with asyncio.timeout(10):
                while (message := await client.receive("queue_update"))["reason"] != "no_worker":
                    pass
            assert "progress" not in message, message

    run(scenario)
