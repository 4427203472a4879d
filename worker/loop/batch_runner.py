"""Runs a stage for a batch of jobs so that a job that fails does not affect the others.

A stage that fails for a batch is undone for every job of it and run again for each job alone. This module contains
what is undone and which event reports the failure. It does not contain the stages.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

from models.errors import AudioError, ContextOverflowError, ImageError, ModelError
from models.stages.step_types import Counters
from models.stages.unit_steps import UnitSteps
from worker.loop.job import Job
from worker.loop.observer import Observer
from worker.loop.results import StageName, UnitLoad
from worker.loop.session import Session, SessionPhase
from worker.loop.voice_manager import VoiceManager

LOG = logging.getLogger(__name__)
CLIENT_ERRORS = (AudioError, ContextOverflowError, ImageError)  # a client has caused them, and gets them

Result = TypeVar("Result", covariant=True)
Params = ParamSpec("Params")


class DeviceLostError(ModelError, RuntimeError):
    """The device fails every call, as a GPU does after an illegal access until its process ends."""


def check_device(error: Exception, device: torch.device) -> None:
    """Check after an error whether the device still works. Raises: DeviceLostError if it does not."""
    if isinstance(error, DeviceLostError):
        raise error
    if not isinstance(error, torch.AcceleratorError):
        return
    try:
        torch.get_device_module(device).synchronize()
    except torch.AcceleratorError as lost:
        raise DeviceLostError(f"device {device}", expected="a working one", got=str(lost).split("\n")[0]) from error


class BatchStage(Protocol[Result]):
    """One call for a batch of jobs, how it is undone and what a failure means."""

    def run(self, jobs: list[Job]) -> Sequence[Result]:
        """Run the batch. Returns: one result per job."""
        ...

    def undo(self, job: Job) -> None:
        """Undo what a failed `run` may have done for the job."""
        ...

    def fail(self, job: Job, error: Exception) -> None:
        """Handle a job for which `run` failed alone."""
        ...


class _JobStart(NamedTuple):
    at: float  # clock reading
    job_s: float  # `Overlap._job_s` then


class Overlap:
    """How long each job takes, and how many jobs share the engine meanwhile."""

    def __init__(self) -> None:
        self._starts: WeakKeyDictionary[Job, _JobStart] = WeakKeyDictionary()
        self._free_since: WeakKeyDictionary[Session, float] = WeakKeyDictionary()
        self._now, self._n_jobs = 0.0, 0
        self._job_s = 0.0  # integral of the number of jobs over time

    def set_jobs(self, n: int, now: float) -> None:
        """Set how many jobs are in flight from now on."""
        self._job_s += self._n_jobs * (now - self._now)
        self._now, self._n_jobs = now, n

    def begin(self, job: Job, now: float) -> None:
        """Count a job that starts, after `set_jobs`."""
        # A unit that waited for its own session's former unit did not wait for the engine.
        start = max(job.arrived, self._free_since.get(job.session, job.arrived))
        before = max(self._n_jobs - 1, 1) * (now - start)
        self._starts[job] = _JobStart(start, self._job_s - before)

    def end(self, job: Job, now: float) -> UnitLoad | None:
        """The load of a job that has its result; None for one that was not counted."""
        start = self._starts.get(job)
        if start is None:
            return None
        self.set_jobs(self._n_jobs, now)
        seconds = max(now - start.at, 1e-6)
        return UnitLoad(seconds, max((self._job_s - start.job_s) / seconds, 1.0))

    def free(self, session: Session, now: float) -> None:
        """Record that a session's job is closed."""
        self._free_since[session] = now


