"""When to restart a process that exited, when a running process counts as hung, and when to give up.

Pure functions of counts and of times passed in; contains no clock and starts no process.
"""

from dataclasses import dataclass
from enum import StrEnum

USAGE = 2  # exit status of a program that rejects its settings


@dataclass(frozen=True)
class RestartPolicy:
    """Intervals and limits of the supervisor. Fields that end in `_s` are in seconds.

    initial_wait_s, max_wait_s: wait before a restart; it doubles with each restart.
    reset_s: time in the ready state after which the wait is `initial_wait_s` again.
    hang_timeout_s: time without an answer after which a ready process counts as hung.
    probe_timeout_s: limit for one HTTP probe.
    starting_poll_s, ready_poll_s: interval between two probes.
    grace_s: time to exit after a stop, on top of the time that sessions have to end.
    max_failed_starts: failed starts after which a process that was never ready is given up if no other one serves.
    start_timeout_s: time without an answer after which a process that is not ready yet counts as hung.
    """

    initial_wait_s: float = 1.0
    max_wait_s: float = 30.0
    reset_s: float = 10.0
    hang_timeout_s: float = 60.0
    probe_timeout_s: float = 3.0
    starting_poll_s: float = 0.25
    ready_poll_s: float = 1.0
    grace_s: float = 10.0
    max_failed_starts: int = 3
    start_timeout_s: float = 600.0


class Verdict(StrEnum):
    """What follows the end of a process. FAILING: restart it, unless no other one serves."""

    RESTART = "restart"
    FAILING = "failing"
    GIVE_UP = "give up"


class RestartBackoff:
    """History of one process over all its starts, and the wait before the next start.

    n_failed: starts that ended before the process was ready, counted only until the process is ready for the first
    time. n_restarts: starts after the first one.
    """

    def __init__(self, policy: RestartPolicy):
        self._policy = policy
        self.was_ready = False
        self.n_failed = self.n_restarts = 0
        self._n_waits = 0
        self._ready_since: float | None = None

    def mark_ready(self, now: float) -> None:
        """Record that the process became ready. now: monotonic s."""
        self.was_ready = True
        self._ready_since = now

    def mark_exited(self, status: int | None, now: float) -> Verdict:
        """Record that the process ended.

        Args:
            status: exit status; None if the supervisor killed the process.
            now: monotonic s.

        Returns: whether to restart the process. A process that was ready once is always restarted.
        """
        if self._ready_since is not None and now - self._ready_since >= self._policy.reset_s:
            self._n_waits = 0
        self._ready_since = None
        if self.was_ready:
            return Verdict.RESTART
        self.n_failed += 1
        if status == USAGE and self.n_failed == 1:
            return Verdict.GIVE_UP
        return Verdict.FAILING if self.is_failing else Verdict.RESTART

    @property
    def is_failing(self) -> bool:
        """Whether so many starts have failed that the process counts only if others serve."""
        return not self.was_ready and self.n_failed >= self._policy.max_failed_starts

    def next_wait_s(self) -> float:
        """Seconds to wait before the next start. Each call doubles the next result, up to the maximum."""
        wait = min(self._policy.max_wait_s, self._policy.initial_wait_s * 2.0 ** min(self._n_waits, 30))
        self._n_waits += 1
        self.n_restarts += 1
        return wait


class HealthTimeout:
    """Time for which a process has not answered probes.

    The time between two probes counts only up to the length of one probe interval. A launcher that was itself
    suspended therefore does not count the suspension against the process.
    """

    def __init__(self, policy: RestartPolicy):
        self._max_step_s = policy.probe_timeout_s + policy.ready_poll_s
        self._hang_timeout_s, self._start_timeout_s = policy.hang_timeout_s, policy.start_timeout_s
        self._probed_at: float | None = None
        self.seconds = 0.0

    def record_probe(self, answered: bool, now: float, *, is_ready: bool = True) -> bool:
        """Record one finished probe. now: monotonic s. Returns: whether the process counts as hung."""
        step = 0.0 if self._probed_at is None else min(now - self._probed_at, self._max_step_s)
        self._probed_at = now
        self.seconds = 0.0 if answered else self.seconds + step
        return self.seconds >= (self._hang_timeout_s if is_ready else self._start_timeout_s)
