"""How many workers a group of a cluster should have. Contains no clock and no I/O."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ScalingPolicy:
    """Limits of the number of workers.

    min_workers, max_workers: of the group. wait_s: wait of the oldest ticket from which on workers are added.
    spare_share: share of all slots that should be free. idle_s: time for which fewer workers have to be enough
    before one is drained.
    """

    min_workers: int = 1
    max_workers: int = 1
    wait_s: float = 2.0
    spare_share: float = 0.1
    idle_s: float = 60.0


@dataclass(frozen=True)
class SlotLoad:
    """What a group measures of one of its workers' models.

    slots: of ready workers: as many sessions as they serve in time, by measured headroom. free: of these slots.
    queue_length: tickets that wait for them. longest_wait_s: of the oldest one.
    """

    slots: int
    free: int
    queue_length: int = 0
    longest_wait_s: float = 0.0


@dataclass(frozen=True)
class GroupLoad:
    """What a group measures. Draining workers are left out.

    n_workers: all, those that start included. n_starting: of them, those that are not ready. models: with slots.
    """

    n_workers: int
    n_starting: int
    models: tuple[SlotLoad, ...] = ()


class Scaler:
    """The number of workers for each measured load.

    Args:
        policy: limits.
    """

    def __init__(self, policy: ScalingPolicy):
        self.policy = policy
        self._idle_since: float | None = None

    def desired(self, load: GroupLoad, now: float) -> int:
        """The number of workers that there should be; one less than now at most. now: monotonic s."""
        policy = self.policy
        n_ready = load.n_workers - load.n_starting
        # The model that needs the most workers counts.
        needed = max((self._needed(model, n_ready) for model in load.models), default=0)
        wanted = max(policy.min_workers, min(policy.max_workers, needed))
        if not n_ready and load.n_workers:  # nothing is measured yet
            wanted = max(policy.min_workers, min(wanted, load.n_workers))
        if wanted >= load.n_workers:
            self._idle_since = None
            return wanted
        if load.n_starting or any(model.queue_length for model in load.models):
            self._idle_since = None
            return max(policy.min_workers, min(load.n_workers, policy.max_workers))
        if self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since < policy.idle_s and load.n_workers <= policy.max_workers:
            return load.n_workers
        self._idle_since = now
        return load.n_workers - 1

    def _needed(self, model: SlotLoad, n_ready: int) -> int:
        """Workers for every slot in use, every ticket that has waited for long, and the spare slots."""
        each = model.slots / n_ready if n_ready and model.slots else 1.0
        waiting = model.queue_length if model.longest_wait_s >= self.policy.wait_s else 0
        return math.ceil((model.slots - model.free + waiting) / (1 - self.policy.spare_share) / each)
