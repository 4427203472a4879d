"""Runs of sessions in a system: undisturbed, under one fault, and under a worker that is killed again and again."""

import asyncio
import itertools
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.chaos.clients import ChaosClient, LiveGroup
from benchmarks.chaos.faults import BEFORE_S, Fault, Scene
from benchmarks.chaos.figures import FaultRow, Undisturbed, percentiles, session_figures
from benchmarks.chaos.network import FaultyProxy
from benchmarks.chaos.system import N_WORKERS, System

N_SESSIONS = 4
AFTER_S = 5.0
UNDISTURBED_PACE_S = 0.4  # each unit has its own decision however late it comes
MAX_COMPARED = 60  # units of a session that are compared with its undisturbed run
KILLS_OF_A_GROUP = 4  # a session may lose five workers
MAX_RECOVERY_S = 60.0


class References:
    """The undisturbed run of the sessions, made once, as long as any run so far or `MAX_COMPARED` units."""

    def __init__(self, system: System):
        self._system, self._sessions = system, list[Undisturbed]()
        self._n_units = 0

    async def of(self, n_units: int) -> list[Undisturbed]:
        """This many units of each session, at most `MAX_COMPARED`."""
        n_units = min(n_units, MAX_COMPARED)
        if n_units > self._n_units:
            await self._system.wait_ready()
            urls, name = [self._system.url] * N_SESSIONS, f"undisturbed_{n_units}"
            async with LiveGroup(urls, name, UNDISTURBED_PACE_S) as group:
                while min(client.n_answered for client in group.clients) < n_units:
                    await asyncio.sleep(0.1)
            self._sessions, self._n_units = [Undisturbed.of(client) for client in group.clients], n_units
        return self._sessions


async def run_fault(system: System, fault: Fault, references: References, number: int) -> FaultRow:
    """Cause one fault under four live sessions. number: of the run, for the sessions' ids."""
    row = FaultRow(fault.name, fault.what)
    if fault.disk and (reason := system.disks[fault.disk].reason):
        row.reason = reason
        return row
    await system.wait_ready()
    async with FaultyProxy(system.port) as proxy:
        slow = f"ws://127.0.0.1:{proxy.port}"
        urls = [slow if fault.is_network and index < 2 else system.url for index in range(N_SESSIONS)]
        async with LiveGroup(urls, f"{fault.name}_{number}".replace("-", "_")) as group:
            await asyncio.sleep(BEFORE_S)
            n_notices = len(system.notices)
            scene = Scene(system, group, proxy, row)
            await fault.cause(scene)
            await asyncio.sleep(AFTER_S)
            row.notices += system.notices[n_notices:]
    for client in group.clients:
        row.notices += [one for one in client.notices if one.at >= row.at]
    undisturbed = await references.of(max(len(client.units) for client in group.clients))
    for index, (client, expected) in enumerate(zip(group.clients, undisturbed, strict=True)):
        figures = session_figures(client, expected, row.at)
        (row.hit if index in scene.hit else row.neighbours).append(figures)
    return row


# --- kills ----------------------------------------------------------------------------------------


async def run_kills(system: System, times: int, references: References, seed: int = 0) -> AsyncIterator[dict[str, Any]]:
    """Kill a worker again and again under four live sessions. Yields: counts and times so far, after each group."""
    dice = random.Random(seed)
    kills: list[dict[str, Any]] = []
    while len(kills) < times:
        earlier = len(kills)
        async with _group(system, f"kills_{earlier}") as group:
            for _ in range(min(KILLS_OF_A_GROUP, times - earlier)):
                await asyncio.sleep(BEFORE_S + dice.random())  # at any time within a unit
                kills.append(await _kill_once(system, group))
        undisturbed = await references.of(max(len(client.units) for client in group.clients))
        for client, expected in zip(group.clients, undisturbed, strict=True):
            for kill in kills[earlier:]:
                if client.name in kill["sessions"]:
                    kill["sessions"][client.name].update(_transcript(client, expected, kill["at"]))
        yield _summary(kills)


@asynccontextmanager
async def _group(system: System, name: str) -> AsyncIterator[LiveGroup]:
    await system.wait_ready()
    async with LiveGroup([system.url] * N_SESSIONS, name) as group:
        yield group


async def _kill_once(system: System, group: LiveGroup) -> dict[str, Any]:
    """Kill the worker that has most of the sessions, and wait until they go on and it is back."""
    names = {client.session_id: client for client in group.clients}
    workers = await system.workers_of(*names)
    number = max(range(N_WORKERS), key=list(workers.values()).count)
    stem, hit = f"worker_{number}", [names[name] for name, at in workers.items() if at == number]
    pid = system.pid(stem)
    at = system.signal(stem, signal.SIGKILL)
    end = time.monotonic() + MAX_RECOVERY_S
    while time.monotonic() < end and not all(_next_result(client, at) for client in hit):
        await asyncio.sleep(0.05)
    await system.wait_replaced(stem, pid)
    await system.wait_for(lambda answer: answer.get("ready_workers") == N_WORKERS, "/readyz", "the worker again")
    sessions = {client.name: {"next_result_s": _next_result(client, at)} for client in hit}
    return {"at": at, "sessions": sessions, "back_s": time.monotonic() - at}


def _next_result(client: ChaosClient, at: float) -> float | None:
    """Seconds to the first result after a time; None without one in the same conversation."""
    found = [one.answered_at for one in client.units if one.fingerprint and one.answered_at and not one.n_begun]
    return next((moment - at for moment in sorted(found) if moment >= at), None)


def _transcript(client: ChaosClient, expected: Undisturbed, at: float) -> dict[str, Any]:
    figures = session_figures(client, expected, at)
    return {
        "is_same_before": figures.n_same_before == figures.n_before,
        "is_same_after": figures.n_same_after == figures.n_after,
        "lost_units": figures.lost_units,
        "lost_sound_s": figures.lost_sound,
        "shorter_sound_s": figures.shorter_sound,
        "lost_text": figures.lost_text,
    }


def _summary(kills: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all kills; a session that was hit by several counts for each."""
    sessions = list(itertools.chain.from_iterable(kill["sessions"].values() for kill in kills))
    resumed = [one["next_result_s"] for one in sessions if one["next_result_s"] is not None]

    def count(holds: Callable[[dict[str, Any]], bool]) -> int:
        return sum(holds(one) for one in sessions)

    return {
        "kills": len(kills),
        "kills_all_resumed": sum(
            all(one["next_result_s"] is not None for one in kill["sessions"].values()) for kill in kills
        ),
        "sessions": len(sessions),
        "resumed": len(resumed),
        "next_result_s": percentiles(resumed),
        "same_before": count(lambda one: one["is_same_before"]),
        "same_after": count(lambda one: one["is_same_after"]),
        "lost_units": count(lambda one: one["lost_units"] > 0),
        "lost_sound_s": percentiles([one["lost_sound_s"] for one in sessions]),
        "shorter": count(lambda one: one["shorter_sound_s"] > 0),
        "shorter_sound_s": max((one["shorter_sound_s"] for one in sessions), default=0.0),
        "worker_back_s": percentiles([kill["back_s"] for kill in kills]),
        "runs": kills,
    }
