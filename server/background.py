"""The end of tasks that run beside requests."""

import asyncio
from contextlib import suppress


async def end_task(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for its end. task: None: nothing is done."""
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
