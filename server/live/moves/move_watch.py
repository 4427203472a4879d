"""Lets sessions leave workers that shut down or are short of memory."""

import asyncio
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

from server.background import end_task
from server.dispatch.workers import Worker
from server.live.live_sessions import LiveSession, LiveSessions

INTERVAL_S = 0.5
MEMORY_INTERVAL_S = 5.0  # between two sessions that leave a worker for its memory


class MoveWatch:
    """A task that checks every session with a slot each `INTERVAL_S` seconds."""

    def __init__(self, live: LiveSessions, clock: Callable[[], float] = time.monotonic):
        self._live, self._clock = live, clock
        self._eased_at: WeakKeyDictionary[Worker, float] = WeakKeyDictionary()  # workers of a cluster may be removed
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run(), name="move-watch")

    async def stop(self) -> None:
        """End the task."""
        await end_task(self._task)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.poll()

    def poll(self) -> None:
        """Check all sessions once."""
        by_worker: dict[Worker, list[LiveSession]] = {}
        for session in self._live.all:
            if session.handover is not None and session.lease is not None:
                by_worker.setdefault(session.lease.worker, []).append(session)
        for worker, sessions in by_worker.items():
            self._poll_worker(worker, sessions)

    def n_movable(self, worker: Worker) -> int:
        """Number of the worker's sessions that can go on with another one."""
        return sum(
            session.handover is not None
            and session.handover.can_move
            and session.lease is not None
            and session.lease.worker is worker
            for session in self._live.all
        )

    def _poll_worker(self, worker: Worker, sessions: list[LiveSession]) -> None:
        if worker.is_closing:
            for session in sessions:
                if session.handover is not None and session.handover.reason is None:
                    session.handover.ask("draining")
            return
        asked = [session.handover for session in sessions if session.handover and session.handover.reason]
        if not worker.is_short_of_memory:
            for handover in asked:
                handover.withdraw()
            return
        if asked or self._clock() - self._eased_at.get(worker, -MEMORY_INTERVAL_S) < MEMORY_INTERVAL_S:
            return
        able = [session for session in sessions if session.handover is not None and session.handover.can_move]
        if able:
            least = min(able, key=_activity)
            self._eased_at[worker] = self._clock()
            if least.handover is not None:
                least.handover.ask("memory")


def _activity(session: LiveSession) -> tuple[bool, float]:
    """Larger for a session that does more: paused ones first, then those without a message for the longest time."""
    return session.lease is not None and not session.lease.paused, session.active_at
