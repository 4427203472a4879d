"""Threads that parse and decode what clients send, shared fairly: each client runs one job at a time.

The queue of the threads therefore holds one job of each client at most, and no client can occupy them. The event loop
and the workers' engine threads run no such job. Contains no decoders.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

from server.access.connection_pace import CONNECTION

N_THREADS = 4
Result = TypeVar("Result")
Given = ParamSpec("Given")


class ThreadShares:
    """The threads of one process."""

    def __init__(self, n_threads: int = N_THREADS):
        self._threads = ThreadPoolExecutor(n_threads, "shared")
        self._turns: dict[object, tuple[asyncio.Lock, int]] = {}  # share -> lock, number of jobs

    async def run(self, job: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """The result of a job for the client that is served, after its earlier ones."""
        pace = CONNECTION.get()
        share = object() if pace is None else pace.share
        lock, n_jobs = self._turns.get(share, (asyncio.Lock(), 0))
        self._turns[share] = lock, n_jobs + 1
        loop = asyncio.get_running_loop()
        try:
            await lock.acquire()
        except asyncio.CancelledError:
            self._end(share)
            raise
        running = self._threads.submit(job, *args, **kwargs)

        def end() -> None:
            lock.release()
            self._end(share)

        def on_done(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end)

        running.add_done_callback(on_done)  # a job whose caller is gone keeps its turn until it ends
        waiting = asyncio.wrap_future(running)
        del running
        try:
            return await waiting
        finally:
            del (
                waiting
            )  # an error, which both have, has this frame: it would be freed by a full garbage collection only

    def _end(self, share: object) -> None:
        lock, n_jobs = self._turns[share]
        if n_jobs > 1:
            self._turns[share] = lock, n_jobs - 1
        else:
            del self._turns[share]


run_shared = ThreadShares().run
