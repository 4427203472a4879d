"""The fake worker: answers like a worker, and simulated failures."""

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import websockets

from benchmarks.serve.fake_worker import FakeWorker
from worker.admission.session_capacity import SessionCapacity
from worker.config.session import EngineConfig
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import (
    PLAIN_SPEC,
    AudioChunk,
    Error,
    Interrupt,
    Interrupted,
    Message,
    Partial,
    Pause,
    Paused,
    Prepare,
    Prepared,
    Result,
    Resume,
    Resumed,
    ServerMessage,
    Spec,
    Stop,
    Stopped,
    Timeout,
    VideoFrame,
    read_server,
    write,
)
from worker.status import State, Status

ANSWER_S = 30.0
SECOND = AudioChunk(audio_base64=np.zeros(16_000, np.float32))
LISTENING = re.compile(r"listening on 127\.0\.0\.1:(\d+)")


class Client:
    """A WebSocket client that sends and receives messages. spec: of the last `prepare`."""

    def __init__(self, socket: websockets.ClientConnection):
        self.socket, self.spec = socket, PLAIN_SPEC

    async def send(self, *messages: Message | str | bytes) -> None:
        for message in messages:
            if isinstance(message, Prepare):
                self.spec = message.spec
            await self.socket.send(message if isinstance(message, str | bytes) else write(message, self.spec))

    async def receive(self) -> ServerMessage:
        async with asyncio.timeout(ANSWER_S):
            return read_server(await self.socket.recv(), self.spec)

    async def request(self, message: Message | str | bytes, kind: type[Message]) -> Any:
        await self.send(message)
        received = await self.receive()
        assert isinstance(received, kind), f"expected {kind.__name__}, got {received}"
        return received


async def connect(worker: FakeWorker, name: str) -> Client:
    url = f"ws://127.0.0.1:{worker.port}/ws/duplex?session_id={name}"
    return Client(await websockets.connect(url, compression=None, max_size=None, ping_interval=None))


@asynccontextmanager
async def connected(worker: FakeWorker, name: str = "me") -> AsyncIterator[Client]:
    client = await connect(worker, name)
    async with client.socket:
        yield client


async def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + ANSWER_S
    while not condition():
        assert time.monotonic() < end, f"expected {what} within {ANSWER_S:g} s"
        await asyncio.sleep(0.005)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())


def test_units_listen_then_speak_in_turns() -> None:
    async def scenario() -> None:
        async with FakeWorker(n_listen=2, n_speak=2) as worker, connected(worker) as client:
            prepared = await client.request(Prepare(system_prompt="Hello.", config={"unknown": 1}), Prepared)
            assert (prepared.session_id, prepared.prompt_length, len(prepared.notes)) == ("me", 6, 1), prepared
            results = [await client.request(SECOND, Result) for _ in range(5)]
            got = [(one.is_listen, one.end_of_turn, one.current_time) for one in results]
            expected = [(True, False, 1), (True, False, 2), (False, False, 3), (False, True, 4), (True, False, 5)]
            assert got == expected, f"expected {expected}, got {got}"
            for one in results:
                sound = one.audio_data.samples("result") if one.audio_data else np.zeros(0)
                assert len(sound) == (0 if one.is_listen else 24_000), f"unit {one.current_time}: got {len(sound)}"
                assert bool(one.text) != one.is_listen
                assert 0 <= one.cost_all_ms <= one.wall_clock_ms + 0.1, one
            assert worker.sessions == {"me": 5}, worker.sessions
            assert np.ptp(results[2].audio_data.samples("result")) > 0.3
            stopped = await client.request(Stop(), Stopped)
            assert stopped.session_id == "me" and worker.sessions == {}
            await client.socket.wait_closed()
            assert client.socket.close_code == 1000, client.socket.close_code

    run(scenario)


