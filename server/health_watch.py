"""Asks every worker how it is, again and again. Knows HTTP; what an answer means, `workers` knows."""

import asyncio
import logging
import time
from typing import Any

import httpx

from server.dispatch.dispatcher import Dispatcher
from server.dispatch.workers import Worker
from server.live.worker_link import nobody_listens
from server.metrics import GatewayMetrics

LOG = logging.getLogger(__name__)
EVERY_S = 1.0


class Watch:
    """One task a worker. timeout: seconds without a sign of life after which a worker counts as lost."""

    def __init__(self, dispatcher: Dispatcher, metrics: GatewayMetrics, asking: httpx.AsyncClient, timeout: float):
        self._dispatcher, self._metrics, self._asking, self._timeout = dispatcher, metrics, asking, timeout
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for worker in self._dispatcher.workers.all:
            self._tasks.append(asyncio.create_task(self._keep_asking(worker), name=f"watch {worker.name}"))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_asking(self, worker: Worker) -> None:
        while True:
            begun = time.monotonic()
            try:
                await self._ask(worker)
            except Exception:
                LOG.exception("asking %s", worker.name)
            await asyncio.sleep(max(0.0, begun + EVERY_S - time.monotonic()))

    async def _ask(self, worker: Worker) -> None:
        was_ready = worker.is_ready
        try:
            answer = await self._asking.get(f"http://{worker.address}/health", timeout=self._timeout)
            health = _health(answer)
        except httpx.HTTPError as error:
            # Where nobody listens nobody is. Silence tells so only after a while: units may still be coming.
            if nobody_listens(error) or time.monotonic() - worker.seen > self._timeout:
                self._lost(worker, error)
            else:
                self._dispatcher.workers.refused(worker)
        else:
            self._dispatcher.workers.answered(worker, health)
            if worker.is_ready and not was_ready:
                LOG.info("%s (%s) is ready: %d slots", worker.name, worker.address, worker.n_slots)
            self._dispatcher.dispatch()

    def _lost(self, worker: Worker, error: Exception) -> None:
        if worker.health:
            LOG.warning("%s (%s) is lost: %s", worker.name, worker.address, str(error) or type(error).__name__)
            self._metrics.worker_lost(worker.name)
        self._dispatcher.workers.gone(worker)


def _health(answer: httpx.Response) -> dict[str, Any]:
    """Another answer than a worker's is an error of that worker."""
    try:
        body = answer.json()
    except (ValueError, RecursionError):
        body = None
    names = [body.get(key, "") for key in ("state", "worker_status")] if isinstance(body, dict) else [None]
    if answer.status_code != 200 or not all(isinstance(name, str) for name in names):
        return {"worker_status": "error"}
    return body
