"""Workers that crash, hang, load and restart, and clients that disconnect at any time."""

import asyncio
import errno
import gc
import logging
import time

import httpx
import psutil
import pytest

from benchmarks.serve.fake_worker import FakeWorker
from server.dispatch.dispatcher import Dispatcher
from server.dispatch.eta import Eta, EtaConfig
from server.dispatch.queue import Queue
from server.dispatch.workers import WorkerAddress, Workers
from server.live import worker_link
from tests.server.live_gateway import (
    CHUNK,
    PREPARE,
    SOON_S,
    STOP,
    Client,
    RunningGateway,
    run,
    running_gateway,
    wait_until,
)
from worker.protocol.codes import ErrorCode

MB = 2**20


async def expect_worker_lost(client: Client, seconds: float) -> None:
    """The client gets `worker_lost` and close code 1011 within so many seconds."""
    error = await client.receive("error", seconds)
    assert error["code"] == ErrorCode.WORKER_LOST and error["error"], error
    assert (await client.wait_closed(seconds))[0] == 1011, client.socket.close_code


async def prepared_on(worker: FakeWorker, gateway: RunningGateway, name: str) -> Client:
    """A prepared session that runs on this worker."""
    client = await (await gateway.connect(name)).prepared()
    assert name in worker.sessions, f"expected {name} on worker {worker.port}, got {worker.loop.sessions}"
    return client


def test_worker_crash_ends_only_its_sessions() -> None:
    async def scenario() -> None:
        async with (
            FakeWorker(1, think_s=30) as first,
            FakeWorker(1) as second,
            running_gateway(first, second) as gateway,
        ):
            mine, other = await prepared_on(first, gateway, "mine"), await prepared_on(second, gateway, "other")
            waiting = await gateway.connect("waiting")
            await waiting.send(PREPARE, CHUNK)
            await waiting.receive("queued")
            await mine.send(CHUNK)
            await wait_until(lambda: first.sessions, "the unit to run")
            first.crash()
            await expect_worker_lost(mine, 5)
            await other.unit()
            await other.close()
            await waiting.receive_until("queue_done")
            await waiting.receive("prepared")
            await waiting.receive("result")
            await wait_until(lambda: gateway.gateway.dispatcher.workers.n_slots == 1, "the loss to be detected")
            assert (await gateway.get("/status"))["offline_workers"] == 1
            text = (await gateway.http.get("/metrics")).text
            assert 'workers_lost_total{worker="worker_0"} 1.0' in text, "expected one loss to be counted"

    run(scenario)


def test_hanging_worker_is_lost_after_timeout() -> None:
    async def scenario() -> None:
        async with (
            FakeWorker(2) as first,
            FakeWorker(1) as second,
            running_gateway(first, second, worker_timeout_s=1.0) as gateway,
        ):
            mine, other = await prepared_on(first, gateway, "mine"), await prepared_on(second, gateway, "other")
            await mine.send(CHUNK)
            await mine.receive("result")
            since = time.monotonic()
            first.freeze()
            await expect_worker_lost(mine, 10)
            took = time.monotonic() - since
            assert took > 0.9, f"expected about a second and the time of a poll, got {took:.1f} s"
            await other.unit()
            waiting = await gateway.connect("waiting")
            await waiting.receive("queued")
            first.thaw()
            await waiting.prepared()
            await waiting.unit()
            await wait_until(lambda: list(first.sessions) == ["waiting"], "the lost session to be gone")

    run(scenario)


def test_briefly_slow_worker_keeps_its_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new session gets a slot of another worker; the slow worker's own session continues."""
    monkeypatch.setattr(worker_link, "PROBE_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        async with (
            FakeWorker(3) as first,
            FakeWorker(2) as second,
            running_gateway(first, second, worker_timeout_s=30.0) as gateway,
        ):
            mine, _ = await prepared_on(first, gateway, "mine"), await prepared_on(second, gateway, "other")
            first.freeze()
            await mine.send(CHUNK)
            third = await (await gateway.connect("third")).prepared()
            assert "third" in second.sessions, second.sessions
            await third.unit()
            waiting = await gateway.connect("waiting")
            await waiting.receive("queued")
            first.thaw()
            assert (await mine.receive("result"))["current_time"] == 1
            await waiting.prepared()
            assert "waiting" in first.sessions, first.sessions

    run(scenario)


