"""An authority and gateways in this process, on real sockets."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serve.fake_worker import FakeWorker
from server.cluster.service import AuthorityOptions, AuthorityService
from server.dispatch.workers import WorkerAddress
from tests.server.live_gateway import RunningGateway, running_gateway, wait_until
from worker.protocol.connection import listen, live_server

SECRET = "of this cluster"


@dataclass
class RunningAuthority:
    """An authority that accepts connections."""

    port: int
    service: AuthorityService

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"


@asynccontextmanager
async def running_authority(
    store: Path, *workers: FakeWorker, port: int = 0, secret: str | None = None
) -> AsyncIterator[RunningAuthority]:
    """An authority with these workers. port: 0 chooses a free one."""
    addresses = [WorkerAddress("127.0.0.1", worker.port) for worker in workers]
    with listen("127.0.0.1", port) as bound_socket:
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            service = AuthorityService(AuthorityOptions(store, addresses, secret=secret), http)
            server = live_server(service.app(secret))
            serving = asyncio.create_task(server.serve([bound_socket]))
            await wait_until(lambda: server.started or serving.done(), "the authority to start")
            service.start()
            try:
                yield RunningAuthority(bound_socket.getsockname()[1], service)
            finally:
                server.should_exit = True
                await serving
                await service.stop()


@asynccontextmanager
async def running_gateways(
    url: str, names: Sequence[str], n_workers: int, **options: Any
) -> AsyncIterator[list[RunningGateway]]:
    """Gateways of the authority at this address, which have this number of ready workers.

    options: of `running_gateway`.
    """
    async with AsyncExitStack() as stack:
        gateways = []
        for name in names:
            running = running_gateway(authority=url, gateway_name=name, **options)
            gateways.append(await stack.enter_async_context(running))
        for one in gateways:
            workers = one.gateway.dispatcher.workers
            await wait_until(lambda workers=workers: workers.n_ready == n_workers, f"{n_workers} workers")
        yield gateways
