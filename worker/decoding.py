"""Threads that decode what clients send, apart from asyncio's own, so that sessions do not delay one another.

A conversation waits for each job before it submits the next one, and a job is one picture, one message or one second of
sound. The queue of the threads is therefore a fair order, and a conversation that ends leaves one job at most. Contains
no decoders.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

N_THREADS = 2
LARGE_PIXELS = 2**23  # a picture above takes 0.1 s or more, and 32 MB or more

Result = TypeVar("Result")
Given = ParamSpec("Given")


class DecodingThreads:
    """The threads of one worker. Pictures above LARGE_PIXELS have one of their own: they take time and memory."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(N_THREADS, "decode")
        self._large = ThreadPoolExecutor(1, "decode-large")

    async def run(self, job: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """The result of a short job. A caller that is cancelled takes a job that has not begun out of the queue."""
        return await _run(self._small, lambda: job(*args, **kwargs))

    async def run_sized(self, n_pixels: int, job: Callable[[], Result]) -> Result:
        """As `run`, for a job with a picture of so many pixels."""
        return await _run(self._large if n_pixels > LARGE_PIXELS else self._small, job)

    def close(self) -> None:
        """Drop all jobs that have not begun."""
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)


async def _run(threads: ThreadPoolExecutor, job: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(threads, job)
