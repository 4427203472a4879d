"""A gateway in this process on a free port, its clients, and workers that follow a script."""

import asyncio
import base64
import json
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import websockets
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from benchmarks.serve.fake_worker import FakeWorker
from server.app import Gateway, build_app
from server.cluster.link import AuthorityLink
from server.cluster.peer_tls import peer_tls
from server.dispatch.workers import WorkerAddress
from server.doors.core.picture_urls import PictureUrls
from server.doors.live.door_context import SessionLimits
from server.health_watch import HealthWatch
from server.serving import HTTP_LIMITS, ServeOptions, Tls, authority_link, build_gateway
from server.tracing import TraceSpans
from tests.server.routes.asgi_gateway import with_own_data_dir
from worker.config.service import default_config
from worker.protocol.connection import listen, live_server

ANSWER_S = 30.0  # timeout for one message, on a loaded machine
SOON_S = 10.0
PREPARE = {"type": "prepare"}
CHUNK = {"type": "audio_chunk", "audio_base64": base64.b64encode(bytes(4 * 800)).decode()}
STOP = {"type": "stop"}
Json = dict[str, Any]


class Client:
    """One WebSocket connection to the gateway, with JSON messages."""

    def __init__(self, socket: websockets.ClientConnection):
        self.socket = socket

    async def send(self, *messages: Json | str | bytes) -> None:
        for message in messages:
            await self.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))

    async def receive_raw(self, seconds: float = ANSWER_S) -> str | bytes:
        async with asyncio.timeout(seconds):
            return await self.socket.recv()

    async def receive(self, kind: str, seconds: float = ANSWER_S) -> Json:
        """Receive the next message, which must be of this type."""
        message = json.loads(await self.receive_raw(seconds))
        assert message["type"] == kind, f"expected {kind}, got {str(message)[:500]}"
        return message

    async def receive_until(self, kind: str, seconds: float = ANSWER_S) -> Json:
        """Receive the first message of this type. Only messages about the queue may come before it."""
        async with asyncio.timeout(seconds):
            while (message := json.loads(await self.socket.recv()))["type"] != kind:
                assert message["type"] in ("queued", "queue_update"), f"expected {kind}, got {str(message)[:500]}"
        return message

    async def with_slot(self) -> "Client":
        await self.receive_until("queue_done")
        return self

    async def prepared(self) -> "Client":
        await self.with_slot()
        await self.send(PREPARE)
        await self.receive("prepared")
        return self

    async def unit(self) -> Json:
        await self.send(CHUNK)
        return await self.receive("result")

    async def wait_closed(self, seconds: float = ANSWER_S) -> tuple[int | None, str | None]:
        """Wait for the gateway's close frame. Returns: code and reason."""
        async with asyncio.timeout(seconds):
            await self.socket.wait_closed()
        return self.socket.close_code, self.socket.close_reason

    async def close(self) -> None:
        await self.socket.close()

    def abort(self) -> None:
        """Reset the connection without a close frame, and discard data that was not sent yet."""
        connection = self.socket.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.transport.abort()


async def connect_to(port: int, name: str = "omni_me", path: str = "/ws/duplex/", **options: Any) -> Client:
    """A client of the gateway on this port. name: session id. options: of `websockets.connect`; `ssl` for TLS."""
    options = {"compression": None, "max_size": None, "ping_interval": None, "close_timeout": 2, **options}
    scheme = "wss" if options.get("ssl") else "ws"
    return Client(await websockets.connect(f"{scheme}://127.0.0.1:{port}{path}{name}", **options))


@dataclass
class RunningGateway:
    """A gateway that accepts connections.

    http: client for its HTTP API. link: to the authority of a cluster. tls: of its clients; None: plain HTTP.
    """

    port: int
    gateway: Gateway
    http: httpx.AsyncClient
    watch: HealthWatch
    link: AuthorityLink | None = None
    tls: ssl.SSLContext | None = None

    async def connect(self, name: str = "omni_me", **options: Any) -> Client:
        return await connect_to(self.port, name, **options, ssl=self.tls)

    async def get(self, path: str) -> Any:
        return (await self.http.get(path)).json()

    async def wait_for_slot(self) -> None:
        """Wait until a slot is free."""
        await wait_until(lambda: self.gateway.dispatcher.workers.n_free, "a free slot")

    async def wait_idle(self) -> None:
        """Wait until there is no lease, no ticket, no connection and no buffered message."""
        dispatcher, sockets, live = self.gateway.dispatcher, self.gateway.sockets, self.gateway.live

        def is_idle() -> bool:
            in_use = (dispatcher.workers.leases, len(dispatcher.queue), len(live), sockets.buffered_bytes)
            return not any(in_use)

        await wait_until(is_idle, "no lease, no ticket, no connection, no buffered message")


