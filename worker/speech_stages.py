"""The stages behind a unit's text: speech codes from what it says, and sound from codes.

Knows how jobs share batches there, and when codes are looked at. Does not know text, nor where a turn ends (jobs).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from models.errors import NumericsError
from models.speaker import Look
from models.token2wav.vocoder import Chunk
from worker.crew import Crew, nothing
from worker.job import Job, SpeechCall

SLICE_CODES = 5  # codes drawn between two decode steps of others


class SpeechStages:
    """speak: a slice of codes for each job with a call. voice: sound of every window that is complete.

    vocoder: `models.token2wav.vocoder.Vocoder` or what behaves like one; None for text only.
    """

    def __init__(self, crew: Crew, vocoder: Any):
        self._crew, self._vocoder = crew, vocoder
        self._duplex, self._speaker = crew.duplex, crew.duplex.speaker

    def speak(self, jobs: list[Job]) -> None:
        with self._crew.timed(jobs, "condition"):
            while lacking := [(job, call) for job in jobs if (call := _first_without_rows(job)) is not None]:
                self._make_rows([job for job, _ in lacking])
                jobs = [job for job in jobs if job.calls]
        with self._crew.timed(jobs, "speech"):
            fresh = [job for job in jobs if not job.calls[0].is_begun]
            for job in fresh:
                self._crew.guarded(job, self._make_room, fail=self._crew.fall_silent)
            fresh = [job for job in fresh if job.calls]
            self._crew.isolated(fresh, self._begin_calls, self._crew.undo_call, fail=self._crew.fall_silent)
            jobs = [job for job in jobs if job.calls]
            if not jobs:
                return
            n_steps = self._slice(jobs)
            draw = partial(self._draw, n_steps=n_steps)
            due = self._crew.isolated(jobs, draw, self._crew.undo_call, fail=self._crew.fall_silent)
        for job, look in due:
            if look is not None:
                self._crew.guarded(job, self._drew, look, fail=self._crew.fall_silent)

    def _make_rows(self, jobs: list[Job]) -> None:
        def condition(some: list[Job]) -> list[Any]:
            calls = [_first_without_rows(job) for job in some]
            slots = [job.slot for job in some]
            return self._speaker.condition(slots, [call.ids for call in calls], [call.text_eos for call in calls])

        for job, rows in self._crew.isolated(jobs, condition, nothing, fail=self._crew.fall_silent):
            _first_without_rows(job).rows = rows

    def _make_room(self, job: Job) -> None:
        """The call fits behind what the slot has spoken."""
        call, slot = job.calls[0], job.slot
        if call.stream is not None:
            call.rows = call.stream.make_room(call.rows)
        elif not job.session.reference:
            # A turn longer than the code model's memory goes on with the newer half of what was spoken.
            held = self._speaker.rows(slot)
            if held + len(call.rows) + call.most > self._duplex.state.speech.cache.max_len:
                self._speaker.drop_rows(slot, 0, held - held // 2, turn=True)
        at = self._duplex.counters(slot)
        call.at = at if call.per_call else self._duplex.hold_codes(slot, at)

    def _begin_calls(self, jobs: list[Job]) -> list[None]:
        calls = [job.calls[0] for job in jobs]
        slots = [job.slot for job in jobs]
        least, most = [call.least for call in calls], [call.most for call in calls]
        self._speaker.begin(slots, [call.rows for call in calls], min_codes=least, max_codes=most)
        for call in calls:
            call.n_drawn = 1
        return [None] * len(jobs)

    def _slice(self, jobs: list[Job]) -> int:
        """Codes to draw before anything else gets its turn."""
        if any(job.step is not None for job in self._crew.jobs):
            return SLICE_CODES
        return max(1, min(job.calls[0].next_look - job.calls[0].n_drawn for job in jobs))

    def _draw(self, jobs: list[Job], n_steps: int) -> list[Look | None]:
        """Draw codes. Returns: what each call has so far, None where nobody needs to know yet."""
        lost = [job for job in jobs if not self._speaker.is_in_call(job.slot)]
        for job in lost:  # undone: draw again what had been drawn
            n_drawn = job.calls[0].n_drawn
            self._begin_calls([job])
            self._speaker.advance([job.slot], n_drawn - 1)
            job.calls[0].n_drawn = n_drawn
        self._speaker.advance([job.slot for job in jobs], n_steps)
        for job in jobs:
            job.calls[0].n_drawn += n_steps
        due = [job for job in jobs if job.calls[0].is_due]
        looks = dict(zip(due, self._speaker.look([job.slot for job in due]), strict=True)) if due else {}
        return [looks.get(job) for job in jobs]

    def _drew(self, job: Job, look: Look) -> None:
        call = job.calls[0]
        if look.bad:
            what = f"speech of session {job.session.id}"
            raise NumericsError(what, expected="finite logits", got="NaN or infinity")
        codes = look.codes
        if look.over:
            self._speaker.end([job.slot], [look])
            self._duplex.count_codes(job.slot, len(codes) + look.ended, len(codes), per_call=call.per_call)
            if call.per_call and not look.ended:
                codes = codes[: call.most - 1]
            self._crew.observer.spoke(job.session.id, call.at.speech_rows, call.rows, call.least, codes)
        for n in call.cuts(len(codes), look.over):
            new, call.n_taken = codes[call.n_taken : n], n
            job.drew(call, new, look.over and n == len(codes), look.ended)
        if look.over:
            job.calls.popleft()
            if job.session.voice.slot is None:
                job.windows.clear()

    def voice(self, jobs: list[Job]) -> None:
        while jobs := [job for job in jobs if job.windows]:
            with self._crew.timed(jobs, "sound"):
                voiced = self._crew.isolated(jobs, self._voice_batch, nothing, fail=self._crew.fall_silent)
            for job, pcm in voiced:
                self._crew.guarded(job, self._voiced, pcm, fail=self._crew.fall_silent)

    def _voice_batch(self, jobs: list[Job]) -> list[np.ndarray]:
        chunks = [Chunk(job.session.voice.slot, job.windows[0].codes, job.windows[0].last) for job in jobs]
        # Copying is part of the call: a chunk whose sound never arrives has not been spoken.
        return self._vocoder.speak(chunks, take=_to_host)

    def _voiced(self, job: Job, pcm: np.ndarray) -> None:
        if not np.isfinite(pcm).all():
            raise NumericsError(f"sound of session {job.session.id}", expected="finite samples", got="NaN or infinity")
        window = job.windows.popleft()
        self._crew.observer.voiced(job.session.id, window.codes, window.last)
        if len(pcm):
            if job.times.first_sound is None:
                job.times.first_sound = 1000 * (self._crew.clock() - job.arrived)
            job.say(pcm=pcm)
        if window.last:
            self._crew.voices.begin_turn(job.session)


def _to_host(sounds: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Sounds of a batch, in one copy."""
    together = torch.cat(list(sounds)).cpu().numpy()
    return np.split(together, np.cumsum([len(sound) for sound in sounds])[:-1])


def _first_without_rows(job: Job) -> SpeechCall | None:
    return next((call for call in job.calls if call.rows is None), None)
