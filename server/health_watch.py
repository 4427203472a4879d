"""Polls /health of every worker and records the answers, for a gateway and for the authority of a cluster."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import httpx

from server.dispatch.workers import Worker, Workers
from server.live.worker_link import is_connection_refused

LOG = logging.getLogger(__name__)
POLL_S = 1.0


class SlotSource(Protocol):
    """Gives workers' slots."""

    @property
    def workers(self) -> Workers:
        """The workers to watch."""

    def dispatch(self) -> None:
        """Assign slots that may have become free."""


class HealthWatch:
    """One polling task for each worker.

    Args:
        dispatcher: is called after each answer.
        on_worker_lost: called with the name of a worker that becomes unreachable.
        http: client for the workers.
        timeout: seconds without any message or answer after which a worker counts as lost.
    """

    def __init__(
        self, dispatcher: SlotSource, on_worker_lost: Callable[[str], None], http: httpx.AsyncClient, timeout: float
    ):
        self._dispatcher, self._on_worker_lost, self._http, self._timeout = dispatcher, on_worker_lost, http, timeout
        self._tasks: dict[Worker, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Watch all workers. A further call watches new ones, and ends the tasks of those that are removed."""
        known = self._dispatcher.workers.all
        for worker in [one for one in self._tasks if one not in known]:
            self._tasks.pop(worker).cancel()
        for worker in known:
            if worker not in self._tasks:
                self._tasks[worker] = asyncio.create_task(self._run(worker), name=f"watch {worker.name}")

    async def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, worker: Worker) -> None:
        while True:
            begun = time.monotonic()
            try:
                await self._poll(worker)
            except Exception:
                LOG.exception("health poll of %s", worker.name)
            await asyncio.sleep(max(0.0, begun + POLL_S - time.monotonic()))

    async def _poll(self, worker: Worker) -> None:
        workers = self._dispatcher.workers
        was_ready = worker.is_ready
        try:
            response = await self._http.get(f"http://{worker.address}/health", timeout=self._timeout)
            health = _health(response)
        except httpx.HTTPError as error:
            # A refused connection means that the worker is down. After any other error its sessions may still run, so
            # it counts as lost only once nothing has arrived from it for a while.
            if is_connection_refused(error) or workers.idle_s(worker) > self._timeout:
                self._on_lost(worker, error)
            else:
                workers.suspend(worker)
        else:
            workers.record_health(worker, health)
            if worker.is_ready and not was_ready:
                LOG.info("%s (%s) is ready: %d slots", worker.name, worker.address, worker.n_slots)
            self._dispatcher.dispatch()

    def _on_lost(self, worker: Worker, error: Exception) -> None:
        if worker.health:
            LOG.warning("%s (%s) is lost: %s", worker.name, worker.address, str(error) or type(error).__name__)
            self._on_worker_lost(worker.name)
        self._dispatcher.workers.record_loss(worker)


def _health(response: httpx.Response) -> dict[str, Any]:
    """The JSON body; the body of a worker with an error if the response is not a worker's."""
    try:
        body: Any = response.json()
    except (ValueError, RecursionError):
        body = None
    if response.status_code != 200 or not isinstance(body, dict):
        return {"worker_status": "error"}
    if not all(isinstance(body.get(key, ""), str) for key in ("state", "worker_status")):
        return {"worker_status": "error"}
    return body
