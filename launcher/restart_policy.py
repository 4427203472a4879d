"""When a process that ended is started again, when one that runs counts as hung, and when to give up. Pure.

Knows seconds and counts; clocks and processes belong to others.
"""

from dataclasses import dataclass
from enum import StrEnum

USAGE = 2  # exit status of a program whose settings cannot be


@dataclass(frozen=True)
class Policy:
    """Seconds, all of them.

    first_s, most_s: the wait before a restart, doubled each time. reset_s: after so long in health it begins anew.
    hung_s: without an answer. answer_s: for one answer. starting_poll_s, serving_poll_s: between two questions.
    grace_s: for the end, after what sessions may take. tries: starts that may fail before a process is given up.
    """

    first_s: float = 1.0
    most_s: float = 30.0
    reset_s: float = 60.0
    hung_s: float = 60.0
    answer_s: float = 3.0
    starting_poll_s: float = 0.25
    serving_poll_s: float = 1.0
    grace_s: float = 10.0
    tries: int = 3


class Verdict(StrEnum):
    RESTART = "restart"
    GIVE_UP = "give up"


class RestartBackoff:
    """What one process has been through, over all its starts."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self.was_ready = False
        self.n_failed = 0  # starts that ended before they were ready, while none ever was
        self._n_waits = 0
        self._ready_since: float | None = None

    def ready(self, now: float) -> None:
        """It got ready."""
        self.was_ready = True
        self._ready_since = now

    def ended(self, status: int | None, now: float) -> Verdict:
        """It ended. status: of the exit, None if it was killed because it did not serve."""
        if self._ready_since is not None and now - self._ready_since >= self._policy.reset_s:
            self._n_waits = 0
        self._ready_since = None
        if self.was_ready:
            return Verdict.RESTART
        self.n_failed += 1
        is_hopeless = status == USAGE and self.n_failed == 1
        return Verdict.GIVE_UP if is_hopeless or self.n_failed >= self._policy.tries else Verdict.RESTART

    def wait_s(self) -> float:
        """How long to wait before the next start; each time it is asked, longer."""
        wait = min(self._policy.most_s, self._policy.first_s * 2.0 ** min(self._n_waits, 30))
        self._n_waits += 1
        return wait


class HealthTimeout:
    """How long a process has not answered, as far as somebody was asking.

    A launcher that was stopped for an hour has not heard anything either, and that is nobody's fault.
    """

    def __init__(self, policy: Policy):
        self._most_step = policy.answer_s + policy.serving_poll_s
        self._hung_s = policy.hung_s
        self._asked_at: float | None = None
        self.seconds = 0.0

    def asked(self, answered: bool, now: float) -> bool:
        """One question is over. Returns: whether it counts as hung."""
        step = 0.0 if self._asked_at is None else min(now - self._asked_at, self._most_step)
        self._asked_at = now
        self.seconds = 0.0 if answered else self.seconds + step
        return self.seconds >= self._hung_s
