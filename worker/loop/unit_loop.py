"""The loop on the engine thread: each iteration runs every stage for all jobs that need it, `sound` twice at most.

    draw       conditioning rows, then speech tokens: a few at a time while other jobs have text    per slice
    prefill    images, sound, one forward of all known rows, the first token                       per new unit
    background the same for replies, in bounded parts between the stages of units                  per part
    decode     feed a token, sample the next                                                       per token
    search     a token of every hypothesis of beam searches; rarely while units are in flight      per token
    yielding   prefill and decode of jobs with low priority; rarely while others are in flight     per part
    sound      speech tokens to samples; also after a prefill, for units whose text is complete    per window
    finish     emit the result, close the unit, apply the window's evictions
    pictures   images of later units; only while no unit is in flight                              per picture

While turns wait for their first sound, jobs whose clients have enough sound left wait, and with many jobs in flight
prefills and windows wait for others of their kind (`worker.loop.order`).

A new job joins between two decode steps, and one session speaks while another one still decodes. Speech tokens and
sound are launched, and collected once they have arrived: on a GPU both run beside the other stages. Contains the order
of the stages. Does not contain decisions and turns (jobs), sockets, threads or time limits.
"""

import time
from collections.abc import Callable

from models.stages.unit_steps import UnitSteps
from models.token2wav.stream.vocoder import Vocoder
from worker.loop.batch_runner import BatchRunner
from worker.loop.early.early_job import EarlyJob
from worker.loop.early.early_pictures import EarlyPictures
from worker.loop.early.early_units import EarlyUnits
from worker.loop.early.headroom import Headroom
from worker.loop.finish_stage import FinishStage
from worker.loop.job import Job, JobPhase
from worker.loop.observer import Observer
from worker.loop.order.first_sound import FirstSoundOrder
from worker.loop.order.gathering import Gathering, whole_batch
from worker.loop.replay.unfed_rows import UnfedRows
from worker.loop.session import Session
from worker.loop.sound_stage import SoundStage
from worker.loop.speech_stages import SpeechStages
from worker.loop.text_stages import BackgroundPrefill, SearchStage, TextStages, YieldingStage
from worker.loop.voice_manager import VoiceManager

PREFILL_SPACING_S = 0.08  # between prefills of few units while many jobs are in flight
REST_S = 2e-5  # sleep while jobs wait for speech tokens, sound or others, or pictures for an expected unit
RESTS = 2  # sleeps in a row, since looking for other work takes longer than one of them


