"""What passes through the gateway: unchanged, in order, whatever its size, and no faster than it is taken."""

import asyncio
import json
import socket
import time

import psutil
import pytest
import websockets
from websockets.asyncio.server import ServerConnection

from benchmarks.serve.fake_worker import FakeWorker
from server.live import inbox, relay
from server.live.duplex import MAX_IN_FLIGHT
from tests.server.gateways import ANSWER_S, CHUNK, PREPARE, Client, run, running_gateway, special_worker, until
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


def test_every_byte_goes_through_as_it_is() -> None:
    async def story() -> None:
        async with special_worker(echo) as port, running_gateway(port) as gateway:
            await until(lambda: gateway.gateway.dispatcher.workers.n_free, "a slot")
            early = await gateway.connect()
            await early.say(*ODD_MESSAGES)  # some before, some behind `queue_done`
            await early.hear("queue_done")
            await early.say(*ODD_MESSAGES)
            for expected in ODD_MESSAGES * 2:
                got = await early.hear_raw()
                assert got == expected, f"expected {expected[:100]!r}, got {got[:100]!r}"

    run(story)


@pytest.mark.parametrize("n", [4, 30])
def test_a_burst_is_answered_one_by_one(n: int) -> None:
    async def story() -> None:
        async with FakeWorker(slots=1, think_s=0.003) as worker, running_gateway(worker) as gateway:
            client = await (await gateway.connect()).prepared()
            await client.say(*[CHUNK] * n)
            units = [(await client.hear("result"))["current_time"] for _ in range(n)]
            assert units == list(range(1, n + 1)), f"expected 1 to {n}, got {units}"
            with pytest.raises(TimeoutError):
                await client.hear_raw(0.1)

    run(story)


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
def test_how_a_worker_closes_is_passed_on(code: int, reason: str, expected: tuple[int, str]) -> None:
    async def story() -> None:
        async def talk(connection: ServerConnection) -> None:
            await connection.send('{"type":"timeout","reason":"x"}')
            if code == 1005:
                connection.protocol.send_close()
                connection.send_data()
                await connection.wait_closed()
            await connection.close(code, reason)

        async with special_worker(talk) as port, running_gateway(port) as gateway:
            await until(lambda: gateway.gateway.dispatcher.workers.n_free, "a slot")
            client = await (await gateway.connect()).seated()
            await client.hear("timeout")
            assert await client.closed() == expected
            await gateway.clean()

    run(story)


def test_a_message_of_128_mib() -> None:
    async def story() -> None:
        async def measure(connection: ServerConnection) -> None:
            async for message in connection:
                await connection.send(json.dumps({"type": "length", "n": len(message)}))

        async with special_worker(measure) as port, running_gateway(port) as gateway:
            await until(lambda: gateway.gateway.dispatcher.workers.n_free, "a slot")
            client = await (await gateway.connect()).seated()
            await client.say("x" * (128 * MB))
            got = (await client.hear("length"))["n"]
            assert got == 128 * MB, f"expected all of it, got {got}"
            await client.close()
            await gateway.clean()

    run(story)


def small_buffers(port: int) -> socket.socket:
    connected = socket.create_connection(("127.0.0.1", port))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    return connected


def test_who_does_not_read_holds_up_only_itself() -> None:
    """The worker of one client pours out what that client does not take; another goes on talking."""

    async def story() -> None:
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

        async with special_worker(pour) as port, running_gateway(port) as gateway:
            await until(lambda: gateway.gateway.dispatcher.workers.n_free, "a slot")
            slow = await (await gateway.connect("slow", sock=small_buffers(gateway.port), max_queue=1)).seated()
            quick = await (await gateway.connect("quick")).seated()
            before = psutil.Process().memory_info().rss
            await slow.say("go")
            n_before, since = -1, time.monotonic()
            while n_before != sent or time.monotonic() - since < 1:
                n_before = sent
                for _ in range(20):
                    await quick.say("hello")
                    assert await quick.hear_raw() == "hello"
                await asyncio.sleep(0.05)
                assert time.monotonic() - since < 20, f"expected the worker to be held up, got {sent} MB from it"
            grown = (psutil.Process().memory_info().rss - before) / MB
            assert sent < 64 and grown < 150, f"expected little to be kept, got {sent} MB sent and {grown:.0f} MB more"
            slow.abort()
            await until(lambda: gateway.gateway.dispatcher.workers.n_free == 3, "the slow one's slot")

    run(story)


