"""The relay: messages arrive unchanged and in order, and a slow receiver delays only its own sender."""

import asyncio
import json
import socket
import time

import psutil
import pytest
import websockets
from websockets.asyncio.server import ServerConnection

from benchmarks.serve.fake_worker import FakeWorker
from server.live import duplex, inbox, relay
from server.live.duplex import MAX_IN_FLIGHT
from tests.server.live_gateway import (
    ANSWER_S,
    CHUNK,
    PREPARE,
    Client,
    run,
    running_gateway,
    scripted_worker,
    wait_until,
)
from worker.protocol.connection import MAX_READ_BYTES, LiveProtocol

MB = 2**20
ODD_MESSAGES = (
    '  {"type" : "prepare",\n"prefix_system_prompt":"héllo \\ud83d\\ude00 😀", "unknown": [1, {"a": null}]}\r\n',
    '{"type":"audio_chunk","audio":"AAAA","video_frames":["/9j/"],"force_listen":true}',
    '{"type":"video_frame","frame":"/9j/2Q=="}',
    "not JSON at all",
    "",
    b"",
    bytes(range(256)),
    b"\xff\xfe" * 100_000,
    "x" * 300_000,
    '{"type":"result","text":"queue_done","audio_data":"AAAA"}',
    '{"type":"result","stages":17,"is_listen":{},"wall_clock_ms":"fast"}',
    '{"type":"result","stages":{"decode":' + "9" * 400 + '},"wall_clock_ms":1e999,"lag_ms":' + "9" * 400 + "}",
    '{"type":["error"],"code":{}}',
    b"\x05\x00\x00\x00[1,2]",
    b"\x02\x00\x00\x00{}\x01\x02",
)


async def echo(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


def test_messages_are_forwarded_unchanged() -> None:
    async def scenario() -> None:
        async with scripted_worker(echo) as port, running_gateway(port) as gateway:
            await gateway.wait_for_slot()
            early = await gateway.connect()
            await early.send(*ODD_MESSAGES)  # some before, some after `queue_done`
            await early.receive("queue_done")
            await early.send(*ODD_MESSAGES)
            for expected in ODD_MESSAGES * 2:
                got = await early.receive_raw()
                assert got == expected, f"expected {expected[:100]!r}, got {got[:100]!r}"

    run(scenario)


@pytest.mark.parametrize("n", [4, 30])
def test_burst_gets_one_result_per_chunk(n: int) -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1, think_s=0.003) as worker, running_gateway(worker) as gateway:
            client = await (await gateway.connect()).prepared()
            await client.send(*[CHUNK] * n)
            units = [(await client.receive("result"))["current_time"] for _ in range(n)]
            assert units == list(range(1, n + 1)), f"expected 1 to {n}, got {units}"
            with pytest.raises(TimeoutError):
                await client.receive_raw(0.1)

    run(scenario)


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (1000, "stopped", (1000, "stopped")),
        (1000, "Pause timeout", (1000, "Pause timeout")),
        (1011, "engine", (1011, "engine")),
        (1012, "draining", (1012, "draining")),
        (4321, "é" * 60, (4321, "é" * 60)),
        (1005, "", (1000, "")),  # a close frame without a code
    ],
)
def test_close_code_of_worker_is_forwarded(code: int, reason: str, expected: tuple[int, str]) -> None:
    async def scenario() -> None:
        async def talk(connection: ServerConnection) -> None:
            await connection.send('{"type":"timeout","reason":"x"}')
            if code == 1005:
                connection.protocol.send_close()
                connection.send_data()
                await connection.wait_closed()
            await connection.close(code, reason)

        async with scripted_worker(talk) as port, running_gateway(port) as gateway:
            await gateway.wait_for_slot()
            client = await (await gateway.connect()).with_slot()
            await client.receive("timeout")
            assert await client.wait_closed() == expected
            await gateway.wait_idle()

    run(scenario)


