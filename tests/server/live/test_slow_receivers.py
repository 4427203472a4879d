"""The relay with slow or blocked receivers: they delay only their own session, and memory stays bounded."""

import asyncio
import socket
import time

import psutil
import pytest
from websockets.asyncio.server import ServerConnection

from benchmarks.serve.fake_worker import FakeWorker
from server.live import inbox, sockets
from server.live.sockets import MAX_IN_FLIGHT
from tests.server.live_gateway import (
    ANSWER_S,
    echo,
    run,
    running_gateway,
    scripted_worker,
    wait_until,
)
from worker.config.access import ClientLimits
from worker.protocol.connection import MAX_READ_BYTES, LiveProtocol
from worker.protocol.live_http import TransportLimits

MB = 2**20


def small_buffers(port: int) -> socket.socket:
    connected = socket.create_connection(("127.0.0.1", port))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    return connected


def test_client_that_does_not_read_delays_only_its_worker() -> None:
    """One session's worker sends without pause to a client that does not read; another session continues."""

    async def scenario() -> None:
        sent = 0

        async def pour(connection: ServerConnection) -> None:
            nonlocal sent
            if "slow" not in connection.request.path:
                await echo(connection)
                return
            await connection.recv()
            while True:
                await connection.send("x" * MB)
                sent += 1

        async with scripted_worker(pour) as port, running_gateway(port) as gateway:
            await gateway.wait_for_slot()
            slow = await (await gateway.connect("slow", sock=small_buffers(gateway.port), max_queue=1)).with_slot()
            quick = await (await gateway.connect("quick")).with_slot()
            before = psutil.Process().memory_info().rss
            await slow.send("go")
            n_before, since = -1, time.monotonic()
            while n_before != sent or time.monotonic() - since < 1:
                n_before = sent
                for _ in range(20):
                    await quick.send("hello")
                    assert await quick.receive_raw() == "hello"
                await asyncio.sleep(0.05)
                assert time.monotonic() - since < 20, f"expected the worker's sending to stop, got {sent} MB from it"
            grown = (psutil.Process().memory_info().rss - before) / MB
            assert sent < 64 and grown < 150, (
                f"expected little to be buffered, got {sent} MB sent and {grown:.0f} MB more"
            )
            slow.abort()
            await wait_until(lambda: gateway.gateway.dispatcher.workers.n_free == 3, "the slot of the slow client")

    run(scenario)


def test_worker_that_does_not_read_delays_only_its_client() -> None:
    async def scenario() -> None:
        over = asyncio.Event()

        async def read_nothing(connection: ServerConnection) -> None:
            if "fast" not in connection.request.path:
                await echo(connection)
                return
            connection.transport.pause_reading()
            async with asyncio.timeout(ANSWER_S):
                await over.wait()

        async with scripted_worker(read_nothing) as port, running_gateway(port) as gateway:
            await gateway.wait_for_slot()
            fast = await (await gateway.connect("fast")).with_slot()
            other = await (await gateway.connect("other")).with_slot()
            n_sent = 0

            async def pour() -> None:
                nonlocal n_sent
                while True:
                    await fast.send("x" * 100_000)
                    n_sent += 1

            pouring = asyncio.create_task(pour())
            n_before, since = -1, time.monotonic()
            while n_before != n_sent or time.monotonic() - since < 1:
                n_before = n_sent
                await other.send("hello")
                assert await other.receive_raw() == "hello"
                await asyncio.sleep(0.1)
                assert time.monotonic() - since < 20, f"expected the client's sending to stop, got {n_sent} messages"
            used = gateway.gateway.sockets.buffered_bytes
            assert used < MAX_IN_FLIGHT + MB, f"expected about {MAX_IN_FLIGHT} bytes to be buffered, got {used}"
            pouring.cancel()
            fast.abort()  # the gateway does not read this socket now, and must detect its loss without reading
            await wait_until(lambda: gateway.gateway.dispatcher.workers.n_free == 3, "the slot of the fast client")
            over.set()

    run(scenario)