class UnitLoop:
    """All jobs in flight over one set of slots. pictures: images of later units. unfed: rows of rebuilt units."""

    def __init__(
        self,
        unit_steps: UnitSteps,
        vocoder: Vocoder | None,
        voices: VoiceManager,
        *,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        first_sound_first: bool = True,
        first_sound_alone: bool = False,
    ):
        """
        Args:
            vocoder: None for text only.
            first_sound_first: work of turns that have no sound yet goes before that of others.
            first_sound_alone: with few jobs, speech tokens of a unit do not run beside the vocoder's first sound of it,
                which comes sooner then, and the unit ends later.
        """
        self.observer = observer or Observer()
        self._speaker = unit_steps.speaker
        self._batch = BatchRunner(unit_steps, voices, self.observer, clock)
        headroom = self._headroom = Headroom()
        self._early = EarlyUnits(unit_steps, voices, self.observer, clock, headroom)
        self.pictures = EarlyPictures(unit_steps.early_images, clock)
        self.unfed = UnfedRows(self._batch)
        self._text, self._finish = TextStages(self._batch, self.unfed), FinishStage(self._batch, headroom, self.unfed)
        self._background = BackgroundPrefill(self._batch, self._text)
        self._search = SearchStage(self._batch)
        self._yielding = YieldingStage(self._batch, self._text)
        is_alone = first_sound_alone and vocoder is not None
        self._speech = None
        if self._speaker is not None:
            self._speech = SpeechStages(self._batch, self._speaker, first_sound_alone=is_alone)
        self._order, self._prefills = (
            FirstSoundOrder(clock, is_on=first_sound_first),
            Gathering(clock, PREFILL_SPACING_S),
        )
        self._sound = None if vocoder is None else SoundStage(self._batch, vocoder, self._order)
        self._held: set[Job] = set()  # units that wait for a prefill together, in the latest iteration

    @property
    def jobs(self) -> list[Job]:
        """The jobs in flight."""
        return self._batch.jobs

    @property
    def is_idle(self) -> bool:
        """Whether `run` has nothing to do."""
        return not self.jobs and not self.pictures.has_work

    def add(self, job: Job) -> None:
        """Take a job of a session that has none. Raises: OrderError."""
        job.session.move("prefill")
        self._batch.add(job)

    def expect_early_units(self) -> None:
        """Measure units from now on, so that `run_early` knows what time is left."""
        self._headroom.turn_on()

    def expect_unit_times(self, seconds: Callable[[int], float]) -> None:
        """Times of units that the warm-up has measured; see `Headroom.expect`."""
        self._headroom.expect(seconds)

    def run_early(self, job: EarlyJob, n_sessions: int) -> bool:
        """Run a unit of a session that has no job up to its decision, now. n_sessions: open sessions.

        Returns: whether it speaks and is in flight; otherwise its session is as before.
        """
        is_kept = self._early.run(job, self.jobs, n_sessions)
        if is_kept:
            self._batch.take_over(job)
        return is_kept

    def order_first_sound(self, on: bool) -> None:
        """Whether work of turns without sound goes first from now on."""
        self._order.turn(on)

    def forget_first_sounds(self) -> None:
        """Forget how long first sounds took, as at the start."""
        self._order.forget()

    @property
    def has_unfed_units(self) -> bool:
        """Whether units are to be prefilled now, which comes before any early unit."""
        active = [job for job in self.jobs if job not in self._held]
        unfed = [job for job in active if job.phase in (JobPhase.START, JobPhase.PREFILL) and not job.is_background]
        return bool(unfed) and not self._order.waiting(active).issuperset(unfed)

    def run(self) -> bool:
        """One iteration: schedule each stage's jobs, run the stage for them, finish the jobs that are complete.

        Does not wait for speech tokens or sound in flight; a later iteration collects them.
        Returns: whether any job is left.
        """
        # Counting all jobs is cheap: if they are too few for a loaded engine, the units among them are too.
        self._held = self._units_to_hold() if Gathering.is_loaded(len(self.jobs)) else set()
        waiting = self._order.waiting([job for job in self.jobs if job not in self._held]) | self._held
        if self._speech is not None:
            is_alone = not any(job.has_text_left for job in self._prior(waiting))
            self._speech.draw([job for job in self.jobs if job.calls and job not in waiting], is_alone=is_alone)
        unfed = [job for job in self._prior(waiting) if job.phase in (JobPhase.START, JobPhase.PREFILL)]
        self._text.prefill([job for job in unfed if not job.is_background])
        self._background.run([job for job in unfed if job.is_background], self._is_contended)
        if 0 < len(unfed) < len(self.jobs) and self._can_hand_over_early():
            self._hand_over(waiting)
        self._text.decode([job for job in self._prior(waiting) if job.phase is JobPhase.DECODE])
        self._search.run([job for job in self.jobs if job.phase is JobPhase.SEARCH], self._is_contended)
        self._yielding.run(self.jobs, self._has_prior_work)
        self._hand_over(waiting)
        self._finish.run(complete := [job for job in self.jobs if job.is_complete])
        self.pictures.count_units(complete)
        self.pictures.run(self.jobs)
        self._rest([job for job in self.jobs if job not in waiting])
        return bool(self.jobs)

    def _can_hand_over_early(self) -> bool:
        """Whether speech or sound is in flight, and of no reply whose text goes on: its sound follows its next text."""
        speaking = [job for job in self.jobs if job.calls or job.windows]
        return bool(speaking) and not any(job.has_text_left for job in speaking)

    def _hand_over(self, waiting: set[Job]) -> None:
        """Hand on speech tokens and sound that have arrived, and launch windows that are ready."""
        if self._speech is not None:
            self._speech.poll()
        if self._sound is not None:
            self._sound.run([job for job in self.jobs if job.windows and job not in waiting])

    def _units_to_hold(self) -> set[Job]:
        """With many jobs in flight, new units that wait for a prefill together, or for the next one if one is full."""
        units = [job for job in self.jobs if job.phase is JobPhase.START and job.gathers and not job.is_background]
        n_in_flight = self._batch.n_gathering
        if not units or not Gathering.is_loaded(n_in_flight):
            return set()
        is_due = self._prefills.is_due(len(units), n_in_flight)
        now = whole_batch(units, self._batch.unit_steps.shapes) if is_due else []
        return set(units).difference(now)

    def _prior(self, waiting: set[Job]) -> list[Job]:
        """The jobs that yield to no others in this iteration."""
        return [job for job in self.jobs if not job.is_low_priority and job not in waiting]

    def drop(self, session: Session) -> None:
        """Remove a session's job, if it has one, without an event: the session closes."""
        self._batch.discard(session)
        self.pictures.forget(session)
        if self._speaker is not None:
            self._speaker.drop_call(session.slot)

    def interrupt(self, session: Session) -> bool:
        """Stop the speech of the session's job now. Returns: whether a job did so."""
        return any(job.interrupt() for job in self.jobs if job.session is session)

    def take_back(self, session: Session) -> bool:
        """Remove a session's job and rewind its slot; emitted events stand. Returns: whether it had one."""
        jobs = [job for job in self.jobs if job.session is session]
        for job in jobs:
            self._batch.rewind(job)
        return bool(jobs)

    def _is_contended(self) -> bool:
        """Whether jobs with a deadline have text or speech to work on now."""
        live = [job for job in self.jobs if not job.is_background and job not in self._held]
        return any(job.has_text_left for job in live) or (self._speech is not None and self._speech.can_draw(live))

    def _has_prior_work(self) -> bool:
        """Whether jobs other than those with low priority have text or speech to work on now."""
        prior = [job for job in self.jobs if not job.is_low_priority and job not in self._held]
        is_busy = any(job.phase is not JobPhase.SPEECH for job in prior)
        return is_busy or (self._speech is not None and self._speech.can_draw(prior))

    def _rest(self, jobs: list[Job]) -> None:
        """Sleep for a moment if `jobs` can only wait for speech tokens, sound or others, or pictures have to wait."""
        if any(job.has_text_left and not job.is_low_priority for job in jobs):
            return
        if not self.jobs and self.pictures.is_waiting:
            time.sleep(RESTS * REST_S)
            return
        poll = None if self._speech is None else self._speech.oldest_poll
        sound = None if self._sound is None else self._sound.oldest_batch
        does_gather = bool(self._held) or any(job.windows for job in jobs)
        if poll is None and sound is None and not does_gather:
            return
        if self._speech is not None and self._speech.can_draw(jobs):
            return
        for _ in range(RESTS):
            if any(pending is not None and pending.is_here for pending in (poll, sound)):
                return
            time.sleep(REST_S)
