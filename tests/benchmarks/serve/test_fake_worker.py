"""The worker without a model answers as a worker does, and comes to harm on command."""

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
    """A socket that speaks in messages. spec: of the last `prepare`."""

    def __init__(self, socket: websockets.ClientConnection):
        self.socket, self.spec = socket, PLAIN_SPEC

    async def say(self, *messages: Message | str | bytes) -> None:
        for message in messages:
            if isinstance(message, Prepare):
                self.spec = message.spec
            await self.socket.send(message if isinstance(message, str | bytes) else write(message, self.spec))

    async def hear(self) -> ServerMessage:
        async with asyncio.timeout(ANSWER_S):
            return read_server(await self.socket.recv(), self.spec)

    async def ask(self, message: Message | str | bytes, kind: type[Message]) -> Any:
        await self.say(message)
        heard = await self.hear()
        assert isinstance(heard, kind), f"expected {kind.__name__}, got {heard}"
        return heard


async def connect(worker: FakeWorker, name: str) -> Client:
    url = f"ws://127.0.0.1:{worker.port}/ws/duplex?session_id={name}"
    return Client(await websockets.connect(url, compression=None, max_size=None, ping_interval=None))


@asynccontextmanager
async def connected(worker: FakeWorker, name: str = "me") -> AsyncIterator[Client]:
    client = await connect(worker, name)
    async with client.socket:
        yield client


