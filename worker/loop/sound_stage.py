"""The last stage of a unit: sound from windows of speech tokens.

A batch of windows is launched now and collected when its sound has arrived: on a GPU the vocoder runs beside the other
stages. Contains how jobs share batches. Does not contain speech tokens, nor where a turn ends (jobs).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.errors import NumericsError
from models.token2wav.stream.vocoder import Chunk, Vocoder
from models.token2wav.stream.vocoder_future import VocoderFuture
from models.token2wav.stream.windows import Window
from worker.loop.batch_runner import BatchRunner
from worker.loop.job import Job
from worker.loop.order.first_sound import FirstSoundOrder
from worker.loop.order.gathering import Gathering, whole_batch
from worker.loop.results import SOUND_RATE

SPACING_S = 0.05  # between batches of few windows while many jobs are in flight
MAX_IN_FLIGHT = 2  # batches at the vocoder: one that runs, and one that is queued so that the GPU does not idle


@dataclass(eq=False)
class _InFlightBatch:
    """Windows of several jobs at the vocoder.

    Attributes:
        windows: one per job.
        future: sounds of the windows; None once they were collected.
        start: clock reading at the launch.
    """

    windows: list[tuple[Job, Window]]
    future: VocoderFuture | None
    start: float

    def live_jobs(self) -> list[Job]:
        """Jobs that have not dropped their window since the launch."""
        return [job for job, window in self.windows if job.windows and job.windows[0] is window]

    @property
    def is_here(self) -> bool:
        """Whether the sounds can be collected without a wait."""
        return self.future is not None and self.future.is_here

    def take_future(self) -> VocoderFuture | None:
        """The future, the first time it is requested."""
        future, self.future = self.future, None
        return future


class SoundStage:
    """run: launch windows that are ready and emit the sounds that have arrived."""

    def __init__(self, batch: BatchRunner, vocoder: Vocoder, order: FirstSoundOrder):
        self._batch, self._order = batch, order
        self._in_flight: list[_InFlightBatch] = []
        self._launch, self._vocoder = _Launch(batch, vocoder, self._in_flight), vocoder
        self._launches = Gathering(batch.clock, SPACING_S)

    def run(self, jobs: list[Job]) -> None:
        """Emit the sounds that have arrived and launch the next windows of `jobs`.

        First sounds go before others; while calls are spaced, others fill their batch.
        """
        self._collect()
        while len(self._in_flight) < MAX_IN_FLIGHT and (ready := [job for job in jobs if self._is_ready(job)]):
            n_in_flight = self._batch.n_gathering
            if not self._launches.is_due(len(ready), n_in_flight):
                break
            first = self._order.first_of(ready)
            if Gathering.is_loaded(n_in_flight):
                first = whole_batch([*first, *(job for job in ready if job not in first)], self._vocoder.shapes)
            self._batch.run_with_retry(first, self._launch)
            self._collect()

    @property
    def oldest_batch(self) -> _InFlightBatch | None:
        """The batch in flight that arrives first."""
        return self._in_flight[0] if self._in_flight else None

    def _is_ready(self, job: Job) -> bool:
        """Whether a window waits and no other window of the job is in flight."""
        if job not in self._batch.jobs or not job.windows:
            return False
        return not any(job in batch.live_jobs() for batch in self._in_flight)

    def _collect(self) -> None:
        """Emit the sounds that have arrived, in launch order."""
        while self._in_flight and self._in_flight[0].is_here:
            batch = self._in_flight.pop(0)
            jobs = [job for job in batch.live_jobs() if job in self._batch.jobs]
            voiced = self._batch.run_with_retry(jobs, _Collect(self._batch, self._vocoder, batch))
            self._batch.count(jobs, "sound", batch.start)
            for job, pcm in voiced:
                self._batch.guard_speech(job, self._emit, pcm, batch.start)

    def _emit(self, job: Job, pcm: np.ndarray, launched: float) -> None:
        if not np.isfinite(pcm).all():
            raise NumericsError(f"sound of session {job.session.id}", expected="finite samples", got="NaN or infinity")
        window = job.windows.popleft()
        self._batch.observer.window_voiced(job.session.id, window.speech_tokens, window.last)
        if len(pcm):
            now, unplayed = self._batch.clock(), job.session.unplayed
            if unplayed.is_silent and not job.is_background:
                self._order.count_first_sound(now - job.arrived)
            if (gap := unplayed.add(len(pcm) / SOUND_RATE, now, job.arrived)) is not None:
                job.times.gaps.append(gap)
            job.emit_sound(pcm, launched, now)
        if window.last:
            self._batch.voices.begin_turn(job.session)


class _VocoderStage:
    """Base of stages of the vocoder. A failed call leaves its sessions unchanged, so there is nothing to undo."""

    def __init__(self, batch: BatchRunner, vocoder: Vocoder):
        self._batch, self._vocoder = batch, vocoder

    def undo(self, job: Job) -> None:
        """The vocoder's session is unchanged."""

    def fail(self, job: Job, error: Exception) -> None:
        self._batch.disable_speech(job, error)

    def _start(self, jobs: Sequence[Job]) -> VocoderFuture:
        chunks = []
        for job in jobs:
            slot, window = job.session.speech.vocoder_slot, job.windows[0]
            assert slot is not None, f"session {job.session.id}: expected a voice for its window, got none"
            chunks.append(Chunk(slot, window.speech_tokens, window.last))
        return self._vocoder.start(chunks)


class _Launch(_VocoderStage):
    """Launches the first window of each job."""

    def __init__(self, batch: BatchRunner, vocoder: Vocoder, in_flight: list[_InFlightBatch]):
        super().__init__(batch, vocoder)
        self._in_flight = in_flight

    def run(self, jobs: list[Job]) -> list[None]:
        start = self._batch.clock()
        future = self._start(jobs)
        self._in_flight.append(_InFlightBatch([(job, job.windows[0]) for job in jobs], future, start))
        return [None] * len(jobs)


class _Collect(_VocoderStage):
    """Collects the sounds of a batch. Result: [n] float32 at 24 kHz per job.

    If the batch failed, or one of its jobs is run again alone, the windows are launched again.
    """

    def __init__(self, batch: BatchRunner, vocoder: Vocoder, launched: _InFlightBatch):
        super().__init__(batch, vocoder)
        self._launched = launched

    def run(self, jobs: list[Job]) -> list[np.ndarray]:
        future, windows = self._launched.take_future(), self._launched.windows
        if future is not None:
            try:
                sounds = self._vocoder.finish(future)
            except Exception:
                # The failure may be that of a job that has left since: then the only job left is launched again.
                if len(jobs) > 1 or len(windows) == 1:
                    raise
            else:
                by_job = {job: sound for (job, _), sound in zip(windows, sounds, strict=True)}
                return [by_job[job] for job in jobs]
        return self._vocoder.finish(self._start(jobs))
