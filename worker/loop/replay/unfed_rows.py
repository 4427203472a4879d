"""Rows of units that rebuild a context, which are fed together.

A prefill of one unit costs nearly as much as that of several, so a unit's rows wait for those of the next ones, up to
a bucket of four times the size. They wait only while the session's next unit is decided too; an eviction feeds them
first.

A unit whose speech goes on waits for none. Its tokens are fed one by one: its speech needs their hidden states.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from models.errors import NumericsError
from models.stages.runner import Rows
from worker.loop.batch_runner import BatchRunner, RewindingStage, check_device
from worker.loop.job import Job
from worker.loop.replay.replay_job import ReplayJob
from worker.loop.replay.speech_rebuild import rebuild_speech
from worker.loop.session import Session, SessionPhase, UnitInput

LOG = logging.getLogger(__name__)


class UnfedRows:
    """The rows that wait, of all sessions of a loop."""

    def __init__(self, batch: BatchRunner):
        self._batch, self._unit_steps = batch, batch.unit_steps
        self._spans: WeakKeyDictionary[Session, list[Rows]] = WeakKeyDictionary()

    def n_rows(self, session: Session) -> int:
        """Rows of a session that wait."""
        return sum(map(len, self._spans.get(session, ())))

    def joined(self, session: Session) -> Rows:
        """The rows of a session that wait, one or more."""
        return Rows.joined(self._spans[session])

    def forget(self, session: Session) -> None:
        """The rows are fed, or the session is prepared again."""
        self._spans.pop(session, None)

    def take(self, encoded: Sequence[tuple[Job, Rows]]) -> None:
        """Give jobs their rows; those of decided units wait instead, and the units have all that they need."""
        due = []
        for job, rows in encoded:
            job.session.take_early_rows()  # they are part of the unit now
            if not isinstance(job, ReplayJob):
                job.set_rows(rows)
                continue
            self._spans.setdefault(job.session, []).append(rows)
            if job.speaks_on or self._is_due(job.session, len(rows)):
                due.append(job)
            self._batch.guard(job, Job.finish_text)
        self.feed(due)

    def _is_due(self, session: Session, n_newest: int) -> bool:
        """Whether another unit of `n_newest` rows may not wait with the others."""
        is_full = self.n_rows(session) + n_newest > self._unit_steps.joint_prefill_bucket(n_newest)
        return is_full or session.reference or not _is_decided_next(session)

    def _rebuild_speech(self, job: Job) -> None:
        if isinstance(job, ReplayJob) and job.speaks_on and job.is_text_done:
            rebuild_speech(self._unit_steps, self._batch.voices, job)

    def feed(self, jobs: Sequence[Job]) -> None:
        """Feed the rows of the jobs' sessions. A job whose rows cannot be fed loses its context."""
        by_size: dict[int, list[Job]] = defaultdict(list)
        for job in jobs:
            if (n_rows := self.n_rows(job.session)) and job in self._batch.jobs:
                by_size[self._unit_steps.prefill_bucket(min(n_rows, self._unit_steps.max_prefill_rows))].append(job)
        for size in sorted(by_size):
            alike = by_size[size]
            with self._batch.timed(alike, "prefill"):
                fed = self._batch.run_with_retry(alike, _FeedUnfed(self._batch, alike, self))
            for job, is_bad in fed:
                self.forget(job.session)
                if is_bad:
                    self._batch.lose_context(job, _unusable(job.session))
                else:
                    self._batch.guard_speech(job, self._rebuild_speech)

    def feed_due(self, session: Session) -> None:
        """As `feed_idle`, unless the next unit is decided too."""
        if session in self._spans and not _is_decided_next(session):
            self.feed_idle(session)

    def feed_idle(self, session: Session) -> None:
        """Feed the rows of a session if no unit of it runs. If that fails, it must be prepared again.

        Raises: DeviceLostError.
        """
        if session not in self._spans or session.phase is not SessionPhase.READY:
            return
        try:
            (chosen,) = self._unit_steps.feed([session.slot], [self.joined(session)], [False])
            if chosen.bad:
                raise _unusable(session)
        except Exception as error:
            check_device(error, self._unit_steps.device)
            LOG.warning("session %s: its context is not rebuilt: %s", session.id, error, exc_info=error)
            self._unit_steps.empty(session.slot)
            session.move("reset")
            session.drop_waiting("its context is lost")
        self.forget(session)


class _FeedUnfed(RewindingStage):
    """Feeds the rows that wait. Result: whether they led to numbers that are not usable."""

    def __init__(self, batch: BatchRunner, jobs: Sequence[Job], unfed: UnfedRows):
        super().__init__(batch, jobs)
        self._unfed = unfed

    def run(self, jobs: list[Job]) -> list[bool]:
        slots, spans = [job.slot for job in jobs], [self._unfed.joined(job.session) for job in jobs]
        alone = [job.fed if isinstance(job, ReplayJob) and job.speaks_on else [] for job in jobs]
        spans = [span.cut(0, len(span) - len(tokens)) for span, tokens in zip(spans, alone, strict=True)]
        bad = [one.bad for one in self._batch.unit_steps.feed(slots, spans, [False] * len(jobs))]
        for number in range(max(map(len, alone))):
            now = [place for place, tokens in enumerate(alone) if len(tokens) > number]
            ids, places = zip(*(alone[place][number] for place in now), strict=True)
            chosen = self._batch.unit_steps.step([slots[place] for place in now], ids, places, [False] * len(now))
            for place, one in zip(now, chosen, strict=True):
                bad[place] = bad[place] or one.bad
        return bad

    def fail(self, job: Job, error: Exception) -> None:
        self._unfed.forget(job.session)
        self._batch.lose_context(job, error)


def _is_decided_next(session: Session) -> bool:
    return bool(session.waiting) and isinstance(one := session.waiting[0], UnitInput) and one.decided is not None


def _unusable(session: Session) -> NumericsError:
    return NumericsError(f"context of session {session.id}", expected="finite numbers", got="NaN or infinity")
