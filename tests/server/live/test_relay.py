"""The relay: messages arrive unchanged and in order; forwarded closes, status and counters."""

import asyncio

import pytest
import websockets
from websockets.asyncio.server import ServerConnection

from benchmarks.serve.fake_worker import FakeWorker
from server.access.identity import Identity
from server.dispatch.workers import Worker, WorkerAddress, WorkerLease
from server.live.kinds import Kind
from server.live.live_sessions import LiveSession
from server.live.relay import Relay, RelayEnds, Successor
from tests.server.garbage import without_garbage
from tests.server.live_gateway import CHUNK, PREPARE, STOP, Client, echo, run, running_gateway, scripted_worker

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


class _SlowEnd:
    """A worker's connection whose reading ends late, and a client that sends nothing."""

    def __init__(self) -> None:
        self.ending, self.aborted = asyncio.Event(), 0
        self.transport = self

    def abort(self) -> None:
        self.aborted += 1

    def __len__(self) -> int:
        return 0

    async def get(self) -> None:
        await asyncio.Event().wait()

    async def recv(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ending.set()
            await asyncio.Event().wait()


def test_client_that_leaves_while_another_worker_takes_over_leaves_no_connection() -> None:
    async def scenario() -> None:
        slow, taken = _SlowEnd(), _SlowEnd()
        session = LiveSession("omni_a", Kind.DUPLEX, Identity())
        lease = WorkerLease(Worker(0, WorkerAddress("w", 1)), "omni_duplex", "omni_a", 0.0, 0.0)
        relay = Relay(RelayEnds(None, slow, slow, lease), session, None, None, None, None)

        async def hand_over() -> Successor:
            await asyncio.sleep(0)
            assert relay.hold(), "expected a session that goes on"
            return Successor(lease, taken)

        running = asyncio.create_task(relay.run(asyncio.create_task(hand_over())))
        await slow.ending.wait()
        running.cancel()
        await asyncio.wait((running,))
        assert running.cancelled() and taken.aborted == 1, f"expected the connection to be closed, got {taken.aborted}"

    run(scenario)


def test_an_ended_session_needs_no_garbage_collection() -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker, resume_grace_s=0.05) as gateway:
            for end, resume in (("stop", False), ("close", False), ("drop", False), ("drop", True)):
                async with without_garbage(LiveSession):
                    client = await (await gateway.connect()).with_slot()
                    await client.send(PREPARE | {"spec": {"resume": resume}})
                    await client.receive("prepared")
                    await client.unit()
                    if end == "stop":
                        await client.send(STOP)
                        await client.receive("stopped")
                    if end == "drop":
                        client.abort()
                    else:
                        await client.close()

    run(scenario)
