"""A gateway with calls on the loopback address, shared by the tests of a module."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aioice.ice
import httpx
import pytest
import websockets

from benchmarks.serve.fake_replies import FakeConversation
from benchmarks.serve.fake_worker import FakeWorker
from tests.server.access.keyed_gateway import ADMIN, USER, bearer, entry
from tests.server.doors.calls.call_client import CallClient
from tests.server.live_gateway import RunningGateway, running_gateway
from worker.config.webrtc import WebRtcConfig
from worker.protocol.messages import AudioChunk

LOOPBACK = "127.0.0.1"
KEY, OTHER_KEY = bearer(USER), bearer(ADMIN.replace("boss", "next"))
ORIGIN = "https://talk.example.org"
Json = dict[str, Any]


@dataclass
class Served:
    """A gateway and its worker. chunks: units that reached the worker, with all their pictures."""

    runner: asyncio.Runner
    gateway: RunningGateway
    worker: FakeWorker
    chunks: list[AudioChunk] = field(default_factory=list)

    @property
    def http(self) -> httpx.AsyncClient:
        return self.gateway.http

    def run(self, scenario: Callable[[], Awaitable[None]], n_listen: int = 1000, n_speak: int = 1) -> None:
        """Run a scenario, after which the gateway must be idle. n_listen, n_speak: cycle of the worker's units."""
        self.worker.n_listen, self.worker.n_speak = n_listen, n_speak
        self.chunks.clear()

        async def run() -> None:
            await scenario()
            await self.gateway.wait_idle()

        self.runner.run(run())


def serve_calls(**settings: Any) -> Iterator[Served]:
    """The gateway until the iterator is closed. settings: of `WebRtcConfig`."""
    patch, chunks, units = pytest.MonkeyPatch(), list[AudioChunk](), FakeConversation._unit

    async def recorded(conversation: FakeConversation, chunk: AudioChunk, received: float) -> None:
        pictures = [*(frame.picture() for frame in conversation._frames), *chunk.frame_base64_list]
        chunks.append(chunk.model_copy(update={"frame_base64_list": pictures}))
        await units(conversation, chunk, received)

    patch.setattr(FakeConversation, "_unit", recorded)
    patch.setattr(aioice.ice, "get_host_addresses", lambda use_ipv4, use_ipv6: [LOOPBACK])
    patch.setattr("server.health_watch.POLL_S", 0.1)
    stack = AsyncExitStack()

    async def start() -> tuple[RunningGateway, FakeWorker]:
        worker = await stack.enter_async_context(FakeWorker(slots=4))
        keys = (entry("user", USER), entry("next", ADMIN.replace("boss", "next")))
        webrtc = WebRtcConfig(addresses=(LOOPBACK,), **settings)
        options = {"api_keys": keys, "webrtc": webrtc, "allowed_origins": (ORIGIN,)}
        return await stack.enter_async_context(running_gateway(worker, **options)), worker

    with asyncio.Runner() as runner:
        gateway, worker = runner.run(start())
        yield Served(runner, gateway, worker, chunks)
        runner.run(stack.aclose())
    patch.undo()


async def follow(served: Served, client: CallClient, headers: Json) -> websockets.ClientConnection:
    """A socket that follows the client's call."""
    url = f"ws://{LOOPBACK}:{served.gateway.port}/v1/realtime?call_id={client.call_id}"
    return await websockets.connect(url, additional_headers=headers, proxy=None, compression=None)
