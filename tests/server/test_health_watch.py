"""How often workers are polled, and which failures count as a loss."""

import asyncio
import time
from collections import Counter

import httpx
import pytest

from server import health_watch
from server.dispatch.dispatcher import Dispatcher
from server.dispatch.eta import Eta, EtaConfig
from server.dispatch.queue import Queue
from server.dispatch.workers import WorkerAddress, Workers
from server.health_watch import HealthWatch, poll_interval_s

READY = {"state": "IDLE", "slots": {"total": 2, "free": 2}}


def test_polls_of_a_large_fleet_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_watch, "POLL_S", 1.0)
    found = [poll_interval_s(n) for n in (0, 1, 50, 100, 400, 500, 5000)]
    assert found == [1, 1, 1, 2, 8, 10, 10], f"got {found}"


@pytest.mark.parametrize("has_sessions", [True, False])
def test_workers_in_doubt_are_polled_often_whatever_their_number(
    monkeypatch: pytest.MonkeyPatch, *, has_sessions: bool
) -> None:
    """Ten workers with an interval of 1 s, and of 0.05 s for those that matter."""
    monkeypatch.setattr(health_watch, "POLL_S", 0.05)
    monkeypatch.setattr(health_watch, "N_PROMPT", 0.5)
    polls: Counter[str] = Counter()

    def answer(request: httpx.Request) -> httpx.Response:
        polls[request.url.host] += 1
        return httpx.Response(200, json=READY)

    async def scenario() -> float:
        workers = Workers([WorkerAddress(f"w{n}", 1) for n in range(10)])
        dispatcher = Dispatcher(workers, Queue(10), Eta(EtaConfig()))
        silent, talking, draining = workers.all[:3]
        begun = time.monotonic()
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), trust_env=False) as http:
            watch = HealthWatch(dispatcher, lambda _: None, http, 5.0, has_sessions=has_sessions)
            watch.start()
            async with asyncio.timeout(30):
                while min(polls[f"w{n}"] for n in range(10)) < 1:
                    await asyncio.sleep(0.01)
                for worker in (silent, talking):
                    workers.lease(worker, "audio_duplex", worker.name, "")
                draining.is_draining = True
                monkeypatch.setattr(workers, "idle_s", lambda worker: 0.0 if worker is talking else 1.0)
                while polls["w2"] < 20:
                    await asyncio.sleep(0.01)
            await watch.stop()
        return time.monotonic() - begun

    elapsed = asyncio.run(scenario())
    often = {"w0", "w2"} if has_sessions else {"w2"}
    for name, n in polls.items():
        if name in often:
            assert n >= 10, f"{name}: expected a poll each 0.05 s, got {n} in {elapsed:.2f} s"
        else:
            assert n <= elapsed + 3, f"{name}: expected a poll a second, got {n} in {elapsed:.2f} s"


def test_one_failed_poll_after_a_long_interval_is_no_loss() -> None:
    """The connection broke after a pause that is longer than the timeout: its sessions may still run."""
    now, is_broken = 0.0, False

    def answer(_: httpx.Request) -> httpx.Response:
        if is_broken:
            raise httpx.ReadError("reset")
        return httpx.Response(200, json=READY)

    async def scenario() -> None:
        nonlocal now, is_broken
        workers, lost = Workers([WorkerAddress("w", 1)], lambda: now), []
        dispatcher, worker = Dispatcher(workers, Queue(10), Eta(EtaConfig())), workers.all[0]
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), trust_env=False) as http:
            watch = HealthWatch(dispatcher, lost.append, http, 5.0)
            await watch._poll(worker)
            now, is_broken = 8.0, True
            await watch._poll(worker)
            assert worker.is_suspended and not lost, f"expected no slots until the next poll, got {lost}"
            await watch._poll(worker)
            assert lost == ["worker_0"] and worker.lost.is_set(), "expected a loss after the second failure"

    asyncio.run(scenario())
