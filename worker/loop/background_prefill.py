"""Prefill of jobs without a deadline, in bounded parts between the steps of jobs that have one.

One iteration of the loop encodes one piece of media or feeds one batch of rows at most, and while other jobs have text
or speech to work on, only every eighth iteration does. Contains the order of the parts. Does not contain encoders, nor
how rows are fed.
"""

from collections.abc import Callable

from models.stages.runner import Rows
from worker.loop.batch_runner import BatchRunner
from worker.loop.job import Job, JobPhase
from worker.loop.text_stages import TextStages

PERIOD = 8  # iterations for one part while other jobs come first


class BackgroundPrefill:
    """run: one part of one job; jobs that have had fewer parts come first."""

    def __init__(self, batch: BatchRunner, text: TextStages):
        self._batch, self._unit_steps, self._text = batch, batch.unit_steps, text
        self._n_deferred = 0

    def run(self, jobs: list[Job], is_contended: Callable[[], bool]) -> None:
        """Begin new jobs, and encode or feed one part.

        How the rows of a job are divided into parts does not depend on other jobs.

        Args:
            jobs: background jobs in START and PREFILL.
            is_contended: whether other jobs have text or speech to work on now.
        """
        if not jobs:
            return
        for job in self._text.begin([job for job in jobs if job.phase is JobPhase.START]):
            job.open_media(self._unit_steps)
            if not job.has_media:
                self._batch.guard(job, self._set_rows)
        self._n_deferred = self._n_deferred + 1 if is_contended() else PERIOD
        if self._n_deferred < PERIOD:
            return
        self._n_deferred = 0
        waiting = [job for job in jobs if job.phase is JobPhase.PREFILL and job in self._batch.jobs]
        if not waiting:
            return
        job = min(waiting, key=lambda one: one.n_parts)
        if job.rows is None:
            self._batch.guard(job, self._encode_piece)
        if job.rows is None:
            return
        self._text.feed(self._batch_with(job, job.rows, waiting))

    def _encode_piece(self, job: Job) -> None:
        start = self._batch.clock()
        piece = job.encode_piece()
        if piece is not None:
            self._batch.count([job], "see" if piece.kind == "image" else "hear", start)
            return
        self._set_rows(job)

    def _set_rows(self, job: Job) -> None:
        images, rows = job.encoded_rows()
        job.set_rows(rows)
        observer = self._batch.observer
        observer.images_encoded(job.session.id, images)
        observer.rows_fed(job.session.id, "prefill", self._unit_steps.context_len(job.slot), rows)

    def _batch_with(self, first: Job, rows: Rows, waiting: list[Job]) -> list[Job]:
        """`first` and others whose next part has the same bucket, up to `max_prefill_rows` padded rows in all."""
        bucket = self._text.next_bucket(rows)
        others = sorted((job for job in waiting if job is not first), key=lambda one: one.n_parts)
        alike = [job for job in others if job.rows is not None and self._text.next_bucket(job.rows) == bucket]
        batch = [first, *alike[: max(self._unit_steps.max_prefill_rows // bucket - 1, 0)]]
        for job in batch:
            job.count_part()
        return batch
