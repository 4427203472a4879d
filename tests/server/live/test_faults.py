"""Workers that crash, hang, load and come back, clients that go away at any moment: who suffers, who does not."""

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
from tests.server.gateways import (
    CHUNK,
    PREPARE,
    SOON_S,
    STOP,
    Client,
    Running,
    run,
    running_gateway,
    until,
)
from worker.protocol.codes import ErrorCode

MB = 2**20


async def lost(client: Client, seconds: float) -> None:
    """It is told that its worker is gone, within so many seconds."""
    error = await client.hear("error", seconds)
    assert error["code"] == ErrorCode.WORKER_LOST and error["error"], error
    assert (await client.closed(seconds))[0] == 1011, client.socket.close_code


async def on(worker: FakeWorker, gateway: Running, name: str) -> Client:
    """A prepared session of this very worker."""
    client = await (await gateway.connect(name)).prepared()
    assert name in worker.sessions, f"expected {name} on worker {worker.port}, got {worker.loop.sessions}"
    return client


def test_a_worker_crashes_in_a_unit() -> None:
    async def story() -> None:
        async with (
            FakeWorker(1, think_s=30) as first,
            FakeWorker(1) as second,
            running_gateway(first, second) as gateway,
        ):
            mine, other = await on(first, gateway, "mine"), await on(second, gateway, "other")
            waiting = await gateway.connect("waiting")
            await waiting.say(PREPARE, CHUNK)
            await waiting.hear("queued")
            await mine.say(CHUNK)
            await until(lambda: first.sessions, "the unit to run")
            first.crash()
            await lost(mine, 5)
            await other.unit()
            await other.close()
            await waiting.until("queue_done")
            await waiting.hear("prepared")
            await waiting.hear("result")
            await until(lambda: gateway.gateway.dispatcher.workers.n_slots == 1, "the loss to be known")
            assert (await gateway.get("/status"))["offline_workers"] == 1
            text = (await gateway.http.get("/metrics")).text
            assert 'workers_lost_total{worker="worker_0"} 1.0' in text, "expected one loss to be counted"

    run(story)


def test_a_worker_hangs() -> None:
    async def story() -> None:
        async with (
            FakeWorker(2) as first,
            FakeWorker(1) as second,
            running_gateway(first, second, worker_timeout_s=1.0) as gateway,
        ):
            mine, other = await on(first, gateway, "mine"), await on(second, gateway, "other")
            await mine.say(CHUNK)
            await mine.hear("result")
            since = time.monotonic()
            first.freeze()
            await lost(mine, 10)
            took = time.monotonic() - since
            assert 0.9 < took < 6, f"expected about a second and what a question takes, got {took:.1f} s"
            await other.unit()
            waiting = await gateway.connect("waiting")
            await waiting.hear("queued")
            first.thaw()
            await waiting.prepared()
            await waiting.unit()
            await until(lambda: list(first.sessions) == ["waiting"], "the lost session to be gone")

    run(story)


def test_a_worker_that_is_slow_for_a_moment_keeps_its_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One who asks for a slot there gets another's, and those who are there wait."""
    monkeypatch.setattr(worker_link, "PROBE_S", 0.2)

    async def story() -> None:
        async with (
            FakeWorker(3) as first,
            FakeWorker(2) as second,
            running_gateway(first, second, worker_timeout_s=30.0) as gateway,
        ):
            mine, _ = await on(first, gateway, "mine"), await on(second, gateway, "other")
            first.freeze()
            await mine.say(CHUNK)
            third = await (await gateway.connect("third")).prepared()
            assert "third" in second.sessions, second.sessions
            await third.unit()
            waiting = await gateway.connect("waiting")
            await waiting.hear("queued")
            first.thaw()
            assert (await mine.hear("result"))["current_time"] == 1
            await waiting.prepared()
            assert "waiting" in first.sessions, first.sessions

    run(story)


