"""First sound before other work: which jobs wait while others are worked on whose clients have nothing to play.

These are jobs of turns that have no sound yet, and of turns whose sound is over before more of it is there. A job may
wait if its client still has more to play than a first sound takes, and never so long that its unit could be
late. Waiting changes when a job runs, not its results. Contains no stages.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from worker.loop.job import Job

HISTORY = 32  # first sounds whose slowest one counts
MIN_MARGIN_S = 0.1  # of sound that a client keeps, and at least twice the time of the slowest first sound
MAX_WAIT_S = 0.5  # after a unit's arrival; the other half of its second is for the work itself


class FirstSoundOrder:
    """The order of one loop's jobs. clock: monotonic s. is_on: False: no job waits."""

    def __init__(self, clock: Callable[[], float], *, is_on: bool = True):
        self._clock, self.is_on = clock, is_on
        self._times: deque[float] = deque(maxlen=HISTORY)

    def turn(self, on: bool) -> None:
        self.is_on = on

    def count_first_sound(self, seconds: float) -> None:
        """Count the time from the arrival of a unit to the first sound of its turn."""
        self._times.append(seconds)

    def forget(self) -> None:
        """Forget all first sounds, such as those of a warm-up, in which all sessions begin to speak at once."""
        self._times.clear()

    @property
    def margin_s(self) -> float | None:
        """Sound that a waiting job's client keeps, in s; None: no first sound was measured, so none waits."""
        return max(MIN_MARGIN_S, 2 * max(self._times)) if self._times else None

    def waiting(self, jobs: Iterable[Job]) -> set[Job]:
        """The jobs that wait in this iteration of the loop: none unless a client has nothing to play."""
        now, margin, jobs = self._clock(), self.margin_s, list(jobs)
        if not self.is_on or margin is None or not any(is_urgent(job, now) for job in jobs):
            return set()
        found = {job for job in jobs if now < latest_start(job, margin)}
        for job in found:
            job.session.unplayed.wait()
        return found

    def first_of(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs whose clients have nothing to play; all of them if there is none."""
        now = self._clock()
        urgent = [job for job in jobs if is_urgent(job, now)] if self.is_on else []
        return urgent or list(jobs)


def is_urgent(job: Job, now: float) -> bool:
    """Whether a unit may speak, or a job has speech to make, and the client has nothing to play."""
    if job.is_low_priority or not job.session.unplayed.is_over(now):
        return False
    return bool(job.calls or job.windows) or (job.has_text_left and not job.is_background)


def latest_start(job: Job, margin_s: float) -> float:
    """Clock reading up to which a job may wait; in the past for a job that never does."""
    ends = job.session.unplayed.ends
    if ends is None or job.is_background or job.session.reference:
        return float("-inf")
    return min(ends - margin_s, job.arrived + MAX_WAIT_S)
