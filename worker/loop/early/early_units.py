"""Runs units before their seconds are full, up to the decision, and takes them back unless they speak.

A trial runs alone, between two iterations of the loop: its failure concerns no other session, and no batch of others
has another shape because of it. After its first token it is an ordinary job, or it has left no trace.
"""

import logging
from collections.abc import Callable, Sequence

from models.inputs.audio_sizes import SAMPLE_RATE
from models.stages.kept_slots import KeptSlots
from models.stages.unit_steps import UnitSteps
from worker.early.trial import EarlyEnd, EarlyOutcome
from worker.loop.batch_runner import BatchRunner
from worker.loop.early.early_job import EarlyJob, SessionInputs, TakenBackError
from worker.loop.early.early_prefill import remove_early_rows
from worker.loop.early.headroom import Headroom
from worker.loop.job import Job, JobPhase
from worker.loop.observer import Observer
from worker.loop.replay.unfed_rows import UnfedRows
from worker.loop.text_stages import TextStages
from worker.loop.voice_manager import VoiceManager

LOG = logging.getLogger(__name__)
UNFED = (JobPhase.START, JobPhase.PREFILL)


class EarlyUnits:
    """The trials of one loop, one at a time."""

    def __init__(
        self,
        unit_steps: UnitSteps,
        voices: VoiceManager,
        observer: Observer,
        clock: Callable[[], float],
        headroom: Headroom,
    ):
        self._headroom, self._clock = headroom, clock
        self._kept = KeptSlots(unit_steps)
        self._runner = _TrialRunner(unit_steps, voices, observer, clock)
        self._text = TextStages(self._runner, UnfedRows(self._runner))

    def run(self, job: EarlyJob, in_flight: Sequence[Job], n_sessions: int) -> bool:
        """Run a unit's prefill and first token.

        Args:
            in_flight: the loop's jobs.
            n_sessions: open sessions.
        Returns: whether the unit speaks and is to be finished by the loop; otherwise the session is as before.
        """
        if job.trial.is_void or not job.may_run or not self._has_time(in_flight, n_sessions):
            return False
        session, start, shift = job.session, self._clock(), job.n_missing
        inputs = SessionInputs(session)
        self._kept.keep(job.slot)
        session.move("prefill")
        error = self._try(job)
        spent_ms = 1000 * (self._clock() - start)
        self._headroom.count_trial(spent_ms, self._clock())
        if error is None and not job.trial.is_void:
            self._kept.forget(job.slot)
            job.commit()
            job.trial.end(EarlyOutcome(EarlyEnd.COMMITTED, 1000 * shift / SAMPLE_RATE, spent_ms))
            return True
        is_intact = error is None or isinstance(error, TakenBackError)
        if not is_intact:
            LOG.warning("session %s: a unit that ran early is taken back: %s", session.id, error)
            self._runner.wipe(job)
        self._kept.put_back(job.slot)
        session.move("fail")
        inputs.put_back()
        if (early := inputs.early_rows) is not None and not (is_intact and early.is_in_context):
            remove_early_rows(self._runner.unit_steps, session)
        job.trial.end(EarlyOutcome(EarlyEnd.TAKEN_BACK, 0.0, spent_ms))
        self._runner.observer.unit_taken_back(session.id)
        return False

    def _has_time(self, in_flight: Sequence[Job], n_sessions: int) -> bool:
        now = self._clock()
        oldest = min((job.arrived for job in in_flight if not job.is_background), default=now)
        return self._headroom.allows(now, 1000 * (now - oldest), n_sessions)

    def _try(self, job: EarlyJob) -> Exception | None:
        """Run the job up to its first token. Returns: why it has not come so far."""
        runner = self._runner
        runner.add(job)
        while job in runner.jobs and job.phase in UNFED:
            self._text.prefill([job])
        return runner.release(job)


class _TrialRunner(BatchRunner):
    """A `BatchRunner` of one trial. A failure ends the trial without an event."""

    def __init__(self, unit_steps: UnitSteps, voices: VoiceManager, observer: Observer, clock: Callable[[], float]):
        super().__init__(unit_steps, voices, observer, clock)
        self._error: Exception | None = None

    def fail(self, job: Job, error: Exception) -> None:
        """End the trial."""
        self._error = error
        self.remove(job)

    def release(self, job: Job) -> Exception | None:
        """Forget the trial, which may go on elsewhere. Returns: the error that has ended it."""
        error, self._error = self._error, None
        if error is None:
            self.remove(job)
        return error

    def wipe(self, job: Job) -> None:
        """Remove the rows of a trial that failed: they may be NaN."""
        assert job.start is not None, "wipe: expected a job that was added"
        self.unit_steps.rewind(job.slot, job.start)