def test_a_gateway_without_file_descriptors_keeps_its_sessions() -> None:
    """It cannot ask any worker; that says nothing of those who are there."""

    async def story() -> None:
        def fail(_: httpx.Request) -> httpx.Response:
            try:
                raise OSError(errno.EMFILE, "Too many open files")
            except OSError as error:
                raise httpx.ConnectError("All connection attempts failed") from error

        async with FakeWorker(2) as worker, running_gateway(worker, worker_timeout_s=30.0) as gateway:
            client = await (await gateway.connect("mine")).prepared()
            watch, link = gateway.watch, gateway.gateway.duplex
            asking = link._asking
            async with httpx.AsyncClient(transport=httpx.MockTransport(fail), verify=False) as failing:
                watch._asking = link._asking = failing
                waiting = await gateway.connect("waiting")
                await waiting.hear("queued")
                await asyncio.sleep(0.3)  # several questions go wrong
                await client.unit()
                watch._asking = link._asking = asking
                await waiting.prepared()

    run(story)


def test_a_worker_hangs_in_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question is still answered; then nothing is."""
    monkeypatch.setattr(worker_link, "OPEN_S", 0.3)

    async def story() -> None:
        async with FakeWorker(3) as first, FakeWorker(1) as second, running_gateway(first, second) as gateway:

            async def answers(*_: object) -> None:
                first.freeze()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(worker_link, "_probe", answers)
                client = await gateway.connect()
                await client.seated()
            assert list(second.sessions) == ["omni_me"], second.sessions
            first.thaw()
            await until(lambda: not first.sessions, "the slot of the broken handshake")

    run(story)


def test_a_worker_dies_before_it_is_asked() -> None:
    async def story() -> None:
        async with FakeWorker(4) as first, FakeWorker(2) as second, running_gateway(first, second) as gateway:
            first.crash()
            clients = [await gateway.connect(f"c{i}") for i in range(5)]
            for client in clients:
                await client.say(PREPARE, CHUNK)
            for i, client in enumerate(clients):
                await client.until("queue_done")
                await client.hear("prepared")
                await client.hear("result")
                assert f"c{i}" in second.sessions, f"expected c{i} to be next, got {second.sessions}"
                await client.close()

    run(story)


def test_all_workers_die_and_one_comes_back() -> None:
    async def story() -> None:
        async with FakeWorker(1) as first, FakeWorker(1) as second, running_gateway(first, second) as gateway:
            first.crash()
            second.crash()
            clients = [await gateway.connect(f"c{i}") for i in range(3)]
            for client in clients:
                await client.hear("queued")
            items = (await gateway.get("/api/queue"))["items"]
            assert [item["session_id"] for item in items] == ["c0", "c1", "c2"], f"expected the order, got {items}"
            assert (await gateway.http.get("/readyz")).status_code == 503
            async with FakeWorker(1, port=second.port) as again:
                for i in range(3):
                    await clients[i].prepared()
                    assert list(again.sessions) == [f"c{i}"], f"expected c{i} to be next, got {again.sessions}"
                    await clients[i].unit()
                    await clients[i].say(STOP)
                    await clients[i].hear("stopped")

    run(story)


@pytest.mark.parametrize("state", ["LOADING", "COMPILING", "WARMING_UP", "FAILED", "UNLOADED", "DRAINING"])
def test_a_worker_that_takes_nobody_yet(state: str) -> None:
    async def story() -> None:
        async with FakeWorker(1) as worker:
            worker.state = state
            async with running_gateway(worker) as gateway:
                client = await gateway.connect()
                assert (await client.hear("queued"))["estimated_wait_s"] == 0
                await until(lambda: gateway.gateway.dispatcher.workers.all[0].health, "an answer")
                [told] = (await gateway.get("/workers"))["workers"]
                assert (told["state"], told["slots"]["total"]) == (state, 0), told
                worker.state = "IDLE"
                await client.prepared()
                await client.unit()

    run(story)


def test_a_worker_that_drains_keeps_who_it_has() -> None:
    async def story() -> None:
        async with FakeWorker(2) as worker, running_gateway(worker) as gateway:
            client = await (await gateway.connect("seated")).prepared()
            worker.state = "DRAINING"
            late = await gateway.connect("late")
            await late.hear("queued")
            await client.unit()
            await late.close()
            await client.say(STOP)
            await client.hear("stopped")
            await gateway.clean()

    run(story)


def test_a_worker_ends_in_the_handshake() -> None:
    """It refuses, then it is there again; nobody is told of a place that was none."""

    async def story() -> None:
        async with FakeWorker(1) as worker, running_gateway(worker) as gateway:
            worker.state = "LOADING"  # which the gateway has not heard of
            client = await gateway.connect()
            await client.hear("queued")
            worker.state = "IDLE"
            await client.prepared()

    run(story)


# --- storms -----------------------------------------------------------------------------------------


async def abrupt(gateway: Running, i: int) -> None:
    (await gateway.connect(f"s{i}")).abort()


async def polite(gateway: Running, i: int) -> None:
    await (await gateway.connect(f"s{i}")).close()


async def mid_unit(gateway: Running, i: int) -> None:
    client = await gateway.connect(f"s{i}")
    await client.say(PREPARE, *[CHUNK] * 3)
    await client.until("queue_done")
    await client.hear("prepared")
    client.abort()


async def stopped(gateway: Running, i: int) -> None:
    client = await gateway.connect(f"s{i}")
    await client.say(PREPARE, CHUNK, STOP)
    await client.close()


async def mid_handshake(gateway: Running, i: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = f"GET /ws/duplex/s{i} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    head += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    writer.write(head.encode()[: (20, 80, 1000)[i % 3]])
    if i % 2:
        await writer.drain()
    writer.transport.abort()


async def nonsense(gateway: Running, i: int) -> None:
    client = await gateway.connect(f"s{i}")
    client.socket.transport.write(b"\xff" * 40)
    await client.closed()


STORM = (abrupt, polite, mid_unit, stopped, mid_handshake, nonsense)


def test_storms_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with (
            FakeWorker(2, think_s=0.01) as first,
            FakeWorker(3) as second,
            running_gateway(first, second) as gateway,
        ):

            async def storm(n: int) -> None:
                todo = asyncio.Semaphore(25)

                async def one(i: int) -> None:
                    async with todo:
                        await STORM[i % len(STORM)](gateway, i)

                await asyncio.gather(*(one(i) for i in range(n)))
                await gateway.clean()
                await until(lambda: not first.sessions and not second.sessions, "the workers' slots")

            await storm(30)
            await gateway.get("/status")
            gc.collect()
            await until(lambda: len(asyncio.all_tasks()) <= 10, "a calm gateway")
            n_tasks, before = len(asyncio.all_tasks()), psutil.Process().memory_info().rss
            await storm(210)
            end = time.monotonic() + SOON_S
            # Of a worker's slots the gateway knows what the worker said when it was asked last.
            while (status := await gateway.get("/status"))["slots"]["free"] < 5 and time.monotonic() < end:
                await asyncio.sleep(0.05)
            assert status["slots"] == {"total": 5, "free": 5, "leased": 0}, status
            assert (status["queue_length"], status["connections"], status["running_tasks"]) == (0, 0, []), status
            await until(lambda: len(asyncio.all_tasks()) <= n_tasks, f"{n_tasks} tasks as before")
            gc.collect()
            grown = (psutil.Process().memory_info().rss - before) / MB
            assert grown < 30, f"expected no growth to speak of, got {grown:.0f} MB"
            await (await gateway.connect()).prepared()

    with caplog.at_level(logging.ERROR):
        run(story)
    faults = [record for record in caplog.records if record.name.startswith(("server", "uvicorn", "asyncio"))]
    faults = [record for record in faults if record.levelno >= logging.ERROR]
    assert not faults, f"expected no errors in the log, got {[record.getMessage() for record in faults][:3]}"


def test_a_thousand_who_wait_do_not_hold_up_who_talks() -> None:
    """All of them are told of each change; that must not take as long as all of them have places."""

    async def story() -> None:
        n = 1000
        workers = Workers([WorkerAddress("127.0.0.1", 1)])
        workers.answered(workers.all[0], {"state": "IDLE", "slots": {"total": 1, "free": 1}})
        dispatcher = Dispatcher(workers, Queue(n), Eta(EtaConfig()))
        visits = [dispatcher.arrive("omni_duplex", "x") for _ in range(n + 1)]
        calls = 0
        places = dispatcher.places

        def counted() -> dict:
            nonlocal calls
            calls += 1
            return places()

        dispatcher.places = counted
        dispatcher.leave(visits[0])
        told = [dispatcher.place(pending).position for pending in visits[2:]]
        assert told == list(range(1, n)), "expected everybody's own place"
        assert calls < 20, f"expected one calculation for all of them, got {calls}"

    run(story)