@pytest.mark.parametrize("form", ["pcm16", "float32"])
def test_binary_frames_and_partial_results(form: str) -> None:
    async def scenario() -> None:
        async with FakeWorker(n_listen=0) as worker, connected(worker) as client:
            spec = Spec(sound_in=form, sound_out=form, partial_results=True)
            await client.request(Prepare(spec=spec), Prepared)
            chunk = write(SECOND, spec)
            assert isinstance(chunk, bytes)
            await client.send(chunk)
            received = [await client.receive() for _ in range(3)]
            kinds = [type(one) for one in received]
            assert kinds == [Partial, Partial, Result], f"expected two parts and a result, got {kinds}"
            assert (received[2].n_parts, received[2].audio_data, received[2].text) == (2, None, received[0].text)
            assert sum(len(one.audio_data.samples("part")) for one in received[:2]) == 24_000

    run(scenario)


def test_answers_errors_pause_interrupt_and_timeout() -> None:
    async def scenario() -> None:
        async with FakeWorker(n_listen=1, n_speak=9) as worker, connected(worker) as client:
            early = await client.request(SECOND, Error)
            assert early.code == ErrorCode.NOT_PREPARED, early
            assert (await client.request(Prepare(config={"temperature": 99}), Error)).code == ErrorCode.BAD_CONFIG
            await client.request(Prepare(), Prepared)
            assert (await client.request("{", Error)).code == ErrorCode.BAD_JSON
            assert (await client.request(b"12345", Error)).code == ErrorCode.BINARY_NOT_AGREED
            assert (await client.request('{"type": "audio_chunk"}', Error)).code == ErrorCode.MISSING_AUDIO
            assert (await client.request('{"type": "audio_chunk", "audio": "?"}', Error)).code == ErrorCode.BAD_BASE64
            await client.send(VideoFrame(frame=b"picture"))
            assert (await client.request(SECOND, Result)).vision_slices == 1
            assert not (await client.request(SECOND, Result)).is_listen
            assert (await client.request(Pause(timeout=50), Paused)).timeout == 50
            paused = await client.request(SECOND, Error)
            assert (paused.code, paused.error) == (ErrorCode.PAUSED, "Worker is paused"), paused
            assert worker.health()["slots"]["paused"] == 1
            await client.request(Resume(), Resumed)
            forced = await client.request(SECOND.model_copy(update={"force_listen": True}), Result)
            assert forced.is_listen and forced.end_of_turn, f"expected the open turn to end, got {forced}"
            await client.request(SECOND, Result)
            assert not (await client.request(SECOND, Result)).is_listen
            worker.think_s = 2 * ANSWER_S
            await client.send(SECOND, Interrupt())
            broken = await client.receive()
            assert broken.is_listen and broken.end_of_turn, f"expected the turn to end, got {broken}"
            assert isinstance(await client.receive(), Interrupted)
            await client.request(Pause(timeout=0.01), Paused)
            assert isinstance(await client.receive(), Timeout)

    run(scenario)


def test_health_has_the_workers_fields() -> None:
    from worker.conversion.conversions import Conversions
    from worker.http.health import health
    from worker.http.metrics import WorkerMetrics

    state = Status()
    settings = SimpleNamespace(engine=EngineConfig(), gpu_id=0)
    nothing = dict.fromkeys(("loaded", "speech", "speech_error"))
    parts = {"settings": settings, "targets": {}, "conversions": Conversions(None), **nothing}
    real = SimpleNamespace(check=lambda: None, status=state, **parts)
    report = SessionCapacity(2, None).report(0)
    free = SimpleNamespace(**vars(real), n_slots=0, n_free=0, is_ready=False, admission=lambda: report)
    expected = health(free, [], WorkerMetrics().totals)

    async def scenario() -> None:
        async with FakeWorker() as worker, connected(worker) as client, httpx.AsyncClient() as http:
            await client.request(Prepare(), Prepared)
            base = f"http://127.0.0.1:{worker.port}"
            body = (await http.get(f"{base}/health")).json()
            assert body.keys() == expected.keys(), f"got {body.keys() ^ expected.keys()} on one side only"
            for key in (
                "early_units",
                "early_pictures",
                "progress",
                "slots",
                "admission",
                "model",
                "models",
                "device",
                "kv",
                "compile",
                "versions",
            ):
                assert body[key].keys() == expected[key].keys(), f"{key}: {body[key].keys() ^ expected[key].keys()}"
            assert (body["state"], body["worker_status"]) == ("BUSY", "duplex_active")
            assert body["sessions"] == [{"session_id": "me", "units": 0, "paused": False, "kv_rows": 0}]
            assert (await http.get(f"{base}/readyz")).json() == {"ready": True, "state": "BUSY", "free_slots": 1}
            worker.state = "LOADING"
            assert (await http.get(f"{base}/readyz")).status_code == 503
            assert (await http.get(f"{base}/livez")).status_code == 200
            worker.state = "FAILED"
            assert (await http.get(f"{base}/livez")).status_code == 503
            assert (await http.get(f"{base}/nothing")).status_code == 404
            with pytest.raises(websockets.InvalidStatus) as refused:
                async with connected(worker, "late"):
                    pass
            assert refused.value.response.status_code == 403

    run(scenario)


