"""The loop on the engine thread: takes every job there is and runs each stage once for all that want it.

    speech    conditioning rows, then codes: a few at a time where others wait       per slice
    prefill   pictures, sound, one forward of all known rows, the first token       per newcomer
    decode    feed a token, choose the next                                          per token
    sound     codes to samples                                                       per window of codes
    result    out to the session, then the unit is closed and its window moves

`run` does each stage once, so a newcomer joins between two decode steps, and one session speaks while another one
still writes. Codes and sound are asked for, and taken up when they have arrived: on a GPU both are made beside the
rest. Knows the order of stages, and how a unit is closed. Does not know decisions and turns (jobs), sockets, threads or
time limits.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from models.stages.runner import Rows
from models.stages.unit_steps import UnitSteps
from worker.loop.batch_runner import BatchRunner
from worker.loop.job import Job
from worker.loop.observer import Observer
from worker.loop.results import Failure
from worker.loop.session import Session
from worker.loop.speech_stages import SpeechStages
from worker.loop.text_stages import TextStages
from worker.loop.voice_manager import VoiceManager
from worker.loop.window import Drop


class UnitLoop:
    """All jobs in flight over one set of slots."""

    def __init__(
        self,
        duplex: UnitSteps,
        vocoder: Any,
        voices: VoiceManager,
        *,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """vocoder: `models.token2wav.stream.vocoder.Vocoder` or what behaves like one; None for text only."""
        self.observer = observer or Observer()
        self._duplex = duplex
        self._batch = BatchRunner(duplex, voices, self.observer, clock)
        self._text, self._speech = TextStages(self._batch), SpeechStages(self._batch, vocoder)

    @property
    def jobs(self) -> list[Job]:
        """Those in flight."""
        return self._batch.jobs

    @property
    def is_idle(self) -> bool:
        return not self.jobs

    def add(self, job: Job) -> None:
        """Take a job of a session that has none. Raises: OrderError."""
        job.session.move("prefill")
        job.times.wait = 1000 * (self._batch.clock() - job.arrived)
        job.at = self._duplex.counters(job.slot)
        self.jobs.append(job)

    def run(self) -> bool:
        """Each stage once. Returns: whether anything is left to do.

        Where that is only codes or sound on their way, they are not waited for: another call may be the one that takes
        them up.
        """
        self._speech.speak([job for job in self.jobs if job.calls])
        self._text.prefill([job for job in self.jobs if not job.is_prefilled])
        self._text.decode([job for job in self.jobs if job.is_prefilled and job.step is not None])
        self._speech.poll()
        self._speech.voice([job for job in self.jobs if job.windows])
        self._finish([job for job in self.jobs if job.is_prefilled and not (job.step or job.calls or job.windows)])
        if all(job.is_prefilled and job.step is None for job in self.jobs):
            self._speech.rest()
        return bool(self.jobs)

    def drop(self, session: Session) -> None:
        """Forget a session's job, if it has one: the session is going away."""
        self._batch.jobs = [job for job in self.jobs if job.session is not session]
        if self._duplex.speaker is not None:
            self._duplex.speaker.drop_call(session.slot)

    def break_off(self, session: Session) -> bool:
        """Ask a session's job to be quiet. Returns: whether one has seen to it."""
        return any(job.break_off() for job in self.jobs if job.session is session)

    def take_back(self, session: Session) -> bool:
        """Forget a session's job as if it had never begun; what has left has left. Returns: whether it had one."""
        jobs = [job for job in self.jobs if job.session is session]
        for job in jobs:
            self.jobs.remove(job)
            self._duplex.rewind(job.slot, job.at)
            session.move("fail")
        return bool(jobs)

    # --- outcome -------------------------------------------------------------------------------

    def _finish(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.times.total = 1000 * (self._batch.clock() - job.arrived)
            # Without a result there is nothing to close, and no telling what the session believes.
            self._batch.guarded(job, self._tell, fail=self._batch.lose)
        jobs = [job for job in jobs if job in self.jobs]
        with self._batch.timed(jobs, "finalize"):
            evictions: dict[Job, deque[Any]] = {}
            for job in jobs:
                self._batch.guarded(job, lambda job: evictions.update({job: deque(job.close())}))
            # A unit that is too long to stay must be whole before it can leave.
            closing = [
                job
                for job in jobs
                if job in self.jobs
                and job.session.pending
                and (job.session.reference or (evictions[job] and not job.session.window.units))
            ]
            self._batch.run_with_retry(closing, self._feed_pending, self._batch.way_back(closing))
            while moving := [job for job in jobs if job in self.jobs and evictions[job]]:
                self._evict({job: evictions[job].popleft() for job in moving})
        for job in [job for job in jobs if job in self.jobs]:
            self._batch.guarded(job, self._check_rows)
        for job in [job for job in jobs if job in self.jobs]:
            job.session.move("finalize")
            self.jobs.remove(job)
            self.observer.closed(job.session.id)

    def _check_rows(self, job: Job) -> None:
        """The window's account and the cache agree, whatever has been fed and dropped."""
        expected, held = job.rows_expected(), self._duplex.runner.context_len(job.slot)
        assert expected in (None, held), f"session {job.session.id}: the window counts {expected} rows, {held} are held"

    def _tell(self, job: Job) -> None:
        event = job.fail(job.error) if job.error is not None else job.result()
        if not isinstance(event, Failure):
            event = replace(event, context_len=self._duplex.runner.context_len(job.slot))
        job.session.move("generate")
        job.session.tell(event)
        self.observer.done(job.session.id, event)

    def _feed_pending(self, jobs: list[Job]) -> list[None]:
        """In reference a unit is closed at once; otherwise its last rows go in front of the next unit's."""
        slots = [job.slot for job in jobs]
        for job in jobs:
            past = self._duplex.runner.context_len(job.slot)
            self.observer.fed(job.session.id, "finalize", past, job.session.pending)
        self._duplex.feed(slots, [Rows.mixed(job.session.pending, []) for job in jobs], [False] * len(jobs))
        for job in jobs:
            job.session.pending = []
        return [None] * len(jobs)

    def _evict(self, moves: dict[Job, Any]) -> None:
        """One by one: what has moved cannot be undone, so nobody may have to be moved again for another one's fault."""

        def move_rows(job: Job) -> None:
            context, window, move = self._duplex.context, job.session.window, moves[job]
            if isinstance(move, Drop) and context.n_held(job.slot) in (None, move.keep):
                context.drop([job.slot], [move.keep], [move.n])
            elif isinstance(move, Drop):
                # What stands between the held rows and the gap is fed again: it has no keys to be turned from.
                ids = (*window.previous_ids, *window.suffix)
                context.rebuild(job.slot, window.prefix, move.keep + move.n, ids)
            else:
                context.rebuild(job.slot, *move)

        for job in moves:
            self._batch.guarded(job, move_rows)