def test_a_worker_that_does_not_read_holds_up_its_client_only() -> None:
    async def story() -> None:
        over = asyncio.Event()

        async def sulk(connection: ServerConnection) -> None:
            if "fast" not in connection.request.path:
                await echo(connection)
                return
            connection.transport.pause_reading()
            async with asyncio.timeout(ANSWER_S):
                await over.wait()

        async with special_worker(sulk) as port, running_gateway(port) as gateway:
            await until(lambda: gateway.gateway.dispatcher.workers.n_free, "a slot")
            fast = await (await gateway.connect("fast")).seated()
            other = await (await gateway.connect("other")).seated()
            n_sent = 0

            async def pour() -> None:
                nonlocal n_sent
                while True:
                    await fast.say("x" * 100_000)
                    n_sent += 1

            pouring = asyncio.create_task(pour())
            n_before, since = -1, time.monotonic()
            while n_before != n_sent or time.monotonic() - since < 1:
                n_before = n_sent
                await other.say("hello")
                assert await other.hear_raw() == "hello"
                await asyncio.sleep(0.1)
                assert time.monotonic() - since < 20, f"expected the client to be held up, got {n_sent} messages"
            used = gateway.gateway.duplex._store.used
            assert used < MAX_IN_FLIGHT + MB, f"expected about {MAX_IN_FLIGHT} bytes to be kept, got {used}"
            pouring.cancel()
            fast.abort()  # nobody reads that client now: its loss has to be seen all the same
            await until(lambda: gateway.gateway.dispatcher.workers.n_free == 3, "the fast one's slot")
            over.set()

    run(story)


def test_floods_of_tiny_messages_let_others_talk() -> None:
    async def story() -> None:
        async def swallow(connection: ServerConnection) -> None:
            if "flood" not in connection.request.path:
                await echo(connection)
                return
            async for _ in connection:
                pass

        async with special_worker(swallow, slots=2) as port, running_gateway(port) as gateway:
            await until(lambda: gateway.gateway.dispatcher.workers.n_free, "a slot")
            first = await (await gateway.connect("first")).seated()
            other = await (await gateway.connect("other")).seated()
            flood = await gateway.connect("flood")
            await flood.hear("queued")
            n = 8_000
            for _ in range(n):
                await flood.say("x")
            box_bytes = n * inbox.size_of("x")
            await until(lambda: gateway.gateway.duplex._store.used == box_bytes, "all of it to be kept", 30)
            await first.close()
            await flood.until("queue_done")
            longest, n_turns = 0.0, 0
            while gateway.gateway.duplex._store.used:
                begun = time.monotonic()
                await other.say("hello")
                assert await other.hear_raw() == "hello"
                longest, n_turns = max(longest, time.monotonic() - begun), n_turns + 1
            assert n_turns > 3, f"expected others to be served meanwhile, got {n_turns} turns, the longest {longest} s"

    run(story)


def test_who_is_there_and_never_reads_is_let_go() -> None:
    """Its connection stays established, but no ping is answered and nothing more can be sent."""

    async def story() -> None:
        async def pour(connection: ServerConnection) -> None:
            while True:
                await connection.send("x" * MB)

        options = {"ws_ping_interval": 0.2, "ws_ping_timeout": 0.5}
        async with special_worker(pour) as port, running_gateway(port, options=options) as gateway:
            await until(lambda: gateway.gateway.dispatcher.workers.n_free, "a slot")
            client = await (await gateway.connect(sock=small_buffers(gateway.port), max_queue=1)).seated()
            client.socket.transport.pause_reading()
            await gateway.clean()

    run(story)


