"""`DuplexClient` against a worker without a model, and against servers that violate the protocol."""

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection, serve

from benchmarks.serve.fake_worker import FakeWorker
from clients.duplex import DuplexClient, connect
from clients.errors import ConnectionLost, Refused, ServerError
from clients.resumption import ConnectionChange
from tests.server.live_gateway import running_gateway
from worker.protocol.adjust_messages import Adjust, Adjusted
from worker.protocol.gateway_messages import Queued, QueueDone, QueueUpdate
from worker.protocol.messages import (
    AudioChunk,
    ClientMessage,
    Error,
    Partial,
    Prepared,
    Result,
    ServerMessage,
    Spec,
    Stopped,
    Timeout,
    read_text,
    write,
)
from worker.protocol.text_messages import InsertText, TextInserted

WAIT_S = 30.0
SECOND = np.zeros(16_000, np.float32)
BYTES = Spec(partial_results=True, sound_in="pcm16", sound_out="pcm16")


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def timed() -> None:
        async with asyncio.timeout(WAIT_S):
            await story()

    asyncio.run(timed())


def address(worker: FakeWorker, scheme: str = "ws") -> str:
    return f"{scheme}://127.0.0.1:{worker.port}/ws/duplex"


async def all_of(client: DuplexClient) -> list[ServerMessage]:
    return [message async for message in client]


