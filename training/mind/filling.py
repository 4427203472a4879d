"""A thread that moves finished records to the pools, so that steps do not wait for files and copies."""

import threading
from contextlib import nullcontext

import torch

from training.mind.pool import Pool, Stored
from training.mind.produce import Producers

TAKE_S = 0.25  # between polls for new records


class PoolFiller:
    """Takes records from producers until `stop`.

    Args:
        pool: of the records to learn from. held_out: of those that training never sees.

    Attributes:
        unseen: records of `held_out`.
    """

    def __init__(self, producers: Producers, pool: Pool, held_out: Pool):
        self._producers, self._pool, self._held_out = producers, pool, held_out
        self.unseen: list[Stored] = []
        self._fault: BaseException | None = None
        self._ended = threading.Event()
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)  # the rings are zeroed on another stream
        self._thread = threading.Thread(target=self._run, name="pool", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises: what ended the thread."""
        if self._fault is not None:
            raise self._fault

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        device = self._pool.device
        on_stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
        try:
            with on_stream:
                while not self._ended.wait(TAKE_S):
                    self._take()
        except BaseException as fault:
            self._fault = fault

    def _take(self) -> None:
        for records in self._producers.take():
            self._pool.add(records)
            if self._ended.is_set():
                break
        for records in self._producers.take_held_out():
            self.unseen += self._held_out.add(records)
