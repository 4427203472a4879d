"""Statuses of workers, and why sessions wait."""

from typing import Any

import pytest

from server.dispatch.queue import RequestType
from server.dispatch.wait_reasons import start_progress, wait_reason
from server.dispatch.workers import WorkerAddress, Workers
from worker.protocol.gateway_messages import StartProgress

IDLE: dict[str, Any] = {"state": "BUSY", "worker_status": "duplex_active", "slots": {"total": 4, "free": 4}}


def workers_with(*healths: dict[str, Any]) -> Workers:
    workers = Workers([WorkerAddress("127.0.0.1", index + 1) for index in range(len(healths))])
    for worker, health in zip(workers.all, healths, strict=True):
        if health:
            workers.record_health(worker, health)
    return workers


@pytest.mark.parametrize(
    ("types", "status"),
    [
        (["chat"], "busy_chat"),
        (["chat", "chat"], "busy_chat"),
        (["half_duplex_audio"], "busy_half_duplex"),
        (["omni_duplex"], "duplex_active"),
        (["chat", "half_duplex_audio"], "duplex_active"),
        (["chat", "audio_duplex"], "duplex_active"),
    ],
)
def test_status_follows_the_kinds_of_sessions(types: list[RequestType], status: str) -> None:
    workers = workers_with(IDLE)
    for index, kind in enumerate(types):
        workers.acquire(kind, f"s{index}")
    assert workers.all[0].status == status


def test_paused_sessions_pause_the_worker_unless_another_kind_runs() -> None:
    workers = workers_with(IDLE)
    lease = workers.acquire("omni_duplex", "a")
    assert lease is not None
    workers.record_pause(lease, True)
    assert workers.all[0].status == "duplex_paused"
    workers.acquire("chat", "b")
    assert workers.all[0].status == "duplex_active"


def test_worker_is_idle_as_soon_as_its_last_session_ends() -> None:
    workers = workers_with({**IDLE, "slots": {"total": 1, "free": 1}})
    lease = workers.acquire("chat", "a")
    assert lease is not None
    workers.record_health(workers.all[0], {**IDLE, "slots": {"total": 1, "free": 0}})
    assert workers.all[0].status == "busy_chat"
    workers.release(lease)
    assert workers.all[0].status == "idle"
    workers.record_health(workers.all[0], {**IDLE, "slots": {"total": 1, "free": 0}})
    assert workers.all[0].status == "duplex_active", "expected the session of a client that is connected directly"


LOADING = {"state": "LOADING", "worker_status": "loading", "progress": {"what": "weights", "done": 9, "total": 10}}
COMPILING = {"state": "COMPILING", "worker_status": "loading", "progress": {"what": "graphs", "done": 1, "total": 10}}
LATER = {"state": "COMPILING", "worker_status": "loading", "progress": {"what": "graphs", "done": 2, "total": 10}}
OTHER = {"worker_status": "loading"}  # of the public implementation


@pytest.mark.parametrize(
    ("healths", "reason", "progress"),
    [
        ([IDLE, LOADING], "busy", None),
        ([{}, {}], "no_worker", None),
        ([{"state": "FAILED", "worker_status": "error"}], "no_worker", None),
        ([LOADING, {}], "loading", StartProgress(what="weights", done=9, total=10)),
        ([LOADING, COMPILING], "loading", StartProgress(what="graphs", done=1, total=10)),
        ([LATER, COMPILING, LOADING], "loading", StartProgress(what="graphs", done=2, total=10)),
        ([OTHER], "loading", StartProgress()),
        (
            [{**LOADING, "progress": {"what": 3, "done": "x", "total": float("inf")}}],
            "loading",
            StartProgress(what="3"),
        ),
    ],
)
def test_reason_of_the_wait(healths: list[dict[str, Any]], reason: str, progress: StartProgress | None) -> None:
    workers = workers_with(*healths)
    assert (wait_reason(workers), start_progress(workers)) == (reason, progress)


def test_sessions_above_the_capacity_free_no_slot() -> None:
    workers = workers_with({**IDLE, "slots": {"total": 3, "free": 3}})
    leases = [workers.acquire("omni_duplex", f"s{n}") for n in range(3)]
    workers.record_health(workers.all[0], {**IDLE, "slots": {"total": 2, "free": 0}})
    assert (workers.n_excess, workers.n_free, workers.n_slots) == (1, 0, 2)
    for lease, expected in zip(leases, ((0, 0), (0, 1), (0, 2)), strict=True):
        workers.release(lease)
        assert (workers.n_excess, workers.n_free) == expected
    workers.record_health(workers.all[0], {**IDLE, "state": "LOADING", "slots": {"total": 0, "free": 0}})
    assert workers.n_excess == 0, "a worker that is not ready has no capacity to exceed"
