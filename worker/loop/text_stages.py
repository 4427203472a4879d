"""The stages up to a unit's text: prefill of all known rows, then one token per step or a beam search.

Contains how jobs share batches and which come first. Does not contain speech, nor what a token means (jobs).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from models.errors import ContextOverflowError, NumericsError
from models.graphs.streams import SideStream
from models.sampling.beams import BeamSettings
from models.stages.beam_steps import BeamSearch
from models.stages.runner import Rows
from models.stages.step_types import Chosen
from worker.loop.batch_runner import BatchRunner, RewindingStage
from worker.loop.early.early_prefill import remove_early_rows
from worker.loop.job import Job, JobPhase
from worker.loop.replay.unfed_rows import UnfedRows

PERIOD = 8  # iterations for one part while other jobs come first
MAX_SEARCHES = 4  # that share a step, so that a step stays short; later ones wait until one of them ends
SHARE = 0.1  # of the time goes to searches while other jobs come first, and as much to jobs that yield
MAX_UNIT_AGE_S = 0.5  # a unit that is in flight for longer gets all of the time that is left of its second


class TextStages:
    """prefill: encode and feed the rows of new units and sample their first token. decode: one token per job."""

    def __init__(self, batch: BatchRunner, unfed: UnfedRows):
        self._batch, self._unit_steps, self._unfed = batch, batch.unit_steps, unfed
        self._encode = _Encode(batch, unfed)

    # --- prefill -------------------------------------------------------------------------------

    def prefill(self, jobs: list[Job]) -> None:
        """Begin jobs with a deadline in START, then feed each one in PREFILL one part of its rows."""
        if not jobs:
            return
        new = self.begin([job for job in jobs if job.phase is JobPhase.START])
        self._unfed.take(self._batch.run_with_retry(new, self._encode))
        by_size: dict[int, list[Job]] = defaultdict(list)
        for job in jobs:
            if job.rows is not None and job in self._batch.jobs:
                by_size[self.next_bucket(job.rows)].append(job)
        # A batch is padded to its longest part, so only parts of one bucket share a batch.
        for size in sorted(by_size):
            self.feed(by_size[size])

    def begin(self, jobs: list[Job]) -> list[Job]:
        """Begin jobs in START. Returns: those that have rows to encode and feed."""
        for job in jobs:
            self._batch.guard(job, self._begin)
        return [job for job in jobs if job.phase is JobPhase.PREFILL and job in self._batch.jobs]

    def _begin(self, job: Job) -> None:
        if not job.lay_out():
            return
        n_ahead, limit = self._unfed.n_rows(job.session) - job.session.n_early_rows, self._unit_steps.capacity(job.slot)
        held, new = self._unit_steps.context_len(job.slot) + n_ahead, len(job.layout.ids)
        if held + new > limit:
            what = f"context of session {job.session.id}"
            raise ContextOverflowError(what, expected=f"at most {limit} rows", got=f"{held} and {new} more")
        if len(job.audio_units()) > 1:
            assert job.start is not None
            job.move_start(self._unit_steps.keep_audio_state(job.slot, job.start))
        if (early := job.session.early_rows) is not None and job.start is not None:
            job.move_start(job.start._replace(context_len=early.n_before))
            if not early.begins(job.layout.ids, job.images()):
                remove_early_rows(self._unit_steps, job.session)

    def next_bucket(self, rows: Rows) -> int:
        """Padded size of the part to feed next: a long prompt is fed in parts, so that other jobs run in between."""
        return self._unit_steps.prefill_bucket(min(len(rows), self._unit_steps.max_prefill_rows))

    def feed(self, jobs: list[Job]) -> None:
        """Feed each job the next part of its rows; the parts have one bucket."""
        with self._batch.timed(jobs, "prefill"):
            fed = self._batch.run_with_retry(jobs, _Feed(self._batch, jobs))
        for job, (n_fed, chosen) in fed:
            if not self._check(job, chosen) and job.drop_fed_rows(n_fed):
                self._prefilled(job, chosen)

    def _prefilled(self, job: Job, chosen: Chosen) -> None:
        job.on_prefilled()
        self._batch.observer.prefilled(job.session.id, chosen.logits)
        if (settings := job.beam_settings) is not None:
            self._batch.guard(job, self._begin_search, settings, chosen)
            return
        if not job.step.sample and job.step.feed is None:
            self._batch.guard(job, Job.finish_text)
        elif job.step.feed is None:
            self._batch.guard(job, self._take_token, chosen)

    def _begin_search(self, job: Job, settings: BeamSettings, chosen: Chosen) -> None:
        search = self._unit_steps.beams.begin(job.slot, settings, chosen.logits)
        if search is None:
            raise _unusable_logits(job)
        job.begin_search(search)

    # --- decode --------------------------------------------------------------------------------

    def decode(self, jobs: list[Job]) -> None:
        """Feed each job's token and sample the next one if its step requires one."""
        if not jobs:
            return
        past = {job.slot: self._unit_steps.context_len(job.slot) for job in jobs}
        with self._batch.timed(jobs, "decode"):
            decoded = self._batch.run_with_retry(jobs, _Decode(self._batch, jobs))
        for job, chosen in decoded:
            if self._check(job, chosen):
                continue
            assert job.step.feed is not None
            self._batch.observer.rows_fed(job.session.id, "token", past[job.slot], job.step.feed)
            job.on_fed()
            if job.step.sample:
                self._batch.guard(job, self._take_token, chosen)
            else:
                self._batch.guard(job, Job.finish_text)

    def _take_token(self, job: Job, chosen: Chosen) -> None:
        assert chosen.token is not None
        if chosen.is_remembered:
            job.on_remembered(chosen.token)
        job.on_token(self._batch.observer.token_sampled(job.session.id, job, chosen.token))
        if job.begins_text_chunk:
            self._unit_steps.begin_text_chunk(job.slot)
        if job.step.feed is None:
            job.finish_text()

    def _check(self, job: Job, chosen: Chosen) -> bool:
        """Fail the job if its logits are not usable. Returns: whether they are not."""
        if chosen.bad:
            self._batch.fail(job, _unusable_logits(job))
        return chosen.bad


