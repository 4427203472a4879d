"""Slots that no session needs, for work that can wait: they are reclaimed as soon as a ticket waits in the queue.

Contains no I/O. `Dispatcher` owns it and calls `update` whenever a slot or a ticket may have changed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from server.dispatch.queue import Queue, RequestType
from server.dispatch.workers import WorkerLease, Workers


@dataclass(eq=False)
class SpareSlot:
    """One request for a spare slot, from `Dispatcher.borrow` to `Dispatcher.give_back`.

    Attributes:
        on_reclaim: called once if the slot has to be given back now.
        lease: None while it waits.
        granted: set with the lease.
    """

    request_type: RequestType
    session_id: str
    owner: str
    on_reclaim: Callable[[], None]
    lease: WorkerLease | None = None
    is_reclaimed: bool = False
    granted: asyncio.Event = field(default_factory=asyncio.Event)


class SpareSlots:
    """All requests for spare slots, first come, first served.

    Args:
        workers: their slots.
        queue: tickets of sessions, which come first.
        max_per_worker: spare slots of one worker that are lent at the same time.
    """

    def __init__(self, workers: Workers, queue: Queue, max_per_worker: int):
        self._workers, self._queue, self._max_per_worker = workers, queue, max_per_worker
        self._waiting: list[SpareSlot] = []
        self._lent: list[SpareSlot] = []

    def add(self, slot: SpareSlot) -> None:
        """Take a request; `update` must follow."""
        self._waiting.append(slot)

    def remove(self, slot: SpareSlot) -> None:
        """End a request and return its slot; `Dispatcher.dispatch` must follow. A second call does nothing."""
        if slot in self._waiting:
            self._waiting.remove(slot)
        elif slot in self._lent:
            self._lent.remove(slot)
            assert slot.lease is not None, "expected a lease of a slot that is lent"
            self._workers.release(slot.lease)
            slot.lease = None

    def adopt(self, slot: SpareSlot, lease: WorkerLease) -> None:
        """Take a request whose slot was lent before. lease: of its slot."""
        slot.lease = lease
        self._lent.append(slot)

    def update(self) -> list[SpareSlot]:
        """Reclaim as many slots as tickets wait and as workers are over their capacity, the newest first.

        Lend free slots if no ticket waits. Returns: the requests that have a slot since now.
        """
        n_waiting = len(self._queue.waiting_for("omni"))
        n_missing = n_waiting + self._workers.n_excess - sum(slot.is_reclaimed for slot in self._lent)
        for slot in reversed([slot for slot in self._lent if not slot.is_reclaimed]):
            if n_missing <= 0:
                break
            slot.is_reclaimed = True
            slot.on_reclaim()
            n_missing -= 1
        granted = []
        while self._waiting and not n_waiting:
            slot = self._waiting[0]
            slot.lease = self._workers.acquire_spare(
                slot.request_type, slot.session_id, slot.owner, self._max_per_worker
            )
            if slot.lease is None:
                break
            self._lent.append(self._waiting.pop(0))
            slot.granted.set()
            granted.append(slot)
        return granted
