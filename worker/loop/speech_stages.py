"""The stages behind a unit's text: speech codes from what it says, and sound from codes.

Both are set out on and seen to later, so that on a GPU codes are drawn beside other sessions' text, and sound is made
beside both. Knows how jobs share batches there, and when codes are looked at. Does not know text, nor where a turn ends
(jobs).
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from models.errors import NumericsError
from models.stages.speech_steps import Poll, Readback
from models.token2wav.stream.vocoder import Chunk
from worker.loop.batch_runner import BatchRunner, nothing
from worker.loop.job import Job, SpeechCall

SLICE_SPEECH_TOKENS = 5  # codes drawn between two decode steps of others
MAX_POLLS = 2  # of one call, on their way: codes needed in any case are asked for before the last ones are seen
MAX_FLIGHTS = 2  # batches of windows at the vocoder: one that it is at, and one so that it need not wait for the host
POLL_S = 1e-4


@dataclass(eq=False)
class _Slice:
    """Codes that somebody has to look at. calls: whose; look: what they have drawn. start: when it set out."""

    calls: list[tuple[Job, SpeechCall]]
    poll: Readback
    start: float


@dataclass(eq=False)
class _InFlightBatch:
    """Windows of several jobs at the vocoder. launch: what it gave for them, None once taken. start: as in a slice."""

    windows: list[tuple[Job, Any]]
    launch: Any
    start: float


class SpeechStages:
    """speak: set out on codes for each job with a call. look: take up those that have arrived. voice: set out on
    windows that are complete, and hand out the sound of those that are through.

    vocoder: `models.token2wav.stream.vocoder.Vocoder` or what behaves like one; None for text only.
    """

    def __init__(self, batch: BatchRunner, vocoder: Any):
        self._batch, self._vocoder = batch, vocoder
        self._duplex, self._speaker = batch.duplex, batch.duplex.speaker
        self._slices: list[_Slice] = []
        self._flights: list[_InFlightBatch] = []
        self._most_looks = MAX_POLLS if self._speaker is not None and self._speaker.is_beside else 1

    # --- codes ---------------------------------------------------------------------------------

    def speak(self, jobs: list[Job]) -> None:
        with self._batch.timed(jobs, "condition"):
            while lacking := [(job, call) for job in jobs if (call := _first_without_rows(job)) is not None]:
                self._make_rows([job for job, _ in lacking])
                jobs = [job for job in jobs if job.calls]
        start = self._batch.clock()
        fresh = [job for job in jobs if not job.calls[0].is_begun]
        for job in fresh:
            self._batch.guarded(job, self._make_room, fail=self._batch.disable_speech)
        fresh = [job for job in fresh if job.calls]
        self._batch.run_with_retry(fresh, self._begin_calls, self._batch.undo_call, fail=self._batch.disable_speech)
        is_alone = all(job.is_prefilled and job.step is None for job in self._batch.jobs)
        while jobs := [job for job in jobs if self._may_draw(job)]:
            # To the next look if nothing else waits for its turn, and on from there before it is seen.
            n_steps = min(_to_look(job.calls[0]) for job in jobs) if is_alone else SLICE_SPEECH_TOKENS
            draw = partial(self._draw, n_steps=n_steps, start=start)
            drawn = self._batch.run_with_retry(jobs, draw, self._batch.undo_call, fail=self._batch.disable_speech)
            self._batch.count([job for job, is_due in drawn if not is_due], "speech", start)
            if not is_alone:
                break
            start = self._batch.clock()

    def _may_draw(self, job: Job) -> bool:
        """Whether more codes of its running call may be asked for, before those on their way have been seen."""
        call = job.calls[0] if job.calls else None
        if call is None or not (call.n_drawn < call.most or self._is_undone(job)):
            return False
        n_looks = sum(call is other for one in self._slices for _, other in one.calls)
        return n_looks < (1 if call.may_end else self._most_looks)

    def _is_undone(self, job: Job) -> bool:
        """Whether the codes of its running call have been taken back, and have to be drawn again."""
        return job.calls[0].is_begun and not self._speaker.is_in_call(job.slot)

    def _make_rows(self, jobs: list[Job]) -> None:
        def condition(some: list[Job]) -> list[Any]:
            calls = [_first_without_rows(job) for job in some]
            slots = [job.slot for job in some]
            return self._speaker.condition(slots, [call.ids for call in calls], [call.text_eos for call in calls])

        for job, rows in self._batch.run_with_retry(jobs, condition, nothing, fail=self._batch.disable_speech):
            _first_without_rows(job).rows = rows

    def _make_room(self, job: Job) -> None:
        """The call fits behind what the slot has spoken."""
        call, slot = job.calls[0], job.slot
        if call.stream is not None:
            call.rows = call.stream.make_room(call.rows)
        elif not job.session.reference:
            # A turn longer than the code model's memory goes on with the newer half of what was spoken.
            held = self._speaker.rows(slot)
            if held + len(call.rows) + call.most > self._speaker.state.cache.max_len:
                self._speaker.drop_rows(slot, 0, held - held // 2, turn=True)
        at = self._duplex.counters(slot)
        call.at = at if call.per_call else self._duplex.keep_recent_tokens(slot, at)

    def _begin_calls(self, jobs: list[Job]) -> list[None]:
        calls = [job.calls[0] for job in jobs]
        slots = [job.slot for job in jobs]
        least, most = [call.least for call in calls], [call.most for call in calls]
        self._speaker.begin(slots, [call.rows for call in calls], min_speech_tokens=least, max_speech_tokens=most)
        for call in calls:
            call.n_drawn = 1
        return [None] * len(jobs)

    def _draw(self, jobs: list[Job], n_steps: int, start: float) -> list[bool]:
        """Set out to draw codes. Returns: of each job whether its codes have to be looked at."""
        self._draw_again([job for job in jobs if self._is_undone(job)])
        self._speaker.advance([job.slot for job in jobs], n_steps)
        for job in jobs:
            job.calls[0].n_drawn += n_steps
        due = [job for job in jobs if job.calls[0].is_due]
        if due:
            poll = self._speaker.start_poll([job.slot for job in due])
            self._slices.append(_Slice([(job, job.calls[0]) for job in due], poll, start))
        return [job in due for job in jobs]

    def _draw_again(self, jobs: list[Job]) -> None:
        """What was drawn has been undone."""
        for job in jobs:
            n_drawn = job.calls[0].n_drawn
            self._begin_calls([job])
            self._speaker.advance([job.slot], n_drawn - 1)
            job.calls[0].n_drawn = n_drawn

    def poll(self) -> None:
        """Take up the codes that have arrived; nothing waits for the others."""
        while self._slices:
            one = self._slices[0]
            jobs = self._speaking(one)
            if jobs and not one.poll.is_here:
                return
            self._slices.pop(0)
            see = partial(self._see, one)
            seen = self._batch.run_with_retry(jobs, see, self._batch.undo_call, fail=self._batch.disable_speech)
            for job, call in one.calls:
                # What was asked for before the last look was on its way behind it.
                self._batch.count([job] if job in jobs else [], "speech", max(one.start, call.seen_at))
                call.seen_at = self._batch.clock()
            for job, poll in seen:
                self._batch.guarded(job, self._drew, poll, fail=self._batch.disable_speech)

    def _speaking(self, one: _Slice) -> list[Job]:
        """Those of a slice that still speak; whose codes were undone meanwhile draws them again with the next slice."""
        return [
            job
            for job, call in one.calls
            if job in self._batch.jobs and job.calls and job.calls[0] is call and self._speaker.is_in_call(job.slot)
        ]

    def _see(self, one: _Slice, jobs: list[Job]) -> list[Poll]:
        undone = [job for job in jobs if not self._speaker.is_in_call(job.slot)]
        if undone:
            self._draw_again(undone)
            return self._speaker.poll([job.slot for job in jobs])
        polls = dict(zip((job for job, _ in one.calls), one.poll.take(), strict=True))
        return [polls[job] for job in jobs]

    def _drew(self, job: Job, poll: Poll) -> None:
        call = job.calls[0]
        if poll.bad:
            what = f"speech of session {job.session.id}"
            raise NumericsError(what, expected="finite logits", got="NaN or infinity")
        speech_tokens = poll.speech_tokens
        if poll.over:
            self._speaker.end([job.slot], [poll])
            self._duplex.count_tokens(
                job.slot, len(speech_tokens) + poll.ended, len(speech_tokens), per_call=call.per_call
            )
            if call.per_call and not poll.ended:
                speech_tokens = speech_tokens[: call.most - 1]
            self._batch.observer.spoke(job.session.id, call.at.speech_rows, call.rows, call.least, speech_tokens)
        for n in call.cuts(len(speech_tokens), poll.over):
            new, call.n_taken = speech_tokens[call.n_taken : n], n
            job.drew(call, new, poll.over and n == len(speech_tokens), poll.ended)
        if poll.over:
            job.calls.popleft()
            if job.session.voice.slot is None:
                job.windows.clear()

    # --- sound ---------------------------------------------------------------------------------

    def voice(self, jobs: list[Job]) -> None:
        self._land()
        while len(self._flights) < MAX_FLIGHTS and (ready := [job for job in jobs if self._is_ready(job)]):
            self._batch.run_with_retry(ready, self._take_off, nothing, fail=self._batch.disable_speech)
            self._land()

    def rest(self) -> None:
        """There is nothing to do but to wait for codes or sound: not for long, since something else may come."""
        coming = [one.poll for one in self._slices[:1]] + [one.launch for one in self._flights[:1]]
        is_idle = not any(self._may_draw(job) for job in self._batch.jobs)
        if is_idle and coming and not any(one.is_here for one in coming):
            time.sleep(POLL_S)

    def _is_ready(self, job: Job) -> bool:
        """Whether a window waits; one of the same job that is not through yet comes first."""
        return job in self._batch.jobs and bool(job.windows) and not any(job in _waiting(one) for one in self._flights)

    def _chunks(self, jobs: list[Job]) -> list[Chunk]:
        return [Chunk(job.session.voice.slot, job.windows[0].speech_tokens, job.windows[0].last) for job in jobs]

    def _take_off(self, jobs: list[Job]) -> list[None]:
        start = self._batch.clock()
        launch = self._vocoder.start(self._chunks(jobs))
        self._flights.append(_InFlightBatch([(job, job.windows[0]) for job in jobs], launch, start))
        return [None] * len(jobs)

    def _land(self) -> None:
        """Hand out what has arrived, in the order in which it set out."""
        while self._flights and self._flights[0].launch.is_here:
            flight = self._flights.pop(0)
            jobs = [job for job in _waiting(flight) if job in self._batch.jobs]
            arrive = partial(self._arrive, flight)
            voiced = self._batch.run_with_retry(jobs, arrive, nothing, fail=self._batch.disable_speech)
            self._batch.count(jobs, "sound", flight.start)
            for job, pcm in voiced:
                self._batch.guarded(job, self._voiced, pcm, fail=self._batch.disable_speech)

    def _arrive(self, flight: _InFlightBatch, jobs: list[Job]) -> list[np.ndarray]:
        """A flight's sounds; if it has failed, or is asked again for one that was in it, a new one's."""
        launch, flight.launch = flight.launch, None
        if launch is not None:
            try:
                sounds = self._vocoder.finish(launch)
            except Exception:
                # Whoever has gone since may have been what failed.
                if len(jobs) > 1 or len(flight.windows) == 1:
                    raise
            else:
                by_job = {job: sound for (job, _), sound in zip(flight.windows, sounds, strict=True)}
                return [by_job[job] for job in jobs]
        return self._vocoder.finish(self._vocoder.start(self._chunks(jobs)))

    def _voiced(self, job: Job, pcm: np.ndarray) -> None:
        if not np.isfinite(pcm).all():
            raise NumericsError(f"sound of session {job.session.id}", expected="finite samples", got="NaN or infinity")
        window = job.windows.popleft()
        self._batch.observer.voiced(job.session.id, window.speech_tokens, window.last)
        if len(pcm):
            if job.times.first_sound is None:
                job.times.first_sound = 1000 * (self._batch.clock() - job.arrived)
            job.say(pcm=pcm)
        if window.last:
            self._batch.voices.begin_turn(job.session)


def _to_look(call: SpeechCall) -> int:
    """Codes to draw until somebody has to look at them."""
    return max(1, call.next_look - call.n_drawn)


def _first_without_rows(job: Job) -> SpeechCall | None:
    return next((call for call in job.calls if call.rows is None), None)


def _waiting(flight: _InFlightBatch) -> list[Job]:
    """Jobs that have not dropped their window since it set out."""
    return [job for job, window in flight.windows if job.windows and job.windows[0] is window]
