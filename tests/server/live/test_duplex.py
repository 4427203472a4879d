"""The gateway's duplex socket: the queue's messages, what was said early, and the way out."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
import websockets

from benchmarks.serve.fake_worker import FakeWorker
from server.live import duplex
from tests.server.gateways import (
    CHUNK,
    PREPARE,
    STOP,
    Client,
    Running,
    run,
    running_gateway,
    special_worker,
    until,
)
from worker.protocol.codes import ErrorCode

QUEUED = {"type", "position", "estimated_wait_s", "ticket_id", "queue_length", "eta_seconds"}
UPDATE = QUEUED - {"ticket_id"}


async def queued(gateway: Running, name: str = "omni_waits", position: int = 1) -> Client:
    """A client that has been told that it waits."""
    client = await gateway.connect(name)
    first = await client.hear("queued")
    assert first["position"] == position, f"expected place {position}, got {first}"
    return client


def test_a_session_from_open_to_close() -> None:
    async def story() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            client = await gateway.connect()
            await client.say(PREPARE, CHUNK)
            await client.hear("queue_done")
            assert type((await client.hear("prepared"))["prompt_length"]) is int
            assert (await client.hear("result"))["current_time"] == 1
            [task] = (await gateway.get("/status"))["running_tasks"]
            assert (task["units"], task["session_id"], task["worker_id"]) == (1, "omni_me", "worker_0"), task
            await client.say(STOP)
            await client.hear("stopped")
            assert await client.closed() == (1000, "stopped")
            await gateway.clean()
            # The last of several things said counts too when the connection ends with it.
            client = await (await gateway.connect()).prepared()
            await client.say(STOP)
            client.abort()
            await gateway.clean()
            await until(lambda: not worker.sessions, "the worker's slot to be free")

    run(story)


def test_what_is_said_early_is_done_once_and_in_order() -> None:
    async def story() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            first = await (await gateway.connect("first")).prepared()
            early = await gateway.connect("early")
            await early.say(PREPARE, *[CHUNK] * 30)
            await early.hear("queued")
            await first.close()
            await early.until("queue_done")
            await early.hear("prepared")
            units = [(await early.hear("result"))["current_time"] for _ in range(30)]
            assert units == list(range(1, 31)), f"expected units 1 to 30 in order, got {units}"
            await early.say(STOP)
            await early.hear("stopped")
            assert worker.total_requests == 30, f"expected each chunk once, got {worker.total_requests} units"

    run(story)


def test_more_than_may_be_kept_waits_at_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplex, "MAX_EARLY", 100_000)

    async def story() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            first = await (await gateway.connect("first")).prepared()
            early = await queued(gateway)
            big = CHUNK | {"audio_base64": "A" * 40_000}
            saying = asyncio.create_task(early.say(PREPARE, *[big] * 300))
            await until(lambda: gateway.gateway.duplex._store.used > 100_000, "the bound to be reached")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await asyncio.shield(saying)
            used = gateway.gateway.duplex._store.used
            assert used < 200_000, f"expected reading to stop at 100 kB and one message, got {used} bytes"
            await first.close()
            await early.until("queue_done")
            await early.hear("prepared")
            for expected in range(1, 301):
                assert (await early.hear("result"))["current_time"] == expected
            await saying

    run(story)


def test_who_waits_is_told_where(monkeypatch: pytest.MonkeyPatch) -> None:
    assert duplex.UPDATE_S < 3, f"expected news at least every 3 s, got every {duplex.UPDATE_S}"
    monkeypatch.setattr(duplex, "UPDATE_S", 0.2)

    async def story() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            await (await gateway.connect("first")).seated()
            client = await gateway.connect()
            first = await client.hear("queued", 1)
            assert first.keys() == QUEUED, f"expected {QUEUED}, got {first.keys()}"
            assert (first["position"], first["queue_length"]) == (1, 1), first
            assert first["ticket_id"][:2] == "q_" and int(first["ticket_id"][2:], 16) >= 0, first
            assert len(first["ticket_id"]) == 14, first
            waits = [first["estimated_wait_s"]]
            for _ in range(4):
                update = await client.hear("queue_update")
                assert update.keys() == UPDATE, f"expected {UPDATE}, got {update.keys()}"
                assert update["estimated_wait_s"] == update["eta_seconds"] == round(update["eta_seconds"], 1)
                waits.append(update["estimated_wait_s"])
            assert waits == sorted(waits, reverse=True) and waits[-1] < waits[0], f"expected a countdown, got {waits}"
            assert 80 < waits[0] <= 90, f"expected what omni sessions take, got {waits[0]}"
            found = await gateway.get(f"/api/queue/{first['ticket_id']}")
            assert found["found"] and found["ticket"]["position"] == 1, found
            assert not (await gateway.get("/api/queue/q_nothing"))["found"]

    run(story)


def test_places_change_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplex, "UPDATE_S", 60)

    async def story() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            first = await (await gateway.connect("first")).seated()
            waiting = [await queued(gateway, f"omni_{i}", i + 1) for i in range(4)]
            waiting.pop(0).abort()
            places = [(await client.hear("queue_update"))["position"] for client in waiting]
            assert places == [1, 2, 3], f"expected all to move up, got {places}"
            await waiting.pop(1).close()
            assert (await waiting[1].hear("queue_update"))["position"] == 2
            assert (await waiting[0].hear("queue_update"))["queue_length"] == 2
            await first.close()
            await waiting[0].hear("queue_done")
            assert (await waiting[1].hear("queue_update"))["position"] == 1
            assert len((await gateway.get("/api/queue"))["items"]) == 1

    run(story)


def test_a_ticket_taken_out_of_the_queue() -> None:
    async def story() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            await (await gateway.connect("first")).seated()
            client = await gateway.connect()
            path = f"/api/queue/{(await client.hear('queued'))['ticket_id']}"
            assert (await gateway.http.delete(path)).json() == {"success": True}
            error = await client.until("error")
            assert error["code"] == ErrorCode.CANCELLED and error["error"] == error["message"], error
            assert (await client.closed())[0] == 1013
            assert (await gateway.http.delete(path)).json() == {"success": False}

    run(story)


def test_a_full_queue() -> None:
    async def story() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker, max_queue_size=2) as gateway:
            first = await (await gateway.connect("first")).seated()
            waiting = [await queued(gateway, f"omni_{i}", i + 1) for i in range(2)]
            late = await gateway.connect("late")
            error = await late.hear("error")
            assert (error["error"], error["code"]) == ("Queue full (2 requests)", ErrorCode.QUEUE_FULL), error
            assert await late.closed() == (1013, "Queue full")
            await first.close()
            await waiting[0].until("queue_done")
            await queued(gateway, "omni_again", 2)

    run(story)


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
def test_names_and_kinds(given: str, session_id: str, request_type: str) -> None:
    async def story() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            seated = await (await gateway.connect(given)).prepared()
            assert list(worker.sessions) == [session_id], f"expected {session_id}, got {list(worker.loop.sessions)}"
            [task] = (await gateway.get("/status"))["running_tasks"]
            assert (task["request_type"], task["session_id"]) == (request_type, session_id), task
            await queued(gateway, given)
            body = await gateway.get("/api/queue")
            [item] = body["items"]
            assert (item["request_type"], item["session_id"]) == (request_type, session_id), item
            assert body["running_tasks"][0]["request_type"] == request_type
            await seated.close()

    run(story)


def test_reports_stay_with_the_gateway(tmp_path: Path) -> None:
    async def story() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker, reports=tmp_path) as gateway:
            client = await (await gateway.connect("omni_..x")).prepared()
            await client.say({"type": "client_diagnostic", "event": "gap", "text": "é\n"}, CHUNK)
            await client.hear("result")
            await client.say('{"type": "client_diagnostic"', CHUNK | {"note": "client_diagnostic"})
            assert (await client.hear("error"))["code"] == ErrorCode.BAD_JSON
            await client.hear("result")
            path = tmp_path / "diag_omni___x.jsonl"
            await until(path.exists, "a report on disk")
            await until(lambda: path.read_text().endswith("\n"), "a whole line")
            [line] = path.read_text().splitlines()
            report = json.loads(line)
            assert (report["event"], report["text"]) == ("gap", "é\n"), report
            assert report["_server_recv_ts"] > 1e9, report
            await client.say(*[{"type": "client_diagnostic", "text": "x" * 60_000}] * 40)
            await client.unit()
            await until(lambda: not gateway.gateway.duplex._diagnostics._writing, "all to be written")
            assert path.stat().st_size < 2**21, f"expected about a megabyte at most, got {path.stat().st_size}"

    run(story)


def test_pages_from_elsewhere_are_refused() -> None:
    async def story() -> None:
        settings = {"allowed_origins": ("https://talk.example.org/",)}
        async with FakeWorker(slots=9) as worker, running_gateway(worker, **settings) as gateway:
            own = f"127.0.0.1:{gateway.port}"
            for origin in (f"http://{own}", f"HTTPS://{own}", "https://talk.example.org", None):
                await (await gateway.connect(origin=origin)).seated()
            foreign = "https://evil.example.org", "null", "http://127.0.0.1:1", f"http://{own}.evil.org", "http://[", ""
            for origin in foreign:
                with pytest.raises(websockets.InvalidStatus) as refused:
                    await gateway.connect(origin=origin)
                assert refused.value.response.status_code == 403, f"{origin!r}: expected 403"
            answer = await gateway.http.delete("/api/queue/q_1", headers={"Origin": foreign[0]})
            assert answer.status_code == 403, f"expected a foreign page to change nothing, got {answer}"
            assert isinstance(await gateway.http.get("/status", headers={"Origin": foreign[0]}), httpx.Response)

    run(story)


def test_more_sessions_than_slots_over_two_workers() -> None:
    async def story() -> None:
        async with (
            FakeWorker(slots=2) as small,
            FakeWorker(slots=4) as large,
            running_gateway(small, large) as gateway,
        ):
            most = [0, 0]

            async def talk(name: str) -> None:
                client = await gateway.connect(name)
                await client.say(PREPARE)
                await client.until("queue_done")
                await client.hear("prepared")
                for i, worker in enumerate((small, large)):
                    most[i] = max(most[i], len(worker.sessions))
                for expected in range(1, 4):
                    assert (await client.unit())["current_time"] == expected
                await client.say(STOP)
                await client.hear("stopped")

            await asyncio.gather(*(talk(f"omni_{i}") for i in range(24)))
            assert small.total_requests + large.total_requests == 72
            assert most == [2, 4], f"expected all slots of both to be used, got {most}"
            await gateway.clean()
            measured = (await gateway.get("/api/config/eta"))["ema_omni_duplex_samples"]
            assert measured == 24, f"expected all sessions to be measured, got {measured}"

    run(story)


def test_sessions_beside_the_gateway_are_respected() -> None:
    async def story() -> None:
        async with FakeWorker(slots=2) as worker, running_gateway(worker) as gateway:
            url = f"ws://127.0.0.1:{worker.port}/ws/duplex?session_id=direct"
            async with websockets.connect(url):
                workers = gateway.gateway.dispatcher.workers
                await until(lambda: workers.n_free == 1, "one slot of two to be seen as free")
                seated = await (await gateway.connect()).prepared()
                waiting = await queued(gateway)
                assert sorted(worker.sessions) == ["direct", "omni_me"]
            await waiting.until("queue_done")
            await seated.unit()

    run(story)


def test_a_worker_that_turns_out_to_be_full_is_tried_again() -> None:
    """Its slot went to somebody who came past the gateway, between two of the gateway's questions."""

    async def story() -> None:
        refused = 0

        async def talk(connection: websockets.ServerConnection) -> None:
            await connection.wait_closed()

        async with special_worker(talk, slots=1) as port, running_gateway(port) as gateway:
            workers = gateway.gateway.dispatcher.workers
            await until(lambda: workers.n_free == 1, "a slot")

            async def refuse(*_: object) -> None:
                nonlocal refused
                refused += 1
                raise duplex.WorkerRefusedError("worker_0", expected="a free slot", got="HTTP 403")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(duplex, "open_link", refuse)
                client = await gateway.connect()
                first = await client.hear("queued")
                assert first["position"] == 1, first
                await until(lambda: refused >= 2, "a second try once the worker has answered anew")
            await client.until("queue_done")

    run(story)


def test_a_fault_of_ours_ends_one_session_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with FakeWorker(slots=2) as worker, running_gateway(worker) as gateway:
            other = await (await gateway.connect("other")).prepared()

            async def fail(*_: object) -> None:
                raise LookupError("nobody thought of this")

            monkeypatch.setattr(duplex, "open_link", fail)
            client = await gateway.connect()
            error = await client.hear("error")
            assert (error["code"], error["error"]) == (ErrorCode.INTERNAL, "nobody thought of this"), error
            assert (await client.closed())[0] == 1011
            assert (await gateway.get("/status"))["slots"]["leased"] == 1
            await other.unit()

    run(story)