class BatchRunner:
    """The jobs in flight. Every call that may raise because of one of them goes through here.

    A lost device does not count as the failure of a job: DeviceLostError ends the engine's thread.
    """

    def __init__(self, unit_steps: UnitSteps, voices: VoiceManager, observer: Observer, clock: Callable[[], float]):
        self.unit_steps, self.voices, self.observer, self.clock = unit_steps, voices, observer, clock
        self.jobs: list[Job] = []
        self.overlap = Overlap()
        self._device = unit_steps.device

    # --- jobs ----------------------------------------------------------------------------------

    @property
    def n_gathering(self) -> int:
        """Jobs in flight whose calls others may wait for: units, but no replies, inserted texts or replays."""
        return sum(job.gathers and not job.is_background for job in self.jobs)

    def add(self, job: Job) -> None:
        now = self.clock()
        job.admit(self.unit_steps.counters(job.slot), now)
        self.jobs.append(job)
        self.overlap.set_jobs(len(self.jobs), now)
        self.overlap.begin(job, now)

    def take_over(self, job: Job) -> None:
        """Go on with a job that was admitted elsewhere."""
        self.jobs.append(job)

    def remove(self, job: Job) -> None:
        self.jobs.remove(job)

    def discard(self, session: Session) -> None:
        """Remove the session's job, if it has one."""
        self.jobs = [job for job in self.jobs if job.session is not session]

    def rewind(self, job: Job) -> None:
        """Remove a job and put its slot back to where it stood before it."""
        self.jobs.remove(job)
        assert job.start is not None, "rewind: expected a job that was added"
        self.unit_steps.rewind(job.slot, job.start)
        job.session.move("fail")

    # --- running -------------------------------------------------------------------------------

    def run_with_retry(self, jobs: list[Job], stage: BatchStage[Result]) -> list[tuple[Job, Result]]:
        """Run a batch; if it fails, undo it and run each job alone. Returns: the jobs that succeeded and their
        results.

        Raises: DeviceLostError.
        """
        if not jobs:
            return []
        try:
            return list(zip(jobs, stage.run(jobs), strict=True))
        except Exception as error:
            check_device(error, self._device)
            if len(jobs) > 1:
                LOG.warning("a batch of %d failed and is run again one by one: %s", len(jobs), error)
            for job in jobs:
                stage.undo(job)
            if len(jobs) == 1:
                stage.fail(jobs[0], error)
                return []
        return [pair for job in jobs for pair in self.run_with_retry([job], stage)]

    def guard(
        self, job: Job, call: Callable[Concatenate[Job, Params], object], *args: Params.args, **kwargs: Params.kwargs
    ) -> None:
        """Run what concerns one job only; if it raises, the job fails."""
        try:
            call(job, *args, **kwargs)
        except Exception as error:
            check_device(error, self._device)
            self.fail(job, error)

    def guard_speech(
        self, job: Job, call: Callable[Concatenate[Job, Params], object], *args: Params.args, **kwargs: Params.kwargs
    ) -> None:
        """The same for the job's speech; if it raises, only the speech ends."""
        try:
            call(job, *args, **kwargs)
        except Exception as error:
            check_device(error, self._device)
            self.disable_speech(job, error)

    # --- failure -------------------------------------------------------------------------------

    def disable_speech(self, job: Job, error: Exception) -> None:
        """Continue without speech: the text is kept."""
        job.disable_speech(error)
        self.voices.cut(job.session)

    def fail(self, job: Job, error: Exception) -> None:
        """End a job without an effect on others: its text is undone, or stands if only its speech failed."""
        session = job.session
        if job.error is None and job.is_text_done and session.phase is SessionPhase.PREFILLED:
            self.disable_speech(job, error)
            return
        if session.phase is SessionPhase.GENERATED:
            self.lose_context(job, error)  # half-closed: the context no longer matches the host's state
            return
        self.rewind(job)
        self._report(job, error)

    def lose_context(self, job: Job, error: Exception) -> None:
        """End a job and empty its slot: the session has to be prepared again."""
        self.jobs.remove(job)
        self.unit_steps.empty(job.slot)
        job.session.move("reset")
        self._report(job, error)
        job.session.drop_waiting("its context is lost")

    def _report(self, job: Job, error: Exception) -> None:
        event = job.fail(error)
        if isinstance(error, CLIENT_ERRORS):
            LOG.info("session %s: its input is refused: %s", job.session.id, type(error).__name__)
        else:
            LOG.warning("session %s: %s", job.session.id, error, exc_info=error)
        job.session.send(event)
        self.observer.result_sent(job.session.id, event)

    # --- times ---------------------------------------------------------------------------------

    @contextmanager
    def timed(self, jobs: Sequence[Job], stage: StageName) -> Iterator[None]:
        """Add the time inside to this stage, in full for each of the jobs."""
        start = self.clock()
        yield
        self.count(jobs, stage, start)

    def count(self, jobs: Sequence[Job], stage: StageName, start: float) -> None:
        """Add the time since `start` to this stage, in full for each of the jobs."""
        spent = 1000 * (self.clock() - start)
        for job in jobs:
            job.times.add(stage, spent)


class RewindingStage:
    """Base of stages that change the slots' state: `undo` rewinds a slot to where it stood at construction.

    A speech call that runs is not kept: it begins again.
    """

    def __init__(self, batch: BatchRunner, jobs: Sequence[Job]):
        self._batch = batch
        self._before = {job.slot: self._counters(job) for job in jobs}

    def _counters(self, job: Job) -> Counters:
        counters = self._batch.unit_steps.counters(job.slot)
        if job.calls and (start := job.calls[0].start) is not None:
            counters = counters._replace(recent_tokens=start.recent_tokens)
        return counters

    def undo(self, job: Job) -> None:
        self._batch.unit_steps.rewind(job.slot, self._before[job.slot])

    def fail(self, job: Job, error: Exception) -> None:
        self._batch.fail(job, error)