def test_connection_waits_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker:
            async with connected(worker, "first"):
                waiting = asyncio.create_task(connect(worker, "second"))
                await wait_until(lambda: len(worker.connections) == 2, "a second connection")
                assert list(worker.sessions) == ["first"]
            client = await waiting
            assert list(worker.sessions) == ["second"]
            monkeypatch.setattr("benchmarks.serve.fake_worker.WAIT_FOR_SLOT_S", 0.05)
            with pytest.raises(websockets.InvalidStatus) as refused:
                async with connected(worker, "third"):
                    pass
            assert refused.value.response.status_code == 403
            await client.socket.close()
            await wait_until(lambda: not worker.sessions, "no session after the last client closed")

    run(scenario)


def test_frozen_worker_answers_after_thaw() -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=2) as worker, connected(worker) as client:
            await client.request(Prepare(), Prepared)
            worker.freeze()
            for connection in worker.connections:
                connection.transport.resume_reading()  # as websockets does once its queue is empty
            pong = await client.socket.ping()
            await client.send(SECOND)
            late = asyncio.create_task(connect(worker, "late"))
            await wait_until(lambda: len(worker.connections) == 2, "a new connection to be taken")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.receive()
            assert not late.done() and not pong.done() and worker.sessions == {"me": 0}
            worker.thaw()
            await asyncio.wait_for(pong, ANSWER_S)
            assert isinstance(await client.receive(), Result)
            await (await late).request(Prepare(), Prepared)
            await (await late).socket.close()

    run(scenario)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_crash_closes_without_a_close_frame(is_frozen: bool) -> None:
    async def scenario() -> None:
        async with FakeWorker(think_s=2 * ANSWER_S) as worker, connected(worker) as client:
            await client.request(Prepare(), Prepared)
            await client.send(SECOND)
            if is_frozen:
                worker.freeze()
            worker.crash()
            with pytest.raises(websockets.ConnectionClosedError) as lost:
                await client.receive()
            assert lost.value.rcvd is None, f"expected no close frame, got {lost.value.rcvd}"
            with pytest.raises(OSError):
                async with connected(worker):
                    pass

    run(scenario)


def test_runs_as_a_process(root: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.serve.fake_worker", "--port", "0", "--slots", "7"]
    with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) as process:
        try:
            found = LISTENING.search(process.stderr.readline())
            assert found, "expected the log line with the listening address"
            assert httpx.get(f"http://127.0.0.1:{found[1]}/health").json()["slots"]["total"] == 7
            process.send_signal(signal.SIGTERM)
            assert process.wait(ANSWER_S) == 0
        finally:
            process.kill()


def test_state_is_set_by_name() -> None:
    worker = FakeWorker()
    worker.state = "COMPILING"
    assert worker.state is State.COMPILING and not worker.is_ready
    with pytest.raises(ValueError):
        worker.state = "ASLEEP"
