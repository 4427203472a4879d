"""The stages up to a unit's text: prefill of all known rows, then token by token.

Knows how jobs share batches there. Does not know speech, nor what a token means (jobs).
"""

from collections import defaultdict
from typing import Any

import torch

from models.errors import ContextOverflowError, NumericsError
from models.graphs.streams import SideStream
from models.stages.runner import Rows
from models.stages.step_types import Chosen
from worker.loop.batch_runner import BatchRunner
from worker.loop.job import Job


class TextStages:
    """prefill: newcomers' pictures, sound and rows, and the first token. decode: one token for each that writes."""

    def __init__(self, batch: BatchRunner):
        self._batch, self._duplex = batch, batch.duplex
        self._eyes = SideStream(batch.duplex.runner.model.device)

    def prefill(self, jobs: list[Job]) -> None:
        fresh = [job for job in jobs if not job.is_begun]
        for job in fresh:
            self._batch.guarded(job, self._begin)
        fresh = [job for job in fresh if job in self._batch.jobs and job.layout is not None]
        for job, rows in self._batch.run_with_retry(
            fresh, self._encode, lambda job: self._duplex.rewind(job.slot, job.at)
        ):
            job.rows = rows
        by_size = defaultdict(list)
        for job in [job for job in self._batch.jobs if job.rows is not None]:
            by_size[self._duplex.runner.shapes.fit("unit_prefill", "rows", self._piece(job))].append(job)
        # Few rows beside many would be padded to as many.
        for size in sorted(by_size):
            self._feed(by_size[size])

    def _begin(self, job: Job) -> None:
        job.is_begun = True
        job.layout = job.begin()
        job.is_prefilled = job.layout is None
        if job.is_prefilled:
            return
        held, new, limit = self._duplex.runner.context_len(job.slot), len(job.layout.ids), self._duplex.runner.llm_len
        if held + new > limit:
            what = f"context of session {job.session.id}"
            raise ContextOverflowError(what, expected=f"at most {limit} rows", got=f"{held} and {new} more")
        if len(job.sounds()) > 1:
            job.at = self._duplex.keep_audio_state(job.slot, job.at)

    def _encode(self, jobs: list[Job]) -> list[Rows]:
        """What each job's prefill feeds."""
        # Seeing takes longer than hearing, and runs beside it.
        with self._batch.timed(jobs, "see"), self._eyes.work():
            images = self._duplex.runner.encode_images([part for job in jobs for part in job.images()])
        with self._batch.timed(jobs, "hear"):
            heard = self._hear(jobs)
            others = [job.other_rows(self._duplex.runner) for job in jobs]
        self._eyes.join(*images)
        stretches = []
        for job, other in zip(jobs, others, strict=True):
            layout = job.layout
            seen, images = images[: len(layout.images)], images[len(layout.images) :]
            own = [*zip(layout.images, seen, strict=True), *zip(layout.sounds, heard[job.slot], strict=True)]
            stretches.append(Rows.mixed(layout.ids, [*own, *other]))
            self._batch.observer.saw(job.session.id, seen)
            self._batch.observer.fed(
                job.session.id, "prefill", self._duplex.runner.context_len(job.slot), stretches[-1]
            )
        return stretches

    def _piece(self, job: Job) -> int:
        """Rows that are fed at once: a long prompt goes in pieces, so that nobody else waits for all of it."""
        return min(len(job.rows), self._duplex.runner.shapes.rows[-1])

    def _feed(self, jobs: list[Job]) -> None:
        with self._batch.timed(jobs, "prefill"):
            fed = self._batch.run_with_retry(jobs, self._feed_batch, self._batch.way_back(jobs))
        for job, one in fed:
            if self._is_bad(job, one):
                continue
            n_fed, n_rows = self._piece(job), len(job.rows)
            job.rows = job.rows.cut(n_fed, n_rows) if n_fed < n_rows else None
            job.is_prefilled = job.rows is None
            if job.is_prefilled:
                self._prefilled(job, one)

    def _feed_batch(self, jobs: list[Job]) -> list[Chosen]:
        wants = [
            self._piece(job) == len(job.rows) and job.step is not None and job.step.sample and job.step.feed is None
            for job in jobs
        ]
        return self._duplex.feed([job.slot for job in jobs], [job.rows.cut(0, self._piece(job)) for job in jobs], wants)

    def _prefilled(self, job: Job, one: Chosen) -> None:
        job.prefilled()
        self._batch.observer.prefilled(job.session.id, one.logits)
        if job.step is None or not (job.step.sample or job.step.feed is not None):
            self._batch.guarded(job, self._text_done)
        elif job.step.feed is None:
            self._batch.guarded(job, self._chose, one.token)

    def _hear(self, jobs: list[Job]) -> dict[int, list[Any]]:
        """Each slot's units of sound, one after the other."""
        heard: dict[int, list[Any]] = {job.slot: [] for job in jobs}
        for number in range(max((len(job.sounds()) for job in jobs), default=0)):
            now = [job for job in jobs if len(job.sounds()) > number]
            rows = self._duplex.encode_audio(
                [job.slot for job in now],
                [torch.from_numpy(job.sounds()[number]) for job in now],
                overlap=[not job.session.reference for job in now],
            )
            for job, own in zip(now, rows, strict=True):
                heard[job.slot].append(own)
                self._batch.observer.heard(job.session.id, own)
        return heard

    def decode(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        past = {job.slot: self._duplex.runner.context_len(job.slot) for job in jobs}
        with self._batch.timed(jobs, "decode"):
            done = self._batch.run_with_retry(jobs, self._decode_batch, self._batch.way_back(jobs))
        for job, one in done:
            if self._is_bad(job, one):
                continue
            self._batch.observer.fed(job.session.id, "token", past[job.slot], job.step.feed)
            job.fed()
            if job.step.sample:
                self._batch.guarded(job, self._chose, one.token)
            else:
                self._batch.guarded(job, self._text_done)

    def _decode_batch(self, jobs: list[Job]) -> list[Chosen]:
        steps = [job.step for job in jobs]
        return self._duplex.step(
            [job.slot for job in jobs],
            [step.feed for step in steps],
            [step.place for step in steps],
            [step.sample for step in steps],
        )

    def _chose(self, job: Job, token: int) -> None:
        job.chose(self._batch.observer.token(job.session.id, job, token))
        if job.begins_text_chunk:
            self._duplex.begin_text_chunk(job.slot)
        if job.step.feed is None:
            self._text_done(job)

    def _text_done(self, job: Job) -> None:
        job.step = None
        job.text_done()

    def _is_bad(self, job: Job, one: Chosen) -> bool:
        if one.bad:
            what = f"logits of session {job.session.id}"
            self._batch.fail(job, NumericsError(what, expected="finite numbers", got="NaN, infinity or no choice left"))
        return one.bad
