"""A gateway in this process on a free port, its clients, and workers that do just what a test is about."""

import asyncio
import base64
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import websockets
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from benchmarks.serve.fake_worker import FakeWorker
from server.app import Gateway, build_app
from server.dispatch.workers import WorkerAddress
from server.health_watch import Watch
from server.serving import ASKING, build_gateway
from worker.config.service import default_config
from worker.protocol.connection import listen, live_server

ANSWER_S = 30.0  # on a machine that has much else to do
SOON_S = 10.0
PREPARE = {"type": "prepare"}
CHUNK = {"type": "audio_chunk", "audio_base64": base64.b64encode(bytes(4 * 800)).decode()}
STOP = {"type": "stop"}
Json = dict[str, Any]


class Client:
    """One socket of the gateway, in JSON objects."""

    def __init__(self, socket: websockets.ClientConnection):
        self.socket = socket

    async def say(self, *messages: Json | str | bytes) -> None:
        for message in messages:
            await self.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))

    async def hear_raw(self, seconds: float = ANSWER_S) -> str | bytes:
        async with asyncio.timeout(seconds):
            return await self.socket.recv()

    async def hear(self, kind: str, seconds: float = ANSWER_S) -> Json:
        """The next message, which is of this type."""
        message = json.loads(await self.hear_raw(seconds))
        assert message["type"] == kind, f"expected {kind}, got {str(message)[:500]}"
        return message

    async def until(self, kind: str, seconds: float = ANSWER_S) -> Json:
        """The first message of this type; news of the queue before it are passed over."""
        async with asyncio.timeout(seconds):
            while (message := json.loads(await self.socket.recv()))["type"] != kind:
                assert message["type"] in ("queued", "queue_update"), f"expected {kind}, got {str(message)[:500]}"
        return message

    async def seated(self) -> "Client":
        await self.until("queue_done")
        return self

    async def prepared(self) -> "Client":
        await self.seated()
        await self.say(PREPARE)
        await self.hear("prepared")
        return self

    async def unit(self) -> Json:
        await self.say(CHUNK)
        return await self.hear("result")

    async def closed(self, seconds: float = ANSWER_S) -> tuple[int | None, str | None]:
        """Code and reason, once the gateway has closed."""
        async with asyncio.timeout(seconds):
            await self.socket.wait_closed()
        return self.socket.close_code, self.socket.close_reason

    async def close(self) -> None:
        await self.socket.close()

    def abort(self) -> None:
        """ClientDisconnected without a word, and without what is still on its way."""
        connection = self.socket.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.transport.abort()


@dataclass
class Running:
    """A gateway that listens."""

    port: int
    gateway: Gateway
    http: httpx.AsyncClient
    watch: Watch

    async def connect(self, name: str = "omni_me", **options: Any) -> Client:
        options = {"compression": None, "max_size": None, "ping_interval": None, "close_timeout": 2, **options}
        return Client(await websockets.connect(f"ws://127.0.0.1:{self.port}/ws/duplex/{name}", **options))

    async def get(self, path: str) -> Any:
        return (await self.http.get(path)).json()

    async def clean(self) -> None:
        """Until every slot is free again and nobody is there."""
        dispatcher, duplex = self.gateway.dispatcher, self.gateway.duplex

        def is_clean() -> bool:
            return not (dispatcher.workers.leases or len(dispatcher.queue) or duplex.connections or duplex._store.used)

        await until(is_clean, "no lease, no ticket, no connection, nothing kept")


@asynccontextmanager
async def running_gateway(
    *workers: FakeWorker | int, reports: Path = Path("/nonexistent"), options: Json | None = None, **service: Any
) -> AsyncIterator[Running]:
    """workers: themselves, or their ports. reports: folder for diagnostics. options: of uvicorn. service: settings."""
    config = default_config()
    config = config.model_copy(update={"service": config.service.model_copy(update=service)})
    addresses = [WorkerAddress("127.0.0.1", one if isinstance(one, int) else one.port) for one in workers]
    plain = {"trust_env": False, "verify": False}  # loading certificates takes longer than most tests
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        async with (
            httpx.AsyncClient(limits=ASKING, **plain) as asking,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S, **plain) as http,
        ):
            gateway, watch = build_gateway(config, addresses, asking, reports)
            server = live_server(build_app(gateway), **(options or {}))
            serving = asyncio.create_task(server.serve([listening]))
            await until(lambda: server.started or serving.done(), "the gateway to start")
            watch.start()
            expected = sum(isinstance(one, FakeWorker) and one.is_ready for one in workers)
            await until(lambda: gateway.dispatcher.workers.n_ready >= expected, f"{expected} workers to be ready")
            try:
                yield Running(port, gateway, http, watch)
            finally:
                gateway.duplex.end_all()
                server.should_exit = True
                await serving
                await watch.stop()


WorkerScript = Callable[[ServerConnection], Awaitable[None]]


@asynccontextmanager
async def special_worker(talk: WorkerScript, slots: int = 4, redirect: str | None = None) -> AsyncIterator[int]:
    """A worker that says of itself that all is well, and does what `talk` does.

    redirect: where it sends everybody instead. Yields: its port.
    """
    health = json.dumps({"state": "IDLE", "worker_status": "idle", "slots": {"total": slots, "free": slots}}).encode()

    async def answer(connection: ServerConnection, request: Request) -> Response | None:
        if urlsplit(request.path).path == "/ws/duplex":
            return None if redirect is None else Response(302, "Found", Headers({"Location": redirect}), b"")
        headers = Headers({"Content-Length": str(len(health)), "Connection": "close"})
        return Response(200, HTTPStatus.OK.phrase, headers, health)

    options = {"compression": None, "max_size": None, "ping_interval": None, "close_timeout": 1}
    async with serve(talk, "127.0.0.1", 0, process_request=answer, **options) as server:
        yield server.sockets[0].getsockname()[1]


async def until(fits: Callable[[], Any], what: str, seconds: float = SOON_S) -> None:
    end = time.monotonic() + seconds
    while not fits():
        assert time.monotonic() < end, f"expected {what} within {seconds:g} s"
        await asyncio.sleep(0.005)


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())
