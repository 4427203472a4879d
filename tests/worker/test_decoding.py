"""Threads that decode: large pictures apart from the rest, and no job of a caller that has gone."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from worker.decoding import LARGE_PIXELS, N_THREADS, DecodingThreads

PATIENCE_S = 20.0


def run(scenario: Callable[[DecodingThreads], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        decoders = DecodingThreads()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scenario(decoders)
        finally:
            decoders.close()

    asyncio.run(whole())


def test_large_pictures_run_one_at_a_time_beside_the_others() -> None:
    async def scenario(decoders: DecodingThreads) -> None:
        release, n_running = threading.Event(), []

        def large() -> int:
            n_running.append(1)
            release.wait(PATIENCE_S)
            return len(n_running)

        waiting = [asyncio.create_task(decoders.run_sized(LARGE_PIXELS + 1, large)) for _ in range(3)]
        for _ in range(3):
            assert await decoders.run_sized(LARGE_PIXELS, lambda: "small") == "small"
            assert await decoders.run(max, 1, 2) == 2
        assert len(n_running) == 1
        release.set()
        assert sorted(await asyncio.gather(*waiting)) == [1, 2, 3]

    run(scenario)


def test_jobs_of_cancelled_callers_do_not_begin() -> None:
    async def scenario(decoders: DecodingThreads) -> None:
        release, begun = threading.Event(), []

        def job(number: int) -> None:
            begun.append(number)
            release.wait(PATIENCE_S)

        tasks = [asyncio.create_task(decoders.run(job, number)) for number in range(N_THREADS + 3)]
        until = time.monotonic() + PATIENCE_S
        while len(begun) < N_THREADS and time.monotonic() < until:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        release.set()
        await decoders.run(begun.append, 99)
        assert begun == [*range(N_THREADS), 99]

    run(scenario)
