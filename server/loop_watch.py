"""Measures how late the event loop runs a task that is due: the time for which something blocked it."""

import asyncio

from server.background import end_task
from server.metrics import GatewayMetrics

INTERVAL_S = 0.02


class LoopWatch:
    """A task that sleeps for `INTERVAL_S`, over and over, and records how much longer it took."""

    def __init__(self, metrics: GatewayMetrics):
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start measuring."""
        self._task = asyncio.create_task(self._run(), name="loop-watch")

    async def stop(self) -> None:
        """Stop measuring."""
        await end_task(self._task)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_at = loop.time() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self._metrics.record_loop_delay(max(0.0, loop.time() - due_at))
