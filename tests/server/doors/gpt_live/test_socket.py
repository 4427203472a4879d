"""GPT-Live sessions over real sockets, with a worker that follows a cycle of listening and speaking."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import websockets
from websockets.asyncio.server import ServerConnection

from benchmarks.serve.fake_worker import FakeWorker
from server.doors.gpt_live.session import GptLiveSession
from server.doors.live.door_context import SessionLimits
from server.doors.live.unit_run import MAX_LOSSES
from server.live.live_sessions import LiveSession
from tests.server.doors.realtime.realtime_client import speech
from tests.server.garbage import without_garbage
from tests.server.live_gateway import ANSWER_S, run, running_gateway, scripted_worker, wait_until

Json = dict[str, Any]
SECOND = base64.b64encode(bytes(48_000)).decode()


class LiveClient:
    """One session. log: all events but sound. sound: samples so far, [n] int16."""

    def __init__(self, socket: websockets.ClientConnection):
        self._socket = socket
        self.log: list[Json] = []
        self.sound = np.zeros(0, np.int16)

    async def send(self, kind: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": kind, **fields}))

    async def until(self, kind: str, seconds: float = ANSWER_S) -> Json:
        """The next event of this type."""
        async with asyncio.timeout(seconds):
            while (event := await self.receive())["type"] != kind:
                pass
        return event

    async def receive(self) -> Json:
        """The next event."""
        event = json.loads(await self._socket.recv())
        if event["type"] == "session.output_audio.delta":
            assert set(event) == {"type", "delta"}
            self.sound = np.append(self.sound, np.frombuffer(base64.b64decode(event["delta"]), "<i2"))
        else:
            self.log.append(event)
        return event

    async def start(self, **session: Any) -> Json:
        """Start the session. Returns: it."""
        await self.send("session.start", event_id="start", session={"model": "gpt-live-1", **session})
        event = await self.until("session.started")
        assert event["client_event_id"] == "start"
        return event["session"]


@asynccontextmanager
async def live(limits: SessionLimits | None = None, **cycle: int) -> AsyncIterator[LiveClient]:
    """A client of a gateway with one worker, which must be idle afterwards.

    limits: of sessions. cycle: of the worker's units.
    """
    async with FakeWorker(**cycle) as worker, running_gateway(worker, session_limits=limits) as gateway:
        url = f"ws://127.0.0.1:{gateway.port}/v1/live/sessions"
        async with websockets.connect(url, compression=None, proxy=None) as socket:
            yield LiveClient(socket)
        await gateway.wait_idle()


def test_sound_is_continuous_and_speech_is_in_it() -> None:
    async def scenario() -> None:
        async with live(n_listen=1, n_speak=2) as client:
            begun = time.monotonic()
            session = await client.start(instructions="Be brief.")
            assert session["status"] == "active" and session["instructions"] == "Be brief."
            for _ in range(3):
                await client.send("session.input_audio.append", audio=SECOND)
            first = await client.until("session.output_transcript.delta")
            second = first
            while second["start_ms"] == first["start_ms"]:
                second = await client.until("session.output_transcript.delta")
            assert first["end_ms"] > first["start_ms"] and second["end_ms"] > first["end_ms"]
            while len(client.sound) < 1.2 * 24_000:
                await client.receive()
            lasted = time.monotonic() - begun
            assert len(client.sound) / 24_000 <= lasted, "expected sound at the pace of the clock, not before"
            await client.send("session.close", event_id="end")
            closed = await client.until("session.closed")
            assert closed["reason"] == "close_requested" and closed["client_event_id"] == "end"
            assert closed["usage"]["seconds"] == pytest.approx(3, abs=0.05)
            spoken = np.flatnonzero(client.sound)
            assert len(spoken) and spoken[0] / 24 == pytest.approx(first["start_ms"], abs=150)

    run(scenario)


def test_commentary_is_said_and_errors_leave_the_session_open() -> None:
    async def scenario() -> None:
        async with live(n_listen=1000, n_speak=1) as client:
            await client.send("session.input_audio.append", audio=SECOND)
            early = await client.until("error")
            assert early["error"]["code"] == "session_not_started"
            await client.start()
            await client.send("session.input_audio.append", audio="?", event_id="bad")
            error = (await client.until("error"))["error"]
            assert (error["code"], error["client_event_id"]) == ("invalid_value", "bad")
            await client.send("response.create", event_id="r1")
            assert (await client.until("error"))["error"]["code"] == "no_active_delegation"
            await client.send("session.input_audio.mute", event_id="m1")
            assert (await client.until("session.input_audio.muted"))["client_event_id"] == "m1"
            await client.send("session.commentary.append", event_id="c1", content="Say hello.", delegation_id=None)
            appended = await client.until("session.commentary.appended")
            assert appended["client_event_id"] == "c1" and appended["end_ms"] >= appended["start_ms"]
            assert (await client.until("session.output_transcript.delta"))["delta"]

    run(scenario)


def test_events_that_are_refused_keep_no_session_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.doors.gpt_live.socket.POLL_S", 0.05)

    async def scenario() -> None:
        async with live(SessionLimits(idle_s=0.4), n_listen=1000) as client:
            await client.start()

            async def flood() -> None:
                while True:
                    await client.send("session.fly")
                    await client.send("response.create")
                    await asyncio.sleep(0.05)

            flooding = asyncio.create_task(flood())
            assert (await client.until("session.closed", 5.0))["reason"] == "expired"
            flooding.cancel()

    run(scenario)


def test_a_context_that_the_worker_refuses_ends_the_session() -> None:
    async def refuse(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(json.dumps({"type": "error", "error": "no such voice", "code": "bad_voice"}))
        await connection.wait_closed()

    async def scenario() -> None:
        async with scripted_worker(refuse) as port, running_gateway(port) as gateway:
            await wait_until(lambda: gateway.gateway.dispatcher.workers.n_ready, "a worker")
            url = f"ws://127.0.0.1:{gateway.port}/v1/live/sessions"
            async with websockets.connect(url, compression=None, proxy=None) as socket:
                client = LiveClient(socket)
                await client.send("session.start", event_id="start", session={"model": "gpt-live-1"})
                error = (await client.until("error"))["error"]
                assert (error["code"], error["client_event_id"]) == ("bad_voice", "start")
                await socket.wait_closed()
                assert socket.close_code == 1011, socket.close_code
            await gateway.wait_idle()

    run(scenario)


def test_a_lost_worker_is_replaced() -> None:
    async def scenario() -> None:
        async with (
            FakeWorker(n_listen=1000, n_speak=1) as first,
            FakeWorker(n_listen=1000, n_speak=1) as second,
            running_gateway(first, second) as gateway,
        ):
            url = f"ws://127.0.0.1:{gateway.port}/v1/live/sessions"
            async with websockets.connect(url, compression=None, proxy=None) as socket:
                client = LiveClient(socket)
                await client.start()
                lost, other = (first, second) if first.sessions else (second, first)
                lost.crash()
                await wait_until(lambda: other.sessions, "another worker's session")
                await client.send("session.commentary.append", content="Say hello.", delegation_id=None)
                await client.until("session.commentary.appended")
                assert (await client.until("session.output_transcript.delta"))["delta"]
                kinds = [event["type"] for event in client.log]
                assert kinds.count("session.started") == 1 and "error" not in kinds, kinds
            await gateway.wait_idle()

    run(scenario)


def test_a_shutdown_waits_for_the_end_of_a_reply() -> None:
    async def scenario() -> None:
        async with (
            FakeWorker(n_listen=1, n_speak=2) as worker,
            running_gateway(worker) as gateway,
            without_garbage(LiveSession, GptLiveSession),
        ):
            url = f"ws://127.0.0.1:{gateway.port}/v1/live/sessions"
            async with websockets.connect(url, compression=None, proxy=None) as socket:
                client = LiveClient(socket)
                await client.start()
                for _ in range(2):
                    await client.send("session.input_audio.append", audio=SECOND)
                await client.until("session.output_transcript.delta")
                gateway.gateway.live.drain()
                closed = await client.until("session.closed")
                n_said = sum(event["type"] == "session.output_transcript.delta" for event in client.log)
                assert n_said == 2, f"expected both seconds of the reply, got {n_said}"
                assert np.count_nonzero(client.sound) > 1.8 * 24_000, "expected its sound"
                await socket.wait_closed()
                assert (closed["reason"], socket.close_code) == ("connection_lost", 1001)
            await gateway.wait_idle()

    run(scenario)


def test_a_session_that_loses_each_worker_ends() -> None:
    n_sessions = 0

    async def fail(connection: ServerConnection) -> None:
        nonlocal n_sessions
        n_sessions += 1
        await connection.recv()
        await connection.close(1011, "broken")

    async def scenario() -> None:
        async with scripted_worker(fail) as port, running_gateway(port) as gateway:
            await wait_until(lambda: gateway.gateway.dispatcher.workers.n_ready, "a worker")
            url = f"ws://127.0.0.1:{gateway.port}/v1/live/sessions"
            async with websockets.connect(url, compression=None, proxy=None) as socket:
                await LiveClient(socket).send("session.start", session={"model": "gpt-live-1"})
                await socket.wait_closed()
                assert (socket.close_code, n_sessions) == (1011, MAX_LOSSES)
            await gateway.wait_idle()

    run(scenario)


def test_the_clients_voice_ends_a_reply() -> None:
    """With real speech over nine seconds of a reply."""

    async def scenario() -> None:
        async with live(n_listen=1000, n_speak=9) as client:
            await client.start()
            await client.send("session.commentary.append", content="Count.", delegation_id=None)
            await client.until("session.output_transcript.delta")
            await client.send("session.input_audio.append", audio=base64.b64encode(speech()).decode())
            begun = len(client.sound)
            async with asyncio.timeout(ANSWER_S):
                while len(client.sound) - begun < 24_000 or client.sound[-12_000:].any():
                    await client.receive()
            lasted = np.count_nonzero(client.sound) / 24_000
            assert lasted < 7, f"expected the reply to end, got {lasted:.1f} s of it"

    run(scenario)