class BackgroundPrefill:
    """Prefill of jobs without a deadline, in bounded parts between the steps of jobs that have one.

    One iteration of the loop encodes one piece of media or feeds one batch of rows at most, and while other jobs have
    text or speech to work on, only every eighth iteration does. Kinds of jobs take turns, so that neither answers nor
    inserted texts hold up the others; of one kind, jobs that have had fewer parts come first.
    """

    def __init__(self, batch: BatchRunner, text: TextStages):
        self._batch, self._unit_steps, self._text = batch, batch.unit_steps, text
        self._n_deferred = 0
        self._last_kind: type[Job] = Job

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
        other_kinds = [job for job in waiting if type(job) is not self._last_kind]
        job = min(other_kinds or waiting, key=lambda one: one.n_parts)
        self._last_kind = type(job)
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
            stepped = self._batch.run_with_retry(jobs, _SearchStep(self._batch))
        for job, is_usable in stepped:
            if not is_usable:
                self._batch.fail(job, _unusable_logits(job))
        end = self._batch.clock()
        self._due = end + (end - start) * (1 / SHARE - 1)

    def _end(self, job: Job) -> None:
        job.end_search()
        if job.step.feed is None:
            job.finish_text()


class YieldingStage:
    """run: one part of a prefill, or one token of each job.

    It does nothing while a unit is in flight for more than `MAX_UNIT_AGE_S`: what is late is late without these jobs.
    Before that it takes `SHARE` of the time at most, unless the other jobs only wait for their speech or sound.
    """

    def __init__(self, batch: BatchRunner, text: TextStages):
        self._batch, self._text = batch, text
        self._prefill = BackgroundPrefill(batch, text)
        self._due = float("-inf")  # clock reading from which on a part may run while other jobs have work

    def run(self, jobs: list[Job], has_prior_work: Callable[[], bool]) -> None:
        """Advance the jobs with low priority, if it is their turn.

        Args:
            jobs: all jobs in flight.
            has_prior_work: whether other jobs have text or speech to work on now.
        """
        own = [job for job in jobs if job.is_low_priority and job.has_text_left]
        if not own:
            return
        start = self._batch.clock()
        if any(start - job.arrived > MAX_UNIT_AGE_S for job in jobs if not job.is_background):
            return
        if start < self._due and has_prior_work():
            return
        if unfed := [job for job in own if job.phase is not JobPhase.DECODE]:
            self._prefill.run(unfed, lambda: False)
        else:
            self._text.decode(own)
        end = self._batch.clock()
        self._due = end + (end - start) * (1 / SHARE - 1)


def _unusable_logits(job: Job) -> NumericsError:
    what = f"logits of session {job.session.id}"
    return NumericsError(what, expected="finite numbers", got="NaN, infinity or no choice left")


