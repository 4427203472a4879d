"""Counts the running time of sessions for their keys, and ends those of keys whose minutes of the day are used up."""

import asyncio

from server.background import end_task
from server.dispatch.dispatcher import Dispatcher
from server.live.closes import QUOTA_USED
from server.live.live_sessions import LiveSessions

INTERVAL_S = 1.0


class QuotaWatch:
    """A task that looks at every session with a slot each `INTERVAL_S` seconds."""

    def __init__(self, live: LiveSessions, dispatcher: Dispatcher):
        self._live, self._dispatcher = live, dispatcher
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start counting."""
        self._task = asyncio.create_task(self._run(), name="quota-watch")

    async def stop(self) -> None:
        """Stop counting."""
        await end_task(self._task)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.poll()

    def poll(self) -> None:
        """Count and end once."""
        for session in self._live.all:
            pending = session.pending
            if pending is None or pending.lease is None or pending.permit is None:
                continue
            pending.permit.charge(self._dispatcher.held(pending))
            if pending.permit.is_used_up:
                session.end(QUOTA_USED)
