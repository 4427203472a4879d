"""Jobs in flight, and how one that fails is kept from its neighbours.

A stage that fails for a batch is undone for all of it and run again for each job by itself. Knows what is undone and
who is told. Does not know the stages.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from models.stages.unit_steps import UnitSteps
from worker.loop.job import Job
from worker.loop.observer import Observer
from worker.loop.session import Phase
from worker.loop.voice_manager import VoiceManager

LOG = logging.getLogger(__name__)


class BatchRunner:
    """jobs: in flight. Everything that may raise on account of one of them goes through here."""

    def __init__(self, duplex: UnitSteps, voices: VoiceManager, observer: Observer, clock: Callable[[], float]):
        self.duplex, self.voices, self.observer, self.clock = duplex, voices, observer, clock
        self.jobs: list[Job] = []

    def run_with_retry(
        self,
        jobs: list[Job],
        call: Callable[[list[Job]], Sequence[Any]],
        undo: Callable[[Job], None],
        *,
        fail: Callable[[Job, Exception], None] | None = None,
    ) -> list[tuple[Job, Any]]:
        """Run a batch; if it fails, undo it and run each job by itself. Returns: the jobs it worked for, and what."""
        if not jobs:
            return []
        try:
            return list(zip(jobs, call(jobs), strict=True))
        except Exception as error:
            if len(jobs) > 1:
                LOG.warning("a batch of %d failed and is run again one by one: %s", len(jobs), error)
            for job in jobs:
                undo(job)
            if len(jobs) == 1:
                (fail or self.fail)(jobs[0], error)
                return []
        return [pair for job in jobs for pair in self.run_with_retry([job], call, undo, fail=fail)]

    def guarded(
        self,
        job: Job,
        call: Callable[..., None],
        *arguments: Any,
        fail: Callable[[Job, Exception], None] | None = None,
    ) -> None:
        """Run what concerns one job only; if it fails, so does the job."""
        try:
            call(job, *arguments)
        except Exception as error:
            (fail or self.fail)(job, error)

    def disable_speech(self, job: Job, error: Exception) -> None:
        """Go on without a voice: the text stands."""
        job.error = error
        job.calls.clear()
        job.windows.clear()
        self.voices.cut(job.session)

    def way_back(self, jobs: Sequence[Job]) -> Callable[[Job], None]:
        """What puts a job's slot back to where it stands now, but for a running speech call: that begins again."""
        before = {job.slot: self._stand(job) for job in jobs}
        return lambda job: self.duplex.rewind(job.slot, before[job.slot])

    def _stand(self, job: Job) -> Any:
        stand = self.duplex.counters(job.slot)
        if job.calls and job.calls[0].is_begun:
            stand = stand._replace(recent_tokens=job.calls[0].at.recent_tokens)
        return stand

    def undo_call(self, job: Job) -> None:
        """Put the slot back to where its running speech call began."""
        self.duplex.rewind_speech(job.slot, job.calls[0].at)

    def fail(self, job: Job, error: Exception) -> None:
        """End a job without touching others: its text is taken back, or stands if only its voice failed."""
        session = job.session
        if job.error is None and job.is_text_done and session.phase is Phase.PREFILLED:
            self.disable_speech(job, error)
            return
        if session.phase is Phase.GENERATED:
            self.lose(job, error)  # half-closed, its context cannot be trusted any more
            return
        self.jobs.remove(job)
        self.duplex.rewind(job.slot, job.at)
        session.move("fail")
        self._report(job, error)

    def lose(self, job: Job, error: Exception) -> None:
        """End a job and its session's context with it: the session has to be prepared again."""
        self.jobs.remove(job)
        self.duplex.empty(job.slot)
        job.session.move("reset")
        self._report(job, error)
        job.session.drop_waiting("its context is lost")

    def _report(self, job: Job, error: Exception) -> None:
        event = job.fail(error)
        LOG.warning("session %s: %s", job.session.id, error, exc_info=error)
        job.session.tell(event)
        self.observer.done(job.session.id, event)

    @contextmanager
    def timed(self, jobs: Sequence[Job], stage: str) -> Iterator[None]:
        """Count the time inside as this stage's, in full for each of the jobs."""
        start = self.clock()
        yield
        self.count(jobs, stage, start)

    def count(self, jobs: Sequence[Job], stage: str, start: float) -> None:
        """Count the time since `start` as this stage's, in full for each of the jobs."""
        spent = 1000 * (self.clock() - start)
        for job in jobs:
            setattr(job.times, stage, getattr(job.times, stage) + spent)


def nothing(job: Job) -> None:
    """What there is to undo where a stage changes nothing that counts."""
