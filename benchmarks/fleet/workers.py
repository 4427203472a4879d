"""Many fake workers in one process, whose units take as long as those measured on a GPU.

`python -m benchmarks.fleet.workers --workers 16 --slots 64` logs the ports and serves until SIGTERM.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from contextlib import AsyncExitStack
from itertools import pairwise

from benchmarks.serve.fake_worker import FakeWorker
from server.serving import raise_file_limit
from worker import log

LOG = logging.getLogger("benchmarks.fleet.workers")
# Sessions -> median seconds of a listening and of a speaking unit: one NVIDIA H200, released size, half of the sessions
# speaking, 2026-11-22 (benchmarks/README.md). One session: the latency of a single one.
MEASURED = {
    1: (0.0134, 0.0865),
    4: (0.0140, 0.0861),
    8: (0.0142, 0.0854),
    16: (0.0174, 0.0970),
    32: (0.0246, 0.1975),
    64: (0.0501, 0.5428),
}


def unit_s(n_sessions: int) -> float:
    """Mean seconds of a unit among so many sessions, half of which speak; linear between the measured numbers.

    Above the largest measured number: as at that number.
    """
    means = {n: (listen + speak) / 2 for n, (listen, speak) in MEASURED.items()}
    if n_sessions <= min(means):
        return means[min(means)]
    for below, above in pairwise(means):
        if n_sessions <= above:
            share = (n_sessions - below) / (above - below)
            return means[below] + share * (means[above] - means[below])
    return means[max(means)]


class FleetWorker(FakeWorker):
    """A fake worker whose units take as long as measured for its number of sessions."""

    @property
    def think_s(self) -> float:
        return unit_s(len(self.sessions))

    @think_s.setter
    def think_s(self, _: float) -> None:
        """The base class assigns a constant."""


async def _run(options: argparse.Namespace) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(FleetWorker(options.slots, n_listen=1, n_speak=1, gpu_id=index))
            for index in range(options.workers)
        ]
        LOG.info("ports: %s", ",".join(str(worker.port) for worker in workers))
        LOG.info("listening on %s:%d", workers[0].host, workers[0].port)
        await stop.wait()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet.workers", description="Many workers without a model."
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="number of workers; default: %(default)s")
    parser.add_argument("--slots", type=int, default=64, metavar="N", help="slots of each; default: %(default)s")
    options = parser.parse_args(argv)
    log.set_up(log.level_of("INFO", os.environ))
    raise_file_limit()
    asyncio.run(_run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
