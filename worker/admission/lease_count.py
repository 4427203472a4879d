"""Slots that have no state of their own: how many there are, and how many are leased. Torch-free and thread-safe."""

import threading
from collections.abc import Callable

from models.errors import SlotError


class LeaseCount:
    """The slots of one model.

    Args:
        what: the model, for errors.
        n_slots: requests that are served at the same time.

    n_leases: so far, also those that were given back.
    """

    def __init__(self, what: str, n_slots: int):
        self.n_slots, self.n_leases, self._what = n_slots, 0, what
        self._lock, self._n_leased = threading.Lock(), 0

    @property
    def n_leased(self) -> int:
        return self._n_leased

    def lease(self) -> Callable[[], None]:
        """Take a slot. Returns: what gives it back, once. Raises: SlotError if all are in use."""
        with self._lock:
            if self._n_leased >= self.n_slots:
                raise SlotError(self._what, expected="a free slot", got=f"all {self.n_slots} in use")
            self._n_leased += 1
            self.n_leases += 1
        is_held = True

        def release() -> None:
            nonlocal is_held
            with self._lock:
                self._n_leased -= is_held
                is_held = False

        return release

    def body(self) -> dict[str, int]:
        """The slots for /health."""
        return {"total": self.n_slots, "free": self.n_slots - self._n_leased}