async def until(fits: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + ANSWER_S
    while not fits():
        assert time.monotonic() < end, f"expected {what} within {ANSWER_S:g} s"
        await asyncio.sleep(0.005)


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(story())


def test_a_round_of_units() -> None:
    async def story() -> None:
        async with FakeWorker(n_listen=2, n_speak=2) as worker, connected(worker) as client:
            prepared = await client.ask(Prepare(system_prompt="Hello.", config={"nonsense": 1}), Prepared)
            assert (prepared.session_id, prepared.prompt_length, len(prepared.notes)) == ("me", 6, 1), prepared
            results = [await client.ask(SECOND, Result) for _ in range(5)]
            told = [(one.is_listen, one.end_of_turn, one.current_time) for one in results]
            expected = [(True, False, 1), (True, False, 2), (False, False, 3), (False, True, 4), (True, False, 5)]
            assert told == expected, f"expected {expected}, got {told}"
            for one in results:
                sound = one.audio_data.samples("result") if one.audio_data else np.zeros(0)
                assert len(sound) == (0 if one.is_listen else 24_000), f"unit {one.current_time}: got {len(sound)}"
                assert bool(one.text) != one.is_listen
                assert 0 <= one.cost_all_ms <= one.wall_clock_ms + 0.1, one
            assert worker.sessions == {"me": 5}, worker.sessions
            assert np.ptp(results[2].audio_data.samples("result")) > 0.3
            stopped = await client.ask(Stop(), Stopped)
            assert stopped.session_id == "me" and worker.sessions == {}
            await client.socket.wait_closed()
            assert client.socket.close_code == 1000, client.socket.close_code

    run(story)


@pytest.mark.parametrize("form", ["pcm16", "float32"])
def test_binary_frames_and_parts(form: str) -> None:
    async def story() -> None:
        async with FakeWorker(n_listen=0) as worker, connected(worker) as client:
            spec = Spec(sound_in=form, sound_out=form, partial_results=True)
            await client.ask(Prepare(spec=spec), Prepared)
            chunk = write(SECOND, spec)
            assert isinstance(chunk, bytes)
            await client.say(chunk)
            heard = [await client.hear() for _ in range(3)]
            kinds = [type(one) for one in heard]
            assert kinds == [Partial, Partial, Result], f"expected two parts and a result, got {kinds}"
            assert (heard[2].n_parts, heard[2].audio_data, heard[2].text) == (2, None, heard[0].text)
            assert sum(len(one.audio_data.samples("part")) for one in heard[:2]) == 24_000

    run(story)


def test_what_else_clients_say() -> None:
    async def story() -> None:
        async with FakeWorker(n_listen=1, n_speak=9) as worker, connected(worker) as client:
            early = await client.ask(SECOND, Error)
            assert early.code == ErrorCode.NOT_PREPARED, early
            assert (await client.ask(Prepare(config={"temperature": 99}), Error)).code == ErrorCode.BAD_CONFIG
            await client.ask(Prepare(), Prepared)
            assert (await client.ask("{", Error)).code == ErrorCode.BAD_JSON
            assert (await client.ask(b"12345", Error)).code == ErrorCode.BINARY_NOT_AGREED
            assert (await client.ask('{"type": "audio_chunk"}', Error)).code == ErrorCode.MISSING_AUDIO
            assert (await client.ask('{"type": "audio_chunk", "audio": "?"}', Error)).code == ErrorCode.BAD_BASE64
            await client.say(VideoFrame(frame=b"picture"))
            assert (await client.ask(SECOND, Result)).vision_slices == 1
            assert not (await client.ask(SECOND, Result)).is_listen
            assert (await client.ask(Pause(timeout=50), Paused)).timeout == 50
            paused = await client.ask(SECOND, Error)
            assert (paused.code, paused.error) == (ErrorCode.PAUSED, "Worker is paused"), paused
            assert worker.health()["slots"]["paused"] == 1
            await client.ask(Resume(), Resumed)
            forced = await client.ask(SECOND.model_copy(update={"force_listen": True}), Result)
            assert forced.is_listen and forced.end_of_turn, f"expected the open turn to end, got {forced}"
            await client.ask(SECOND, Result)
            assert not (await client.ask(SECOND, Result)).is_listen
            worker.think_s = 2 * ANSWER_S
            await client.say(SECOND, Interrupt())
            broken = await client.hear()
            assert broken.is_listen and broken.end_of_turn, f"expected the turn to end, got {broken}"
            assert isinstance(await client.hear(), Interrupted)
            await client.ask(Pause(timeout=0.01), Paused)
            assert isinstance(await client.hear(), Timeout)

    run(story)


def test_health_has_what_a_workers_has() -> None:
    from worker.http.health import health

    state = Status()
    settings = SimpleNamespace(engine=EngineConfig(), gpu_id=0)
    real = SimpleNamespace(check=lambda: None, status=state, loaded=None, settings=settings, targets={})
    expected = health(SimpleNamespace(**vars(real), n_slots=0, n_free=0, is_ready=False), [], {"units": 0, "ms": 0.0})

    async def story() -> None:
        async with FakeWorker() as worker, connected(worker) as client, httpx.AsyncClient() as http:
            await client.ask(Prepare(), Prepared)
            base = f"http://127.0.0.1:{worker.port}"
            body = (await http.get(f"{base}/health")).json()
            assert body.keys() == expected.keys(), f"got {body.keys() ^ expected.keys()} on one side only"
            for key in ("progress", "slots", "model", "device", "kv", "compile", "versions"):
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

    run(story)


def test_a_slot_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with FakeWorker(slots=1) as worker:
            async with connected(worker, "first"):
                waiting = asyncio.create_task(connect(worker, "second"))
                await until(lambda: len(worker.connections) == 2, "a second connection")
                assert list(worker.sessions) == ["first"]
            client = await waiting
            assert list(worker.sessions) == ["second"]
            monkeypatch.setattr("benchmarks.serve.fake_worker.WAIT_FOR_SLOT_S", 0.05)
            with pytest.raises(websockets.InvalidStatus) as refused:
                async with connected(worker, "third"):
                    pass
            assert refused.value.response.status_code == 403
            await client.socket.close()
            await until(lambda: not worker.sessions, "no session once the last client has gone")

    run(story)


def test_a_frozen_worker_thaws() -> None:
    async def story() -> None:
        async with FakeWorker(slots=2) as worker, connected(worker) as client:
            await client.ask(Prepare(), Prepared)
            worker.freeze()
            for connection in worker.connections:
                connection.transport.resume_reading()  # as websockets does once its queue is empty
            pong = await client.socket.ping()
            await client.say(SECOND)
            late = asyncio.create_task(connect(worker, "late"))
            await until(lambda: len(worker.connections) == 2, "a new connection to be taken")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.hear()
            assert not late.done() and not pong.done() and worker.sessions == {"me": 0}
            worker.thaw()
            await asyncio.wait_for(pong, ANSWER_S)
            assert isinstance(await client.hear(), Result)
            await (await late).ask(Prepare(), Prepared)
            await (await late).socket.close()

    run(story)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_crash_says_nothing(is_frozen: bool) -> None:
    async def story() -> None:
        async with FakeWorker(think_s=2 * ANSWER_S) as worker, connected(worker) as client:
            await client.ask(Prepare(), Prepared)
            await client.say(SECOND)
            if is_frozen:
                worker.freeze()
            worker.crash()
            with pytest.raises(websockets.ConnectionClosedError) as lost:
                await client.hear()
            assert lost.value.rcvd is None, f"expected no close frame, got {lost.value.rcvd}"
            with pytest.raises(OSError):
                async with connected(worker):
                    pass

    run(story)


def test_as_a_process(root: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.serve.fake_worker", "--port", "0", "--slots", "7"]
    with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) as process:
        try:
            found = LISTENING.search(process.stderr.readline())
            assert found, "expected the line that says where it listens"
            assert httpx.get(f"http://127.0.0.1:{found[1]}/health").json()["slots"]["total"] == 7
            process.send_signal(signal.SIGTERM)
            assert process.wait(ANSWER_S) == 0
        finally:
            process.kill()


def test_state_names() -> None:
    worker = FakeWorker()
    worker.state = "COMPILING"
    assert worker.state is State.COMPILING and not worker.is_ready
    with pytest.raises(ValueError):
        worker.state = "ASLEEP"