def test_flood_of_small_messages_does_not_block_others() -> None:
    async def scenario() -> None:
        async def discard(connection: ServerConnection) -> None:
            if "flood" not in connection.request.path:
                await echo(connection)
                return
            async for _ in connection:
                pass

        limits = ClientLimits(socket_messages_per_s=1_000_000.0)
        async with scripted_worker(discard, slots=2) as port, running_gateway(port, limits=limits) as gateway:
            await gateway.wait_for_slot()
            first = await (await gateway.connect("first")).with_slot()
            other = await (await gateway.connect("other")).with_slot()
            flood = await gateway.connect("flood")
            await flood.receive("queued")
            n = 8_000
            for _ in range(n):
                await flood.send("x")
            inbox_bytes = n * inbox.size_of("x")
            await wait_until(
                lambda: gateway.gateway.sockets.buffered_bytes == inbox_bytes, "all messages to be buffered", 30
            )
            await first.close()
            await flood.receive_until("queue_done")
            longest, n_turns = 0.0, 0
            while gateway.gateway.sockets.buffered_bytes:
                begun = time.monotonic()
                await other.send("hello")
                assert await other.receive_raw() == "hello"
                longest, n_turns = max(longest, time.monotonic() - begun), n_turns + 1
            assert n_turns > 3, f"expected others to be served in between, got {n_turns} turns, the longest {longest} s"

    run(scenario)


def test_silent_client_that_never_reads_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection stays established, but it answers no ping and its buffers are full."""
    monkeypatch.setattr(sockets, "CLOSE_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        async def pour(connection: ServerConnection) -> None:
            while True:
                await connection.send("x" * MB)

        options = {"ws_ping_interval": 0.2, "ws_ping_timeout": 0.5}
        async with scripted_worker(pour) as port, running_gateway(port, options=options) as gateway:
            await gateway.wait_for_slot()
            client = await (await gateway.connect(sock=small_buffers(gateway.port), max_queue=1)).with_slot()
            client.socket.transport.pause_reading()
            await gateway.wait_idle()

    run(scenario)


def test_client_whose_buffers_stay_full_is_disconnected() -> None:
    """The gateway does not read it either while its buffers are full, so missing pongs do not reveal it."""

    async def scenario() -> None:
        async def pour(connection: ServerConnection) -> None:
            while True:
                await connection.send("x" * MB)

        counted: list[str] = []
        options = {"transport": TransportLimits(unread_s=0.5, count=counted.append), "ws_ping_interval": None}
        async with scripted_worker(pour) as port, running_gateway(port, options=options) as gateway:
            await gateway.wait_for_slot()
            client = await (await gateway.connect(sock=small_buffers(gateway.port), max_queue=1)).with_slot()
            client.socket.transport.pause_reading()
            await client.send("x" * MB)
            await gateway.wait_idle()
            assert counted == ["unread_timeout_s"]

    run(scenario)


@pytest.mark.parametrize("frame", [b"\x89\x80\0\0\0\0", b"\x00\x80\0\0\0\0"], ids=["pings", "parts of a message"])
def test_flood_of_empty_frames_is_read_in_small_parts(frame: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes read before other tasks run are bounded, however much has arrived."""
    longest, receive = 0, LiveProtocol.data_received

    def counting(protocol: LiveProtocol, data: bytes) -> None:
        nonlocal longest
        longest = max(longest, len(data))
        receive(protocol, data)

    monkeypatch.setattr(LiveProtocol, "data_received", counting)

    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            client = await gateway.connect()
            await client.receive("queue_done")
            begin = b"\x01\x80\0\0\0\0" if frame[0] == 0 else b""
            client.socket.transport.write(begin + frame * 50_000)
            await wait_until(lambda: longest, "something to be read")
            assert longest <= MAX_READ_BYTES, f"expected at most {MAX_READ_BYTES} bytes at once, got {longest}"

    run(scenario)


def test_silent_client_that_answers_pings_stays_connected() -> None:
    async def scenario() -> None:
        options = {"ws_ping_interval": 0.05, "ws_ping_timeout": 5.0}
        async with FakeWorker(slots=1) as worker, running_gateway(worker, options=options) as gateway:
            client = await (await gateway.connect()).prepared()
            with pytest.raises(TimeoutError):
                await client.receive_raw(0.5)
            await client.unit()

    run(scenario)
