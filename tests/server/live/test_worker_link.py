"""The check of a worker before a session is opened."""

import asyncio

import httpx
import pytest

from server.dispatch.workers import Worker, WorkerAddress
from server.live.worker_link import WorkerRefusedError, probe


def test_concurrent_probes_share_one_request() -> None:
    async def scenario() -> None:
        n_requests = 0

        async def answer(_: httpx.Request) -> httpx.Response:
            nonlocal n_requests
            n_requests += 1
            await asyncio.sleep(0.01)
            return httpx.Response(200, json={})

        worker = Worker(0, WorkerAddress("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            await asyncio.gather(*(probe(http, worker) for _ in range(30)))
            assert n_requests == 1
            await probe(http, worker)
        assert n_requests == 2

    asyncio.run(scenario())


def test_failed_probe_is_repeated_and_a_cancelled_client_does_not_cancel_the_others() -> None:
    async def scenario() -> None:
        statuses = [503, 200]

        async def answer(_: httpx.Request) -> httpx.Response:
            await asyncio.sleep(0.01)
            return httpx.Response(statuses.pop(0))

        worker = Worker(0, WorkerAddress("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            with pytest.raises(WorkerRefusedError):
                await probe(http, worker)
            leaving, staying = (asyncio.create_task(probe(http, worker)) for _ in range(2))
            await asyncio.sleep(0)
            leaving.cancel()
            await staying
        assert not statuses

    asyncio.run(scenario())