@asynccontextmanager
async def running_gateway(
    *workers: FakeWorker | int,
    reports: Path = Path("/nonexistent"),
    options: Json | None = None,
    is_recording: bool = False,
    session_limits: SessionLimits | None = None,
    picture_urls: PictureUrls | None = None,
    model: Json | None = None,
    spans: TraceSpans | None = None,
    authority: str | None = None,
    gateway_name: str = "",
    secret: str | None = None,
    tls: Tls | None = None,
    **service: Any,
) -> AsyncIterator[RunningGateway]:
    """A gateway in front of these workers.

    Args:
        workers: fake workers, or ports.
        reports: folder for diagnostics.
        options: of uvicorn.
        is_recording: record sessions, below `data_dir` of the service.
        session_limits: of sessions of the OpenAI API.
        picture_urls: fetches pictures.
        model: settings of the section `model`.
        spans: records sessions.
        authority, gateway_name, secret: of a cluster.
        tls: its certificate, which the other gateways of the cluster have too; None: plain HTTP.
        service: settings of the section `service`.
    """
    config = with_own_data_dir(default_config())
    recording = config.recording.model_copy(update={"enabled": is_recording})
    config = config.model_copy(update={"service": config.service.model_copy(update=service), "recording": recording})
    config = config.model_copy(update={"model": config.model.model_copy(update=model or {})})
    addresses = [WorkerAddress("127.0.0.1", one if isinstance(one, int) else one.port) for one in workers]
    plain = {"trust_env": False, "verify": False}  # loading the CA certificates takes longer than most tests
    trusted = None if tls is None else peer_tls(tls.certfile, None)
    cluster = {"authority": authority, "gateway_name": gateway_name, "worker_secret": secret, "peer_tls": trusted}
    served = ServeOptions(addresses, reports, spans=spans, tls=tls, **cluster)
    files = {} if tls is None else {"ssl_certfile": tls.certfile, "ssl_keyfile": tls.keyfile}
    with listen("127.0.0.1", 0) as bound_socket:
        port = bound_socket.getsockname()[1]
        async with (
            httpx.AsyncClient(limits=HTTP_LIMITS, **plain) as worker_http,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S, **plain) as http,
        ):
            gateway, watch = build_gateway(config, worker_http, served)
            if session_limits is not None:
                gateway = replace(gateway, session_limits=session_limits)
            if picture_urls is not None:
                gateway = replace(gateway, picture_urls=picture_urls)
            server = live_server(build_app(gateway), **files, **(options or {}))
            serving = asyncio.create_task(server.serve([bound_socket]))
            await wait_until(lambda: server.started or serving.done(), "the gateway to start")
            watch.start()
            link = authority_link(gateway, watch, served, bound_socket)
            if link is not None:
                link.start()
            gateway.moves.start()
            gateway.recordings.open()
            expected = sum(isinstance(one, FakeWorker) and one.is_ready for one in workers)
            await wait_until(lambda: gateway.dispatcher.workers.n_ready >= expected, f"{expected} workers to be ready")
            try:
                yield RunningGateway(port, gateway, http, watch, link, trusted)
            finally:
                gateway.live.close_all()
                server.should_exit = True
                await serving
                if link is not None:
                    await link.stop()
                await watch.stop()
                await gateway.moves.stop()
                await gateway.peers.stop()
                await asyncio.to_thread(gateway.recordings.close)


WorkerScript = Callable[[ServerConnection], Awaitable[None]]


@asynccontextmanager
async def scripted_worker(script: WorkerScript, slots: int = 4, redirect: str | None = None) -> AsyncIterator[int]:
    """A worker whose /health is always good and whose sessions run `script`.

    redirect: address to which it redirects every session instead. Yields: its port.
    """
    health = json.dumps({"state": "IDLE", "worker_status": "idle", "slots": {"total": slots, "free": slots}}).encode()

    async def answer(connection: ServerConnection, request: Request) -> Response | None:
        if request.path.startswith("/ws/"):
            return None if redirect is None else Response(302, "Found", Headers({"Location": redirect}), b"")
        headers = Headers({"Content-Length": str(len(health)), "Connection": "close"})
        return Response(200, HTTPStatus.OK.phrase, headers, health)

    options = {"compression": None, "max_size": None, "ping_interval": None, "close_timeout": 1}
    async with serve(script, "127.0.0.1", 0, process_request=answer, **options) as server:
        yield server.sockets[0].getsockname()[1]


async def echo(connection: ServerConnection) -> None:
    """A worker script that returns every message unchanged."""
    async for message in connection:
        await connection.send(message)


async def wait_until(holds: Callable[[], Any], what: str, seconds: float = SOON_S) -> None:
    """Poll until `holds` returns a true value."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"expected {what} within {seconds:g} s"
        await asyncio.sleep(0.005)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())
