"""Item 39 of the conformance list: the gateway process in front of workers of the public implementation's tests."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

from tests.conformance.servers import WireClient
from tests.e2e.serving import ServerProcess, free_port
from tests.server.reference_worker import ReferenceWorker, reference_worker

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
READY_S = 15


@contextmanager
def threaded_worker() -> Iterator[ReferenceWorker]:
    """A worker whose event loop runs on a thread."""
    started, stop = threading.Event(), asyncio.Event()
    found: list[tuple[ReferenceWorker, asyncio.AbstractEventLoop]] = []

    async def serve() -> None:
        async with reference_worker() as worker:
            found.append((worker, asyncio.get_running_loop()))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="reference-worker", daemon=True)
    thread.start()
    assert started.wait(READY_S), "expected the worker to start"
    [(worker, loop)] = found
    try:
        yield worker
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a gateway started as the public implementation's tests start it."""
    folder: Path = tmp_path_factory.mktemp("reference")
    with threaded_worker() as first, threaded_worker() as second:
        addresses = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
        flags = ("--http", "--workers", addresses, "--max-queue-size", "20", "--log-dir", str(folder))
        program = ServerProcess("server.main", "--port", str(free_port()), *flags)
        try:
            yield program.wait_listening()
        finally:
            program.kill()


@contextmanager
def opened(port: int, path: str) -> Iterator[WireClient]:
    with connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None) as connection:
        yield WireClient(connection)


def test_item_39_workers_become_idle(port: int) -> None:
    asyncio.run(asyncio.wait_for(_until_idle(port, 2), READY_S))


async def _until_idle(port: int, n: int) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        while (await http.get(f"http://127.0.0.1:{port}/status")).json()["idle_workers"] < n:
            await asyncio.sleep(0.1)


def test_item_39_chats_at_once(port: int) -> None:
    async def ask(http: httpx.AsyncClient) -> bool:
        answer = await http.post(f"http://127.0.0.1:{port}/api/chat", json=CHAT)
        return answer.json()["success"] is True and answer.json()["text"] == "hello"

    async def ask_all() -> list[bool]:
        await _until_idle(port, 2)
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            return await asyncio.gather(*(ask(http) for _ in range(6)))

    assert asyncio.run(ask_all()) == [True] * 6


def test_item_39_streaming_turns(port: int) -> None:
    asyncio.run(_until_idle(port, 2))
    with opened(port, "/ws/streaming/s1") as first, opened(port, "/ws/streaming/s2") as second:
        for client in (first, second):
            client.send(type="prefill", session_id="s", is_last_chunk=True, **CHAT)
        for client in (first, second):
            assert client.until("prefill_done")[-1]["message_count"] == 1
            client.send(type="generate", session_id="s", generate_audio=False, max_new_tokens=100)
        for client in (first, second):
            answer = client.until("done")
            assert "".join(one.get("text_delta", "") for one in answer) == "part 0 part 1 "
            client.send(type="close")
            assert client.close_code() == 1000


def test_item_39_duplex(port: int) -> None:
    asyncio.run(_until_idle(port, 2))
    with opened(port, "/ws/duplex/d1") as client:
        assert client.until("queue_done")
        client.send(type="prepare", system_prompt="mock test", config={})
        assert client.receive() == {"type": "prepared", "prompt_length": 50}
        for _ in range(3):
            client.send(type="audio_chunk", audio_base64="AAAA" * 1067)
            assert client.receive()["audio_base64"] is None
        client.send(type="stop")
        assert client.receive() == {"type": "stopped"}
        assert client.close_code() == 1000