def test_who_talks_and_never_reads_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it talks it is not read either, and so no unanswered ping tells of it."""
    monkeypatch.setattr(relay, "STUCK_S", 0.5)

    async def story() -> None:
        async def pour(connection: ServerConnection) -> None:
            while True:
                await connection.send("x" * MB)

        async with special_worker(pour) as port, running_gateway(port) as gateway:
            await until(lambda: gateway.gateway.dispatcher.workers.n_free, "a slot")
            client = await (await gateway.connect(sock=small_buffers(gateway.port), max_queue=1)).seated()
            client.socket.transport.pause_reading()
            await client.say("x" * MB)
            await gateway.clean()

    run(story)


@pytest.mark.parametrize("frame", [b"\x89\x80\0\0\0\0", b"\x00\x80\0\0\0\0"], ids=["pings", "parts of a message"])
def test_floods_of_empty_frames_let_others_talk(frame: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many are read before somebody else has a turn is bounded, whatever has arrived."""
    longest, receive = 0, LiveProtocol.data_received

    def counting(protocol: LiveProtocol, data: bytes) -> None:
        nonlocal longest
        longest = max(longest, len(data))
        receive(protocol, data)

    monkeypatch.setattr(LiveProtocol, "data_received", counting)

    async def story() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            client = await gateway.connect()
            await client.hear("queue_done")
            begin = b"\x01\x80\0\0\0\0" if frame[0] == 0 else b""
            client.socket.transport.write(begin + frame * 50_000)
            await until(lambda: longest, "something to be read")
            assert longest <= MAX_READ_BYTES, f"expected at most {MAX_READ_BYTES} bytes at once, got {longest}"

    run(story)


def test_a_worker_sends_nobody_elsewhere() -> None:
    async def story() -> None:
        async def elsewhere(connection: ServerConnection) -> None:
            reached.append(connection.request.path)
            await connection.close()

        reached: list[str] = []
        async with special_worker(elsewhere) as target:
            to = f"ws://127.0.0.1:{target}/ws/duplex"
            async with special_worker(elsewhere, redirect=to) as port, running_gateway(port) as gateway:
                await until(lambda: gateway.gateway.dispatcher.workers.n_free, "a slot")
                client = await gateway.connect()
                await client.hear("queued")
        assert not reached, f"expected nobody to be sent on, got {reached}"

    run(story)


def test_a_client_that_answers_pings_may_say_nothing() -> None:
    async def story() -> None:
        options = {"ws_ping_interval": 0.05, "ws_ping_timeout": 5.0}
        async with FakeWorker(slots=1) as worker, running_gateway(worker, options=options) as gateway:
            client = await (await gateway.connect()).prepared()
            with pytest.raises(TimeoutError):
                await client.hear_raw(0.5)
            await client.unit()

    run(story)


def test_paused_sessions_are_told_apart() -> None:
    async def story() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            client = await (await gateway.connect()).prepared()

            async def told() -> tuple[str, bool]:
                [one] = (await gateway.get("/workers"))["workers"]
                [task] = (await gateway.get("/status"))["running_tasks"]
                return one["status"], task["paused"]

            async def tells(expected: tuple[str, bool]) -> None:
                async with asyncio.timeout(5):
                    while (got := await told()) != expected:
                        assert got[1] == expected[1], f"expected {expected}, got {got}"
                        await asyncio.sleep(0.05)

            await tells(("duplex_active", False))
            await client.say({"type": "pause", "timeout": 60})
            await client.hear("paused")
            await tells(("duplex_paused", True))
            await client.say(PREPARE)
            await client.hear("prepared")
            await tells(("duplex_active", False))

    run(story)


def test_measured_on_the_way() -> None:
    async def story() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            client: Client = await (await gateway.connect("adx_1")).prepared()
            for _ in range(5):
                await client.unit()
            await client.say("{")
            await client.hear("error")
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

    run(story)


def test_handshakes_that_are_none() -> None:
    async def story() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            for path in ("/ws/duplex", "/ws/duplex/a/b", "/ws/nothing/a"):
                with pytest.raises(websockets.InvalidStatus):
                    await websockets.connect(f"ws://127.0.0.1:{gateway.port}{path}")
            assert (await gateway.http.get("/ws/duplex/a")).status_code in (404, 426)
            await (await gateway.connect()).seated()

    run(story)