def test_gateway_without_file_descriptors_keeps_its_sessions() -> None:
    """Health polls fail, but open sessions continue."""

    async def scenario() -> None:
        n_failed = 0

        def fail(_: httpx.Request) -> httpx.Response:
            nonlocal n_failed
            n_failed += 1
            try:
                raise OSError(errno.EMFILE, "Too many open files")
            except OSError as error:
                raise httpx.ConnectError("All connection attempts failed") from error

        async with FakeWorker(2) as worker, running_gateway(worker, worker_timeout_s=30.0) as gateway:
            client = await (await gateway.connect("mine")).prepared()
            watch, slots = gateway.watch, gateway.gateway.sockets._slots
            http = slots.http
            async with httpx.AsyncClient(transport=httpx.MockTransport(fail), verify=False) as failing:
                watch._http = slots.http = failing
                waiting = await gateway.connect("waiting")
                await waiting.receive("queued")
                await wait_until(lambda: n_failed >= 3, "several polls to fail")
                await client.unit()
                watch._http = slots.http = http
                await waiting.prepared()

    run(scenario)


def test_worker_that_hangs_in_handshake_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker answers the probe and then hangs."""
    monkeypatch.setattr(worker_link, "OPEN_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        async with FakeWorker(3) as first, FakeWorker(1) as second, running_gateway(first, second) as gateway:

            async def answers(*_: object) -> None:
                first.freeze()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(worker_link, "probe", answers)
                client = await gateway.connect()
                await client.with_slot()
            assert list(second.sessions) == ["omni_me"], second.sessions
            first.thaw()
            await wait_until(lambda: not first.sessions, "the slot of the broken handshake")

    run(scenario)


def test_crash_before_next_poll_moves_sessions_to_other_worker() -> None:
    async def scenario() -> None:
        async with FakeWorker(4) as first, FakeWorker(2) as second, running_gateway(first, second) as gateway:
            first.crash()
            clients = [await gateway.connect(f"c{i}") for i in range(5)]
            for client in clients:
                await client.send(PREPARE, CHUNK)
            for i, client in enumerate(clients):
                await client.receive_until("queue_done")
                await client.receive("prepared")
                await client.receive("result")
                assert f"c{i}" in second.sessions, f"expected c{i} to be next, got {second.sessions}"
                await client.close()

    run(scenario)


def test_queue_survives_loss_of_all_workers() -> None:
    async def scenario() -> None:
        async with FakeWorker(1) as first, FakeWorker(1) as second, running_gateway(first, second) as gateway:
            first.crash()
            second.crash()
            clients = [await gateway.connect(f"c{i}") for i in range(3)]
            for client in clients:
                await client.receive("queued")
            items = (await gateway.get("/api/queue"))["items"]
            assert [item["session_id"] for item in items] == ["c0", "c1", "c2"], f"expected the order, got {items}"
            assert (await gateway.http.get("/readyz")).status_code == 503
            async with FakeWorker(1, port=second.port) as again:
                for i in range(3):
                    await clients[i].prepared()
                    assert list(again.sessions) == [f"c{i}"], f"expected c{i} to be next, got {again.sessions}"
                    await clients[i].unit()
                    await clients[i].send(STOP)
                    await clients[i].receive("stopped")

    run(scenario)


@pytest.mark.parametrize("state", ["LOADING", "COMPILING", "WARMING_UP", "FAILED", "UNLOADED", "DRAINING"])
def test_worker_that_is_not_ready_gets_no_session(state: str) -> None:
    async def scenario() -> None:
        async with FakeWorker(1) as worker:
            worker.state = state
            async with running_gateway(worker) as gateway:
                client = await gateway.connect()
                assert (await client.receive("queued"))["estimated_wait_s"] == 0
                await wait_until(lambda: gateway.gateway.dispatcher.workers.all[0].health, "an answer")
                [info] = (await gateway.get("/workers"))["workers"]
                assert (info["state"], info["slots"]["total"]) == (state, 0), info
                worker.state = "IDLE"
                await client.prepared()
                await client.unit()

    run(scenario)


def test_draining_worker_keeps_its_sessions() -> None:
    async def scenario() -> None:
        async with FakeWorker(2) as worker, running_gateway(worker) as gateway:
            client = await (await gateway.connect("active")).prepared()
            worker.state = "DRAINING"
            late = await gateway.connect("late")
            await late.receive("queued")
            await client.unit()
            await late.close()
            await client.send(STOP)
            await client.receive("stopped")
            await gateway.wait_idle()

    run(scenario)


def test_worker_that_refuses_in_handshake_is_retried() -> None:
    """The client gets no `queue_done` for the refused slot."""

    async def scenario() -> None:
        async with FakeWorker(1) as worker, running_gateway(worker) as gateway:
            worker.state = "LOADING"  # the gateway has not polled it since
            client = await gateway.connect()
            await client.receive("queued")
            worker.state = "IDLE"
            await client.prepared()

    run(scenario)


# --- many clients that disconnect --------------------------------------------------------------------


async def disconnect_at_once(gateway: RunningGateway, i: int) -> None:
    (await gateway.connect(f"s{i}")).abort()


async def close_at_once(gateway: RunningGateway, i: int) -> None:
    await (await gateway.connect(f"s{i}")).close()


async def disconnect_in_unit(gateway: RunningGateway, i: int) -> None:
    client = await gateway.connect(f"s{i}")
    await client.send(PREPARE, *[CHUNK] * 3)
    await client.receive_until("queue_done")
    await client.receive("prepared")
    client.abort()


async def stop_and_close(gateway: RunningGateway, i: int) -> None:
    client = await gateway.connect(f"s{i}")
    await client.send(PREPARE, CHUNK, STOP)
    await client.close()


async def disconnect_in_handshake(gateway: RunningGateway, i: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = f"GET /ws/duplex/s{i} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    head += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    writer.write(head.encode()[: (20, 80, 1000)[i % 3]])
    if i % 2:
        await writer.drain()
    writer.transport.abort()


async def send_invalid_frame(gateway: RunningGateway, i: int) -> None:
    client = await gateway.connect(f"s{i}")
    client.socket.transport.write(b"\xff" * 40)
    await client.wait_closed()


WAYS_TO_LEAVE = (
    disconnect_at_once,
    close_at_once,
    disconnect_in_unit,
    stop_and_close,
    disconnect_in_handshake,
    send_invalid_frame,
)


def test_disconnecting_clients_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with (
            FakeWorker(2, think_s=0.01) as first,
            FakeWorker(3) as second,
            running_gateway(first, second) as gateway,
        ):

            async def connect_clients(n: int) -> None:
                limit = asyncio.Semaphore(25)

                async def one(i: int) -> None:
                    async with limit:
                        await WAYS_TO_LEAVE[i % len(WAYS_TO_LEAVE)](gateway, i)

                await asyncio.gather(*(one(i) for i in range(n)))
                await gateway.wait_idle()
                await wait_until(lambda: not first.sessions and not second.sessions, "the workers' slots")

            await connect_clients(30)
            await gateway.get("/status")
            gc.collect()
            await wait_until(lambda: len(asyncio.all_tasks()) <= 10, "an idle gateway")
            n_tasks, before = len(asyncio.all_tasks()), psutil.Process().memory_info().rss
            await connect_clients(210)
            end = time.monotonic() + SOON_S
            # The number of free slots is from the last health poll.
            while (status := await gateway.get("/status"))["slots"]["free"] < 5 and time.monotonic() < end:
                await asyncio.sleep(0.05)
            assert status["slots"] == {"total": 5, "free": 5, "leased": 0}, status
            assert (status["queue_length"], status["connections"], status["running_tasks"]) == (0, 0, []), status
            await wait_until(lambda: len(asyncio.all_tasks()) <= n_tasks, f"{n_tasks} tasks as before")
            gc.collect()
            grown = (psutil.Process().memory_info().rss - before) / MB
            assert grown < 30, f"expected growth below 30 MB, got {grown:.0f} MB"
            await (await gateway.connect()).prepared()

    with caplog.at_level(logging.ERROR):
        run(scenario)
    errors = [record for record in caplog.records if record.name.startswith(("server", "uvicorn", "asyncio"))]
    errors = [record for record in errors if record.levelno >= logging.ERROR]
    assert not errors, f"expected no errors in the log, got {[record.getMessage() for record in errors][:3]}"


def test_positions_are_computed_once_for_all_waiting_clients() -> None:
    """Each change is sent to all waiting clients, so the cost of one update must not grow with their number."""

    async def scenario() -> None:
        n = 1000
        workers = Workers([WorkerAddress("127.0.0.1", 1)])
        workers.record_health(workers.all[0], {"state": "IDLE", "slots": {"total": 1, "free": 1}})
        dispatcher = Dispatcher(workers, Queue(n), Eta(EtaConfig()))
        sessions = [dispatcher.submit("omni_duplex", "x") for _ in range(n + 1)]
        calls = 0
        positions = dispatcher.positions

        def counted() -> dict:
            nonlocal calls
            calls += 1
            return positions()

        dispatcher.positions = counted
        dispatcher.finish(sessions[0])
        got = [dispatcher.position_of(pending).position for pending in sessions[2:]]
        assert got == list(range(1, n)), "expected each client's own position"
        assert calls < 20, f"expected one calculation for all of them, got {calls}"

    run(scenario)
