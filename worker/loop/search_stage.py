"""The stage of beam searches: one token of every hypothesis per step, in the time that other jobs leave.

Contains when a step runs and for whom. Does not contain hypotheses (`models.sampling.beams`).
"""

from collections.abc import Callable

from models.stages.beam_steps import BeamSearch
from worker.loop.batch_runner import BatchRunner
from worker.loop.job import Job, JobPhase
from worker.loop.text_stages import unusable_logits

MAX_SEARCHES = 4  # that share a step, so that a step stays short; later ones wait until one of them ends
SHARE = 0.1  # of the time goes to searches while other jobs come first


class SearchStage:
    """run: one step of the oldest searches if it is due, and the end of those that are over or cancelled."""

    def __init__(self, batch: BatchRunner):
        self._batch = batch
        self._due = float("-inf")  # clock reading at which a step may run while other jobs come first

    def run(self, jobs: list[Job], is_contended: Callable[[], bool]) -> None:
        """Advance the jobs in SEARCH. is_contended: whether other jobs come first."""
        if not jobs:
            return
        going = [job for job in jobs if not _is_over(job)][:MAX_SEARCHES]
        if going and (self._batch.clock() >= self._due or not is_contended()):
            self._step(going)
        for job in jobs:
            if job in self._batch.jobs and _is_over(job):
                self._batch.guard(job, self._end)

    def _step(self, jobs: list[Job]) -> None:
        start = self._batch.clock()
        with self._batch.timed(jobs, "decode"):
            stepped = self._batch.run_with_retry(jobs, _Step(self._batch))
        for job, is_usable in stepped:
            if not is_usable:
                self._batch.fail(job, unusable_logits(job))
        end = self._batch.clock()
        self._due = end + (end - start) * (1 / SHARE - 1)

    def _end(self, job: Job) -> None:
        job.end_search()
        if job.step.feed is None:
            job.finish_text()


class _Step:
    """One step of the jobs' searches. Result: whether the logits were usable."""

    def __init__(self, batch: BatchRunner):
        self._batch = batch

    def run(self, jobs: list[Job]) -> list[bool]:
        return self._batch.unit_steps.beams.step([_search(job) for job in jobs])

    def undo(self, job: Job) -> None:
        """A step changes a search only after its last call to the device."""

    def fail(self, job: Job, error: Exception) -> None:
        self._batch.fail(job, error)


def _search(job: Job) -> BeamSearch:
    assert job.search is not None and job.phase is JobPhase.SEARCH, "expected a job that searches"
    return job.search


def _is_over(job: Job) -> bool:
    return job.is_search_cancelled or _search(job).is_over
