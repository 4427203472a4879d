"""The end of a job: emit its result, close its unit in the context, apply the window's evictions.

Contains how a unit is closed. Does not contain what the window keeps (`worker.loop.window`).
"""

from collections import deque
from dataclasses import replace

from models.stages.runner import Rows
from worker.loop.batch_runner import BatchRunner, RewindingStage
from worker.loop.duplex_job import DuplexJob
from worker.loop.early.headroom import Headroom
from worker.loop.job import Job
from worker.loop.replay.unfed_rows import UnfedRows
from worker.loop.results import ReplyResult, UnitResult
from worker.loop.window import Drop, Rebuild


class FinishStage:
    """run: finish jobs that are complete."""

    def __init__(self, batch: BatchRunner, headroom: Headroom, unfed: UnfedRows):
        """headroom: receives the times of units. unfed: rows that an eviction needs in the context."""
        self._batch, self._unit_steps, self._headroom, self._unfed = batch, batch.unit_steps, headroom, unfed

    def run(self, jobs: list[Job]) -> None:
        """Emit the results of `jobs`, then close their units."""
        if not jobs:
            return
        for job in jobs:
            job.mark_finished(self._batch.clock())
            if isinstance(job, DuplexJob):
                job.times.load = self._batch.overlap.end(job, self._batch.clock())
            self._emit_result(job)
        jobs = self._live(jobs)
        with self._batch.timed(jobs, "finalize"):
            evictions: dict[Job, deque[Drop | Rebuild]] = {}
            for job in jobs:
                self._batch.guard(job, self._close, evictions)
            self._unfed.feed([job for job in self._live(jobs) if evictions[job]])
            # A unit that is evicted itself must be in the context as a whole first.
            closing = [
                job
                for job in self._live(jobs)
                if job.session.pending and (job.session.reference or (evictions[job] and not job.session.window.units))
            ]
            for job in closing:
                self._batch.guard(job, self._make_room, evictions[job])
            closing = [job for job in self._live(closing) if job.session.pending]
            self._batch.run_with_retry(closing, _FeedPending(self._batch, closing))
            # One by one: an eviction cannot be undone, so a job's failure must not repeat those of others.
            while moving := [job for job in self._live(jobs) if evictions[job]]:
                for job in moving:
                    self._batch.guard(job, self._evict, evictions[job].popleft())
        for job in self._live(jobs):
            self._batch.guard(job, self._check_context_len)
        now = self._batch.clock()
        for job in self._live(jobs):
            job.session.move("finalize")
            self._batch.remove(job)
            self._batch.overlap.free(job.session, now)
            self._batch.overlap.set_jobs(len(self._batch.jobs), now)
            self._batch.observer.closed(job.session.id)

    def _live(self, jobs: list[Job]) -> list[Job]:
        return [job for job in jobs if job in self._batch.jobs]

    def _emit_result(self, job: Job) -> None:
        # Without a result there is nothing to close, and the host's state may not match the context.
        try:
            event = job.fail(job.error) if job.error is not None else job.result()
            if isinstance(event, UnitResult | ReplyResult):
                n_rows = self._unit_steps.context_len(job.slot) - job.session.n_early_rows
                event = replace(event, context_len=n_rows + self._unfed.n_rows(job.session))
            job.session.move("generate")
            job.session.send(event)
            self._batch.observer.result_sent(job.session.id, event)
            if self._headroom.is_on and isinstance(event, UnitResult):
                self._headroom.count_unit(job.times.total, self._batch.clock())
        except Exception as error:
            self._batch.lose_context(job, error)

    def _close(self, job: Job, evictions: dict[Job, deque[Drop | Rebuild]]) -> None:
        evictions[job] = deque(job.close())

    def _make_room(self, job: Job, evictions: deque[Drop | Rebuild]) -> None:
        """Leave out the ids that close a unit, if they do not fit: the last eviction drops the unit without them."""
        session, n_rows = job.session, len(job.session.pending)
        if session.reference or self._unit_steps.context_len(job.slot) + n_rows <= self._unit_steps.capacity(job.slot):
            return
        match evictions.pop():
            case Drop(keep, n):
                evictions.append(Drop(keep, n - n_rows))
            case Rebuild(prefix, first_kept, ids):
                evictions.append(Rebuild(prefix, first_kept - n_rows, ids))
        session.set_pending([])

    def _evict(self, job: Job, eviction: Drop | Rebuild) -> None:
        context, window = self._unit_steps.context, job.session.window
        if isinstance(eviction, Rebuild):
            context.rebuild(job.slot, *eviction)
        elif context.n_held(job.slot) in (None, eviction.keep):
            context.drop([job.slot], [eviction.keep], [eviction.n])
        else:
            # Rows between the held ones and the gap are fed again: their original keys are not kept.
            ids = (*window.previous_ids, *window.suffix)
            context.rebuild(job.slot, window.prefix, eviction.keep + eviction.n, ids)

    def _check_context_len(self, job: Job) -> None:
        """The window's count of rows equals that of the cache."""
        expected = job.expected_context_len()
        held = self._unit_steps.context_len(job.slot) + self._unfed.n_rows(job.session)
        assert expected in (None, held), f"session {job.session.id}: the window counts {expected} rows, {held} are held"


class _FeedPending(RewindingStage):
    """Feeds the ids that close a unit at once; otherwise they are fed in front of the next unit."""

    def run(self, jobs: list[Job]) -> list[None]:
        unit_steps, observer = self._batch.unit_steps, self._batch.observer
        for job in jobs:
            observer.rows_fed(job.session.id, "finalize", unit_steps.context_len(job.slot), job.session.pending)
        slots, rows = [job.slot for job in jobs], [Rows.mixed(job.session.pending, []) for job in jobs]
        unit_steps.feed(slots, rows, [False] * len(jobs))
        for job in jobs:
            job.session.set_pending([])
        return [None] * len(jobs)