def test_forwards_message_of_128_mib() -> None:
    async def scenario() -> None:
        async def measure(connection: ServerConnection) -> None:
            async for message in connection:
                await connection.send(json.dumps({"type": "length", "n": len(message)}))

        async with scripted_worker(measure) as port, running_gateway(port) as gateway:
            await gateway.wait_for_slot()
            client = await (await gateway.connect()).with_slot()
            await client.send("x" * (128 * MB))
            got = (await client.receive("length"))["n"]
            assert got == 128 * MB, f"expected all of it, got {got}"
            await client.close()
            await gateway.wait_idle()

    run(scenario)


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
            used = gateway.gateway.duplex.buffered_bytes
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

        async with scripted_worker(discard, slots=2) as port, running_gateway(port) as gateway:
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
                lambda: gateway.gateway.duplex.buffered_bytes == inbox_bytes, "all messages to be buffered", 30
            )
            await first.close()
            await flood.receive_until("queue_done")
            longest, n_turns = 0.0, 0
            while gateway.gateway.duplex.buffered_bytes:
                begun = time.monotonic()
                await other.send("hello")
                assert await other.receive_raw() == "hello"
                longest, n_turns = max(longest, time.monotonic() - begun), n_turns + 1
            assert n_turns > 3, f"expected others to be served in between, got {n_turns} turns, the longest {longest} s"

    run(scenario)


def test_silent_client_that_never_reads_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection stays established, but it answers no ping and its buffers are full."""
    monkeypatch.setattr(duplex, "CLOSE_TIMEOUT_S", 0.2)

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


def test_sending_client_that_never_reads_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway does not read it either while its buffers are full, so missing pongs do not reveal it."""
    monkeypatch.setattr(relay, "STUCK_S", 0.5)
    monkeypatch.setattr(duplex, "CLOSE_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        async def pour(connection: ServerConnection) -> None:
            while True:
                await connection.send("x" * MB)

        async with scripted_worker(pour) as port, running_gateway(port) as gateway:
            await gateway.wait_for_slot()
            client = await (await gateway.connect(sock=small_buffers(gateway.port), max_queue=1)).with_slot()
            client.socket.transport.pause_reading()
            await client.send("x" * MB)
            await gateway.wait_idle()

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


def test_redirect_of_worker_is_not_followed() -> None:
    async def scenario() -> None:
        async def record_path(connection: ServerConnection) -> None:
            reached.append(connection.request.path)
            await connection.close()

        reached: list[str] = []
        async with scripted_worker(record_path) as target:
            to = f"ws://127.0.0.1:{target}/ws/duplex"
            async with scripted_worker(record_path, redirect=to) as port, running_gateway(port) as gateway:
                await gateway.wait_for_slot()
                client = await gateway.connect()
                await client.receive("queued")
        assert not reached, f"expected no connection to the target, got {reached}"

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


def test_status_shows_paused_sessions() -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            client = await (await gateway.connect()).prepared()

            async def status() -> tuple[str, bool]:
                [one] = (await gateway.get("/workers"))["workers"]
                [task] = (await gateway.get("/status"))["running_tasks"]
                return one["status"], task["paused"]

            async def expect_status(expected: tuple[str, bool]) -> None:
                async with asyncio.timeout(5):
                    while (got := await status()) != expected:
                        assert got[1] == expected[1], f"expected {expected}, got {got}"
                        await asyncio.sleep(0.05)

            await expect_status(("duplex_active", False))
            await client.send({"type": "pause", "timeout": 60})
            await client.receive("paused")
            await expect_status(("duplex_paused", True))
            await client.send(PREPARE)
            await client.receive("prepared")
            await expect_status(("duplex_active", False))

    run(scenario)


def test_relayed_results_are_counted() -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            client: Client = await (await gateway.connect("adx_1")).prepared()
            for _ in range(5):
                await client.unit()
            await client.send("{")
            await client.receive("error")
            text = (await gateway.http.get("/metrics")).text
            for line in (
                'duologue_gateway_units_total{decision="listen",request_type="audio_duplex"} 3.0',
                'duologue_gateway_units_total{decision="speak",request_type="audio_duplex"} 2.0',
                'duologue_gateway_errors_total{code="bad_json"} 1.0',
                'duologue_gateway_open_sessions{worker="worker_0"} 1.0',
                'duologue_gateway_sessions_total{request_type="audio_duplex"} 1.0',
                'duologue_gateway_unit_seconds_count{decision="speak"} 2.0',
                "duologue_gateway_headroom_seconds_count 5.0",
                'duologue_gateway_worker_state{state="BUSY",worker="worker_0"}',
            ):
                assert line in text, f"expected {line!r}, got\n{text}"

    run(scenario)


def test_refuses_other_socket_paths() -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            for path in ("/ws/duplex", "/ws/duplex/a/b", "/ws/nothing/a"):
                with pytest.raises(websockets.InvalidStatus):
                    await websockets.connect(f"ws://127.0.0.1:{gateway.port}{path}")
            assert (await gateway.http.get("/ws/duplex/a")).status_code in (404, 426)
            await (await gateway.connect()).with_slot()

    run(scenario)
