"""The process of a cluster's authority: WebSockets of gateways, routes for operators, health polls of the workers."""

import asyncio
import hmac
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket as Socket

import httpx
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from server.cluster.authority import Authority
from server.cluster.messages import (
    Beat,
    Cancel,
    ClusterMessageError,
    CountedUse,
    Finish,
    FromAuthority,
    FromGateway,
    Hello,
    Locate,
    ReportUsage,
    Requeue,
    Submit,
    Swap,
    UsageOfOthers,
    read_from_gateway,
)
from server.cluster.outbox import Outbox
from server.cluster.records import GatewayRecord, address_of
from server.cluster.reports import queue_report, worker_report
from server.cluster.store import AuthorityStore
from server.dispatch.eta import Eta, EtaConfig
from server.dispatch.queue import Queue
from server.dispatch.workers import WorkerAddress, Workers
from server.health_watch import HealthWatch
from worker.key_text import WORKER_SECRET_HEADER
from worker.protocol.codes import CloseCode
from worker.protocol.connection import begin, live_server, stop_signal

LOG = logging.getLogger(__name__)
OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics"})
PLACES_S, PLACES_AGE_S = 0.1, 2.5  # between messages about places: after a change, and at the latest
HEALTH_TIMEOUT_S = 5.0
HELLO_S = 5.0


@dataclass(frozen=True)
class AuthorityOptions:
    """Settings of an authority.

    store: file of its state; None: none. workers: that are registered at the start. packs: fill one worker after
    another. max_queue_size, max_spare, eta: as in a gateway. secret: of the cluster; None: none.
    """

    store: Path | None = None
    workers: Sequence[WorkerAddress] = ()
    packs: bool = False
    max_queue_size: int = 1000
    max_spare: int = 0
    eta: EtaConfig = field(default_factory=EtaConfig)
    secret: str | None = field(default=None, repr=False)