class _Encode:
    """Encodes the media of new jobs. Result: the rows that each job's prefill feeds."""

    def __init__(self, batch: BatchRunner, unfed: UnfedRows):
        self._batch, self._unit_steps, self._unfed = batch, batch.unit_steps, unfed
        self._vision_stream = SideStream(batch.unit_steps.device)

    def run(self, jobs: list[Job]) -> list[Rows]:
        unit_steps, observer = self._unit_steps, self._batch.observer
        # The vision encoder takes longer than the audio encoder and runs beside it.
        with self._batch.timed(jobs, "see"), self._vision_stream.work():
            images = unit_steps.early_images.encode([(job.slot, part) for job in jobs for part in job.images()])
        with self._batch.timed(jobs, "hear"):
            audio = self._encode_audio(jobs)
        self._vision_stream.join(*images)
        spans: list[Rows] = []
        for job in jobs:
            layout = job.layout
            own_images, images = images[: len(layout.image_starts)], images[len(layout.image_starts) :]
            own = [
                *zip(layout.image_starts, own_images, strict=True),
                *zip(layout.audio_starts, audio[job.slot], strict=True),
            ]
            rows, n_early = Rows.mixed(layout.ids, own), job.session.n_early_rows
            observer.images_encoded(job.session.id, own_images)
            first = unit_steps.context_len(job.slot) - n_early + self._unfed.n_rows(job.session)
            observer.rows_fed(job.session.id, "prefill", first, rows)
            spans.append(rows.cut(n_early, len(rows)))
        return spans

    def _encode_audio(self, jobs: list[Job]) -> dict[int, list[Tensor]]:
        """Rows [10, D] of each slot's audio units, in order."""
        encoded: dict[int, list[Tensor]] = {job.slot: [] for job in jobs}
        for number in range(max((len(job.audio_units()) for job in jobs), default=0)):
            now = [job for job in jobs if len(job.audio_units()) > number]
            rows = self._unit_steps.encode_audio(
                [job.slot for job in now],
                [torch.from_numpy(job.audio_units()[number]) for job in now],
                [not job.session.reference for job in now],
            )
            for job, own in zip(now, rows, strict=True):
                encoded[job.slot].append(own)
                self._batch.observer.audio_encoded(job.session.id, own)
        return encoded

    def undo(self, job: Job) -> None:
        assert job.start is not None
        self._vision_stream.join()  # the audio may have failed beside it
        self._unit_steps.rewind(job.slot, job.start)
        if (early := job.session.take_early_rows()) is not None:
            early.mark_removed()

    def fail(self, job: Job, error: Exception) -> None:
        self._batch.fail(job, error)


class _Feed(RewindingStage):
    """Feeds the next part of each job's rows. Result: the number of rows and the token sampled after the last part."""

    def run(self, jobs: list[Job]) -> list[tuple[int, Chosen]]:
        unit_steps = self._batch.unit_steps
        most, slots, parts, samples = unit_steps.max_prefill_rows, [], [], []
        for job in jobs:
            assert job.rows is not None
            slots.append(job.slot)
            parts.append(job.rows.cut(0, most))
            samples.append(len(job.rows) <= most and job.step.sample and job.step.feed is None)
        with unit_steps.state.text.choosing_from(_token_sets(jobs, samples)):
            chosen = unit_steps.feed(slots, parts, samples)
        return [(len(part), one) for part, one in zip(parts, chosen, strict=True)]


class _Decode(RewindingStage):
    """Feeds one token per job. Result: the token sampled after it."""

    def run(self, jobs: list[Job]) -> list[Chosen]:
        slots, ids, places, samples = [], [], [], []
        for job in jobs:
            assert job.step.feed is not None, "decode: expected a step with a token to feed"
            slots.append(job.slot)
            ids.append(job.step.feed)
            places.append(job.step.place)
            samples.append(job.step.sample)
        unit_steps = self._batch.unit_steps
        with unit_steps.state.text.choosing_from(_token_sets(jobs, samples)):
            return unit_steps.step(slots, ids, places, samples)


def _token_sets(jobs: Sequence[Job], samples: Sequence[bool]) -> dict[int, int]:
    """Token sets of the slots that sample from another one than that of their settings."""
    sampling = (job for job, is_sampled in zip(jobs, samples, strict=True) if is_sampled)
    return {job.slot: chosen for job in sampling if (chosen := job.token_set) is not None}


class _SearchStep:
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
