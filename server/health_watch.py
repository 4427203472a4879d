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
POLL_S = 1.0  # between two polls of a worker; in large fleets `poll_interval_s`
N_PROMPT = 50  # workers that are each polled every `POLL_S`; more workers share the same number of polls a second
MAX_POLL_S = 10.0  # bounds the time until the gateway notices that a worker drains
SPREAD = 0.618  # share of the interval between the first polls of two workers, which spreads polls evenly


class SlotSource(Protocol):
    """Gives workers' slots."""

    @property
    def workers(self) -> Workers:
        """The workers to watch."""

    def dispatch(self) -> None:
        """Assign slots that may have become free."""


def poll_interval_s(n_workers: int) -> float:
    """Seconds between two polls of a worker that need not be polled every `POLL_S`. n_workers: all that are watched."""
    return min(MAX_POLL_S, POLL_S * max(1.0, n_workers / N_PROMPT))


class HealthWatch:
    """One polling task for each worker.

    A worker with sessions that has sent nothing for `POLL_S`, one that drains, and one that did not answer are polled
    every `POLL_S`, so the number of workers does not delay the detection of a loss that sessions would notice.

    Args:
        dispatcher: is called after each answer.
        on_worker_lost: called with the name of a worker that becomes unreachable.
        http: client for the workers.
        timeout: seconds without any message or answer after which a worker counts as lost.
        has_sessions: whether the sessions' messages pass through this process.
    """

    def __init__(
        self,
        dispatcher: SlotSource,
        on_worker_lost: Callable[[str], None],
        http: httpx.AsyncClient,
        timeout: float,
        *,
        has_sessions: bool = True,
    ):
        self._dispatcher, self._on_worker_lost, self._http, self._timeout = dispatcher, on_worker_lost, http, timeout
        self._has_sessions = has_sessions
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
        share = (worker.index + 1) * SPREAD % 1  # of the first interval
        while True:
            begun = time.monotonic()
            try:
                await self._poll(worker)
            except Exception:
                LOG.exception("health poll of %s", worker.name)
            await self._until_due(worker, begun, share * poll_interval_s(len(self._dispatcher.workers.all)))
            share = 1.0

    async def _until_due(self, worker: Worker, begun: float, interval_s: float) -> None:
        """Wait until the next poll of a worker. begun: monotonic s of the last one."""
        looked, due = begun, begun + interval_s
        while looked < due:
            looked = min(looked + POLL_S, due)
            await asyncio.sleep(max(0.0, looked - time.monotonic()))
            if self._is_in_doubt(worker):
                return

    def _is_in_doubt(self, worker: Worker) -> bool:
        """Whether sessions, slots or its removal wait for its next answer."""
        is_silent = self._dispatcher.workers.idle_s(worker) >= POLL_S
        has_silent = self._has_sessions and bool(worker.leases) and is_silent
        return bool(worker.health) and (worker.is_suspended or worker.is_draining or has_silent)

    async def _poll(self, worker: Worker) -> None:
        workers = self._dispatcher.workers
        was_ready = worker.is_ready
        try:
            response = await self._http.get(f"http://{worker.address}/health", timeout=self._timeout)
            health = _health(response)
        except httpx.HTTPError as error:
            # A refused connection means that the worker is down. After any other error its sessions may still run, so
            # it counts as lost only if nothing has arrived from it for the timeout. In a large fleet that much time can
            # pass between two polls, so a second failure, or a poll that takes as long, is needed as well.
            is_again = worker.is_suspended or isinstance(error, httpx.TimeoutException)
            if is_connection_refused(error) or (is_again and workers.idle_s(worker) > self._timeout):
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