class AuthorityService:
    """The authority with its connections and its file.

    Args:
        options: settings.
        http: client for the workers.
    """

    def __init__(self, options: AuthorityOptions, http: httpx.AsyncClient):
        self._store = AuthorityStore(options.store)
        self.authority = Authority(
            Workers((), packs=options.packs),
            Queue(options.max_queue_size),
            Eta(options.eta),
            term=self._store.next_term(),
            known=self._store.gateways,
            max_spare=options.max_spare,
        )
        for text, is_draining in self._store.workers:
            self.authority.add_worker(address_of(text)).is_draining = is_draining
        for address in options.workers:
            if self.authority.workers.find(address) is None:
                self.authority.add_worker(address)
        self._health = HealthWatch(self, _ignore, http, HEALTH_TIMEOUT_S, has_sessions=False)
        self._usage: dict[str, dict[str, CountedUse]] = {}
        self._day = -1
        self._stored_gateways = set(self._store.gateways)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def workers(self) -> Workers:
        """The workers of the cluster."""
        return self.authority.workers

    def dispatch(self) -> None:
        """Assign slots that may have become free."""
        self.authority.poll()

    def start(self) -> None:
        """Start to poll workers and to send places in the queue."""
        self._store_workers()
        self._tasks = [asyncio.create_task(self._run(), name="places")]

    async def stop(self) -> None:
        """End the tasks and close the file."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._health.stop()
        self._store.close()

    async def _run(self) -> None:
        due = time.monotonic()
        while True:
            await asyncio.sleep(PLACES_S)
            is_due = time.monotonic() >= due
            if is_due:
                due = time.monotonic() + PLACES_AGE_S
                self._store_gateways()
            try:
                self.authority.poll()
                self.authority.tell_places(is_due=is_due)
            except Exception:  # leases expire here, so the task goes on
                LOG.exception("error in a round of slots and places")

    # --- gateways ------------------------------------------------------------------------------

    async def serve_gateway(self, websocket: WebSocket) -> None:
        """Serve the connection of one gateway."""
        await websocket.accept()
        unsent: Outbox[FromAuthority] = Outbox("a gateway")
        tell = unsent.put
        sending = asyncio.create_task(_send(websocket, unsent), name="to-gateway")
        gateway: GatewayRecord | None = None
        try:
            async with asyncio.timeout(HELLO_S):
                hello = read_from_gateway(await websocket.receive_text())
            if not isinstance(hello, Hello):
                raise ClusterMessageError("first message", expected="hello", got=hello.type)
            gateway = self.authority.connect(hello, tell)
            self._store_gateways()
            LOG.info("gateway %s is connected, with %d tickets", gateway.name, len(gateway.entries))
            async with unsent:
                while True:
                    message = read_from_gateway(await websocket.receive_text())
                    if gateway.tell is not tell:  # it has expired or connected again, and claims what it has
                        break
                    self._handle(gateway, message)
            await websocket.close(CloseCode.REPLACED)
        except ClusterMessageError as error:
            LOG.warning("a gateway's message: %s", error)
            await websocket.close(CloseCode.POLICY_VIOLATION, "Bad message")
        except (WebSocketDisconnect, TimeoutError, RuntimeError):
            pass
        finally:
            sending.cancel()
            if gateway is not None:
                LOG.info("gateway %s is disconnected", gateway.name)
                self.authority.disconnect(gateway, tell)

    def _handle(self, gateway: GatewayRecord, message: FromGateway) -> None:
        authority = self.authority
        match message:
            case Submit():
                authority.submit(gateway, message)
            case Requeue():
                authority.requeue(gateway, message)
            case Swap():
                authority.swap(gateway, message)
            case Finish():
                authority.finish(gateway, message)
            case Cancel():
                authority.cancel(message)
            case Locate():
                authority.locate(gateway, message.session)
            case Beat():
                authority.beat(gateway, message)
            case ReportUsage():
                self._count_usage(gateway, message)
            case Hello():
                raise ClusterMessageError("message.type", expected="hello once", got="another one")

    def _count_usage(self, gateway: GatewayRecord, message: ReportUsage) -> None:
        """Record what a gateway has counted today, and answer with the sums of the others."""
        if message.day > self._day:
            self._day, self._usage = message.day, self._store.usage(message.day)
        if message.day < self._day:
            return
        own = self._usage.setdefault(gateway.name, {})
        changed = {name: one for name, one in message.keys.items() if own.get(name) != one}
        for name, one in changed.items():  # a gateway that has lost its file counts from 0 again
            before = own.get(name, CountedUse())
            own[name] = CountedUse(
                requests=max(before.requests, one.requests), session_s=max(before.session_s, one.session_s)
            )
        if changed:
            self._store.store_usage(self._day, gateway.name, {name: own[name] for name in changed})
        sums: dict[str, CountedUse] = {}
        for other, keys in self._usage.items():
            for name, one in keys.items() if other != gateway.name else ():
                before = sums.get(name, CountedUse())
                sums[name] = CountedUse(
                    requests=before.requests + one.requests, session_s=before.session_s + one.session_s
                )
        if gateway.tell is not None:
            gateway.tell(UsageOfOthers(day=self._day, keys=sums))

    def _store_gateways(self) -> None:
        names = set(self.authority.gateways)
        is_new = names != self._stored_gateways and not self.authority.is_recovering
        if is_new and self._store.store_gateways(sorted(names)):
            self._stored_gateways = names

    # --- workers -------------------------------------------------------------------------------

    def _store_workers(self) -> None:
        self._health.start()
        self._store.store_workers([(str(one.address), one.is_draining) for one in self.workers.all])

    async def list_workers(self, request: Request) -> Response:
        """All workers, with their leases, and the waiting tickets."""
        now = time.monotonic()
        workers = [worker_report(worker) for worker in self.workers.all]
        return JSONResponse({"workers": workers, "queues": queue_report(self.authority.queue, now)})

    async def change_worker(self, request: Request) -> Response:
        """PUT registers a worker, POST drains it, DELETE removes it; 404 for one that is not registered."""
        address = address_of(request.path_params["address"])
        if not address.host or not address.port:
            return JSONResponse({"detail": "expected HOST:PORT"}, 422)
        worker = self.workers.find(address)
        if request.method == "PUT":
            self.authority.add_worker(address)
        elif worker is None:
            return JSONResponse({"detail": f"expected a registered worker, got {address}"}, 404)
        elif request.method == "POST":
            self.authority.drain_worker(worker)
        else:
            self.authority.remove_worker(worker)
        self._store_workers()
        return JSONResponse({"success": True})

    # --- state ---------------------------------------------------------------------------------

    async def live(self, request: Request) -> Response:
        """200 while the process answers."""
        return JSONResponse({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """200 once slots are assigned; 503 before."""
        is_ready = not self.authority.is_recovering
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def health(self, request: Request) -> Response:
        """Counts of gateways, workers, slots and tickets, for operators and for scaling."""
        authority, workers = self.authority, self.workers
        waits = [time.monotonic() - ticket.created_at for ticket in authority.queue]
        return JSONResponse(
            {
                "term": authority.term,
                "is_recovering": authority.is_recovering,
                "gateways": sorted(one.name for one in authority.gateways.values() if one.tell is not None),
                "n_workers": len(workers.all),
                "n_ready": workers.n_ready,
                "slots": workers.n_slots,
                "free": workers.n_free,
                "leases": len(workers.leases),
                "queue_length": len(authority.queue),
                "longest_wait_s": round(max(waits, default=0.0), 3),
                "granted": authority.n_granted,
            }
        )

    async def metrics(self, request: Request) -> Response:
        """Counts for Prometheus."""
        registry, authority, workers = CollectorRegistry(), self.authority, self.workers
        values = {
            "term": ("Starts of the authority", authority.term),
            "gateways": ("Connected gateways", sum(one.tell is not None for one in authority.gateways.values())),
            "workers_ready": ("Workers that accept sessions", workers.n_ready),
            "slots": ("Slots of these workers", workers.n_slots),
            "slots_free": ("Slots that can be leased", workers.n_free),
            "leases": ("Slots that are leased", len(workers.leases)),
            "queue_length": ("Waiting tickets", len(authority.queue)),
            "leases_granted": ("Leases since the start", authority.n_granted),
        }
        for name, (help_text, value) in values.items():
            Gauge(f"duologue_authority_{name}", help_text, registry=registry).set(value)
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    def app(self, secret: str | None) -> ASGIApp:
        """The application. secret: of the cluster; None: none is needed."""
        routes = [
            Route("/livez", self.live),
            Route("/readyz", self.ready),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/workers", self.list_workers),
            Route("/workers/{address}", self.change_worker, methods=["PUT", "POST", "DELETE"]),
            WebSocketRoute("/gateway", self.serve_gateway),
        ]
        return SecretGuard(Starlette(routes=routes), secret)


class SecretGuard:
    """ASGI middleware that refuses pages, and programs without the secret of the cluster.

    Args:
        app: the application.
        secret: None: none is needed.
    """

    def __init__(self, app: ASGIApp, secret: str | None):
        self._app, self._secret = app, secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = HTTPConnection(scope).headers
        is_open = scope["type"] == "http" and scope["path"] in OPEN_PATHS
        given = headers.get(WORKER_SECRET_HEADER, "").encode("utf-8", "replace")
        is_right = self._secret is None or hmac.compare_digest(given, self._secret.encode())
        if is_open or (is_right and "origin" not in headers):
            await self._app(scope, receive, send)
        else:
            detail = f"{WORKER_SECRET_HEADER}: expected the secret of this cluster, and no origin"
            await JSONResponse({"detail": detail}, 403)(scope, receive, send)


async def _send(websocket: WebSocket, unsent: Outbox[FromAuthority]) -> None:
    while True:
        await websocket.send_text((await unsent.get()).model_dump_json())


def _ignore(_: str) -> None:
    pass


def serve_authority(options: AuthorityOptions, bound_socket: Socket) -> int:
    """Run the authority until a stop signal. Returns: the exit status."""
    return asyncio.run(_serve(options, bound_socket))


async def _serve(options: AuthorityOptions, bound_socket: Socket) -> int:
    async with httpx.AsyncClient(trust_env=False) as http:
        service = AuthorityService(options, http)
        server, stop = live_server(service.app(options.secret)), stop_signal()
        serving = await begin(server, bound_socket, "http")
        if serving is None:
            return 1
        service.start()
        try:
            await stop.wait()
        finally:
            server.should_exit = True
            await serving
            await service.stop()
        return 0