@asynccontextmanager
async def scripted(*messages: ServerMessage | str, n_received: int = 0, code: int = 1000) -> AsyncIterator[str]:
    """A server that sends a message, receives `n_received`, sends the others and closes. Yields: its address."""

    async def handler(socket: ServerConnection) -> None:
        for number, message in enumerate(messages):
            if number == 1:
                for _ in range(n_received):
                    await socket.recv()
            await socket.send(message if isinstance(message, str) else write(message))
        await socket.close(code)

    async with serve(handler, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("spec", [Spec(), BYTES])
def test_conversation(spec: Spec) -> None:
    async def story() -> None:
        async with FakeWorker(n_listen=1, n_speak=2) as worker, connect(address(worker), "me") as client:
            prepared = await client.prepare("Hello.", ref_audio=SECOND, config={"seed": 1, "what": 2}, spec=spec)
            assert client.spec == spec and len(prepared.notes) == 1, prepared
            listening = asyncio.create_task(all_of(client))
            await client.send_unit(SECOND, [b"jpeg"])
            await client.send_picture(b"jpeg")
            await client.send_unit(SECOND, [b"jpeg"])
            await client.send_picture(b"jpeg")
            await client.send_unit(SECOND)
            assert (await client.pause(60)).timeout == 60
            await client.resume()
            await client.send_unit(SECOND, force_listen=True)
            await client.interrupt()
            assert worker.sessions == {"me": 4}
            assert (await client.stop()).session_id == "me"
            received = await listening
            results = [one for one in received if isinstance(one, Result)]
            assert [one.is_listen for one in results] == [True, False, False, True], results
            assert [one.vision_slices for one in results] == [1, 2, 1, 0]
            sounds = [len(one.audio_data.samples("sound")) for one in received if one.audio_data]
            assert sum(sounds) == 2 * 24_000, f"expected two seconds of sound, got parts of {sounds}"
            n_parts = sum(isinstance(one, Partial) for one in received)
            assert (n_parts > 0) == spec.partial_results

    run(story)


def test_requests_raise_server_errors() -> None:
    async def story() -> None:
        async with FakeWorker() as worker, connect(address(worker)) as client:
            with pytest.raises(ServerError, match="prepare: expected an answer, got error bad_config") as refused:
                await client.prepare(config={"temperature": 99})
            assert refused.value.code == "bad_config"
            await client.send_unit(SECOND)
            error = await anext(client)
            assert isinstance(error, Error) and error.code == "not_prepared", error
            await client.prepare()
            await client.pause(0.01)
            ends = await all_of(client)
            assert [type(one) for one in ends] == [Timeout], f"expected one Timeout and a clean end, got {ends}"

    run(story)


def test_connect_errors() -> None:
    async def story() -> None:
        async with FakeWorker() as worker:
            worker.state = "LOADING"
            with pytest.raises(Refused, match="HTTP 403: no slot became free in time") as refused:
                async with connect(address(worker)):
                    pass
            assert refused.value.status == 403
            with pytest.raises(Refused, match="HTTP 404: unknown path"):
                async with connect(f"ws://127.0.0.1:{worker.port}"):
                    pass
        with pytest.raises(ConnectionLost, match="expected a server that answers, got"):
            async with connect(address(worker)):
                pass

    run(story)


def test_lost_connection_fails_requests_and_iteration() -> None:
    async def story() -> None:
        async with FakeWorker(think_s=2 * WAIT_S) as worker, connect(address(worker)) as client:
            await client.prepare()
            await client.send_unit(SECOND)
            pausing = asyncio.create_task(client.pause())
            while not worker.sessions:
                await asyncio.sleep(0)
            worker.crash()
            for waits in (pausing, all_of(client), all_of(client), client.stop(), client.send_unit(SECOND)):
                with pytest.raises(ConnectionLost, match="got the end of the connection"):
                    await waits

    run(story)


def test_reports_queue_positions() -> None:
    queued = Queued(estimated_wait_s=12.0, position=2, queue_length=2, ticket_id="q_0a1b2c3d4e5f")
    moved = QueueUpdate(estimated_wait_s=6.0, position=1, queue_length=2)
    messages = (queued, moved, '{"type":"of_a_later_version"}', QueueDone(), Prepared(prompt_length=1), Stopped())

    async def story() -> None:
        places: list[Any] = []
        async with scripted(*messages) as url, connect(url, on_queue=places.append) as client:
            assert places == [queued, moved], places
            assert client.session_id
        async with scripted(Error(error="Queue full", code="queue_full"), code=1013) as url:
            with pytest.raises(ServerError) as full:
                async with connect(url):
                    pass
            assert full.value.code == "queue_full", full.value
        async with scripted(queued, code=1012) as url:
            with pytest.raises(ConnectionLost, match="close code 1012"):
                async with connect(url):
                    pass

    run(story)


def test_server_that_closes_without_an_answer() -> None:
    lost = Error(error="the worker is gone", code="worker_lost")

    async def story() -> None:
        async with scripted(QueueDone(), Prepared(prompt_length=1), lost, code=1011) as url, connect(url) as client:
            with pytest.raises(ConnectionLost, match="close code 1011; the last error was worker_lost"):
                await all_of(client)

    run(story)


def test_server_that_violates_the_protocol() -> None:
    async def story() -> None:
        async with scripted(QueueDone(), '{"type": "prepared"}') as url, connect(url) as client:
            with pytest.raises(ConnectionLost, match=r"a message of the protocol, got prepared\.prompt_length"):
                await all_of(client)

    run(story)


def test_server_without_options() -> None:
    """An older server ignores `spec`, so sound is sent as text."""

    async def story() -> None:
        async with scripted(QueueDone(), '{"type": "prepared", "prompt_length": 3}', n_received=1) as url:
            with pytest.raises(ConnectionLost):
                async with connect(url) as client:
                    await client.prepare(spec=BYTES)
                    assert client.spec == Spec(), client.spec
                    await all_of(client)

    run(story)


def test_tls(tmp_path: Path) -> None:
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=me"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")]
    try:
        subprocess.run(["openssl", "req", "-x509", *made, *names, *files], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs openssl to make a certificate")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "cert", tmp_path / "key")

    async def story() -> None:
        async with FakeWorker(tls=tls) as worker:
            url = address(worker, "wss")
            with pytest.raises(ConnectionLost, match="expected a certificate that is trusted"):
                async with connect(url):
                    pass
            for trust in ({"insecure": True}, {"ssl": ssl.create_default_context(cafile=tmp_path / "cert")}):
                async with connect(url, **trust) as client:
                    await client.prepare()

    run(story)


def test_sends_forced_units_and_texts() -> None:
    async def story() -> None:
        refusal = Error(error="text: expected less, got more", code="context_full")
        listen = {"is_listen": True, "current_time": 1, "cost_all_ms": 1.0, "server_send_ts": 1.0}
        result = Result(**listen, wall_clock_ms=1.0, kv_cache_length=1)
        received: list[ClientMessage] = []

        async def handler(socket: ServerConnection) -> None:
            for message in (result, TextInserted(n_rows=7), refusal):
                received.append(read_text(str(await socket.recv())))
                await socket.send(write(message))
            await socket.wait_closed()

        async with serve(handler, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with connect(f"ws://127.0.0.1:{port}/ws/duplex") as client:
                await client.send_unit(SECOND[:5], force_speak=True, close_early=True)
                assert (await client.insert_text("Hi.", "system")).n_rows == 7
                with pytest.raises(ServerError) as caught:
                    await client.insert_text("Hi again.")
                assert caught.value.code == "context_full"
        chunk, *texts = received
        assert isinstance(chunk, AudioChunk) and len(chunk.samples()) == 5
        assert (chunk.force_speak, chunk.close_early, chunk.force_listen) == (True, True, False)
        assert texts == [InsertText(text="Hi.", role="system"), InsertText(text="Hi again.", role="user")]

    run(story)


def test_adjust_sends_its_fields_and_returns_the_answer() -> None:
    async def story() -> None:
        answer = Adjusted(applied={"config": {"top_k": 3}}, from_unit=4, notes=["later"])
        refusal = Error(error="setting top_p: expected less, got more", code="bad_config")
        received: list[str] = []

        async def handler(socket: ServerConnection) -> None:
            for message in (answer, refusal):
                received.append(str(await socket.recv()))
                await socket.send(write(message))
            await socket.wait_closed()

        async with serve(handler, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with connect(f"ws://127.0.0.1:{port}/ws/duplex") as client:
                given = {
                    "config": {"top_k": 3, "listen_top_k": None},
                    "system_prompt": "Hi.",
                    "ref_audio_path": "a.wav",
                }
                assert await client.adjust(**given, tts_ref_audio=SECOND, max_slice_nums=2) == answer
                with pytest.raises(ServerError, match="top_p"):
                    await client.adjust(config={"top_p": 5})
        first = read_text(received[0])
        assert isinstance(first, Adjust) and first.model_dump(include=set(given)) == given, received
        assert first.max_slice_nums == 2 and first.tts_ref_audio().shape == SECOND.shape

    run(story)


def test_a_conversation_goes_on_after_lost_connections() -> None:
    """Each unit is processed once, also those that were lost on the way. Without the right token it gives up."""

    async def story() -> None:
        changes: list[ConnectionChange] = []
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            url = f"ws://127.0.0.1:{gateway.port}"
            async with connect(url, "omni_me", on_connection=changes.append) as client:
                await client.prepare(spec=Spec(resume=True, partial_results=True, sound_in="pcm16", sound_out="pcm16"))
                listening = asyncio.create_task(all_of(client))
                for number in range(24):
                    await client.send_unit(SECOND)
                    if number in (3, 11):
                        client._socket.transport.abort()
                await client.interrupt()
                client._socket.transport.abort()
                await client.stop()
                times = [message.current_time for message in await listening if isinstance(message, Result)]
            assert times == list(range(1, 25)), f"expected the results of 24 units in order, got {times}"
            assert worker.total_requests == 24, f"expected each unit once, got {worker.total_requests}"
            assert [change.is_back for change in changes] == [False, True] * 3, changes
            await gateway.wait_idle()

            async with connect(url, "omni_me", on_connection=changes.append) as client:
                await client.prepare(spec=Spec(resume=True))
                client._resumption._token = "another"
                client._socket.transport.abort()
                with pytest.raises(ConnectionLost):
                    await all_of(client)
            assert [change.is_back for change in changes[6:]] == [False], changes

    run(story)
