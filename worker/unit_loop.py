"""The loop on the engine thread: takes every job there is and runs each stage once for all that want it.

    prefill   pictures, sound, one forward of all known rows, the first token       per newcomer
    decode    feed a token, choose the next                                          per token
    speech    conditioning rows, then a few codes at a time                          per slice
    sound     codes to samples                                                       per window of codes
    result    out to the session, then the unit is closed and its window moves

`run` does each stage once, so a newcomer joins between two decode steps, and one session speaks while another one
still writes. A stage that fails for a batch is undone for all of it and run again for each by itself: the one at fault
gets a `Failure`, its neighbours never notice.

Knows stages and batches. Does not know decisions and turns (jobs), sockets, threads or time limits.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from models.duplex import Chosen, Duplex
from models.errors import ContextOverflowError, NumericsError
from models.runner import Rows
from models.speaker import Look
from models.token2wav.vocoder import Chunk
from worker.job import Job, SpeechCall
from worker.observer import Observer
from worker.results import Failure
from worker.session import Phase, Session
from worker.window import Drop

SLICE_CODES = 5  # codes drawn between two decode steps of others


class UnitLoop:
    """All jobs in flight over one set of slots."""

    def __init__(
        self,
        duplex: Duplex,
        vocoder: Any,
        voices: Any,
        *,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """vocoder: `models.token2wav.vocoder.Vocoder` or what behaves like one; None for text only."""
        self._duplex, self._vocoder, self._voices, self._clock = duplex, vocoder, voices, clock
        self._speaker = duplex.speaker
        self.observer = observer or Observer()
        self._jobs: list[Job] = []

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def add(self, job: Job) -> None:
        """Take a job of a session that has none. Raises: OrderError."""
        job.session.move("prefill")
        job.times.wait = 1000 * (self._clock() - job.arrived)
        job.at = self._duplex.counters(job.slot)
        self._jobs.append(job)

    def run(self) -> bool:
        """Each stage once. Returns: whether anything is left to do."""
        self._prefill([job for job in self._jobs if not job.is_prefilled])
        self._decode([job for job in self._jobs if job.is_prefilled and job.step is not None])
        self._speak([job for job in self._jobs if job.calls])
        self._voice([job for job in self._jobs if job.windows])
        self._finish([job for job in self._jobs if job.is_prefilled and not (job.step or job.calls or job.windows)])
        return bool(self._jobs)

    def drop(self, session: Session) -> None:
        """Forget a session's job, if it has one: the session is going away."""
        self._jobs = [job for job in self._jobs if job.session is not session]
        if self._speaker is not None:
            self._speaker.drop_call(session.slot)

    def break_off(self, session: Session) -> bool:
        """Ask a session's job to be quiet. Returns: whether one has seen to it."""
        return any(job.break_off() for job in self._jobs if job.session is session)

    def take_back(self, session: Session) -> bool:
        """Forget a session's job as if it had never begun; what has left has left. Returns: whether it had one."""
        jobs = [job for job in self._jobs if job.session is session]
        for job in jobs:
            self._jobs.remove(job)
            self._duplex.rewind(job.slot, job.at)
            session.move("fail")
        return bool(jobs)

    # --- prefill -------------------------------------------------------------------------------

    def _prefill(self, jobs: list[Job]) -> None:
        fresh = [job for job in jobs if not job.is_begun]
        for job in fresh:
            self._guarded(job, self._begin)
        fresh = [job for job in fresh if job in self._jobs and job.layout is not None]
        for job, rows in self._isolated(fresh, self._encode, lambda job: self._duplex.rewind(job.slot, job.at)):
            job.rows = rows
        by_size = defaultdict(list)
        for job in [job for job in self._jobs if job.rows is not None]:
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
        held, new, limit = self._duplex.runner.llm_rows(job.slot), len(job.layout.ids), self._duplex.runner.llm_len
        if held + new > limit:
            what = f"context of session {job.session.id}"
            raise ContextOverflowError(what, expected=f"at most {limit} rows", got=f"{held} and {new} more")
        if len(job.sounds()) > 1:
            job.at = self._duplex.hold_hearing(job.slot, job.at)

    def _encode(self, jobs: list[Job]) -> list[Rows]:
        """What each job's prefill feeds."""
        with self._timed(jobs, "see"):
            images = self._duplex.runner.encode_images([part for job in jobs for part in job.images()])
        with self._timed(jobs, "hear"):
            heard = self._hear(jobs)
            others = [job.other_rows(self._duplex.runner) for job in jobs]
        stretches = []
        for job, other in zip(jobs, others, strict=True):
            layout = job.layout
            seen, images = images[: len(layout.images)], images[len(layout.images) :]
            own = [*zip(layout.images, seen, strict=True), *zip(layout.sounds, heard[job.slot], strict=True)]
            stretches.append(self._rows(layout.ids, [*own, *other]))
            self.observer.saw(job.session.id, seen)
            self.observer.fed(job.session.id, "prefill", self._duplex.runner.llm_rows(job.slot), stretches[-1])
        return stretches

    def _piece(self, job: Job) -> int:
        """Rows that are fed at once: a long prompt goes in pieces, so that nobody else waits for all of it."""
        return min(len(job.rows), self._duplex.runner.shapes.rows[-1])

    def _feed(self, jobs: list[Job]) -> None:
        before = {job.slot: self._duplex.counters(job.slot) for job in jobs}
        with self._timed(jobs, "prefill"):
            fed = self._isolated(jobs, self._feed_batch, lambda job: self._duplex.rewind(job.slot, before[job.slot]))
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
        self.observer.prefilled(job.session.id, one.logits)
        if job.step is None or not (job.step.sample or job.step.feed is not None):
            self._guarded(job, self._text_done)
        elif job.step.feed is None:
            self._guarded(job, self._chose, one.token)

    def _hear(self, jobs: list[Job]) -> dict[int, list[Any]]:
        """Each slot's units of sound, one after the other."""
        heard: dict[int, list[Any]] = {job.slot: [] for job in jobs}
        for number in range(max((len(job.sounds()) for job in jobs), default=0)):
            now = [job for job in jobs if len(job.sounds()) > number]
            rows = self._duplex.hear(
                [job.slot for job in now],
                [torch.from_numpy(job.sounds()[number]) for job in now],
                smooth=[not job.session.reference for job in now],
            )
            for job, own in zip(now, rows, strict=True):
                heard[job.slot].append(own)
                self.observer.heard(job.session.id, own)
        return heard

    def _rows(self, ids: list[int], media: list[tuple[int, Any]]) -> Rows:
        model, table = self._duplex.runner.model, self._duplex.runner.tensor(ids, len(ids), 0)
        if not media:
            return Rows(table)
        rows = torch.zeros(len(ids), model.config.hidden_size, dtype=model.dtype, device=table.device)
        is_row = torch.zeros(len(ids), dtype=torch.bool)
        for start, own in media:
            rows[start : start + len(own)] = own
            is_row[start : start + len(own)] = True
        return Rows(table, rows, is_row.to(table.device))

    # --- text ----------------------------------------------------------------------------------

    def _decode(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        before = {job.slot: self._duplex.counters(job.slot) for job in jobs}
        with self._timed(jobs, "decode"):
            done = self._isolated(jobs, self._decode_batch, lambda job: self._duplex.rewind(job.slot, before[job.slot]))
        for job, one in done:
            if self._is_bad(job, one):
                continue
            self.observer.fed(job.session.id, "token", before[job.slot].llm_rows, job.step.feed)
            job.fed()
            if job.step.sample:
                self._guarded(job, self._chose, one.token)
            else:
                self._guarded(job, self._text_done)

    def _decode_batch(self, jobs: list[Job]) -> list[Chosen]:
        steps = [job.step for job in jobs]
        return self._duplex.step(
            [job.slot for job in jobs],
            [step.feed for step in steps],
            [step.place for step in steps],
            [step.sample for step in steps],
        )

    def _chose(self, job: Job, token: int) -> None:
        job.chose(self.observer.token(job.session.id, job, token))
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
            self._fail(job, NumericsError(what, expected="finite numbers", got="NaN, infinity or no choice left"))
        return one.bad

    # --- speech --------------------------------------------------------------------------------

    def _speak(self, jobs: list[Job]) -> None:
        with self._timed(jobs, "condition"):
            while lacking := [(job, call) for job in jobs if (call := _first_without_rows(job)) is not None]:
                self._make_rows([job for job, _ in lacking])
                jobs = [job for job in jobs if job.calls]
        with self._timed(jobs, "speech"):
            fresh = [job for job in jobs if not job.calls[0].is_begun]
            for job in fresh:
                self._guarded(job, self._make_room, fail=self._fall_silent)
            fresh = [job for job in fresh if job.calls]
            self._isolated(fresh, self._begin_calls, self._undo_call, fail=self._fall_silent)
            jobs = [job for job in jobs if job.calls]
            if not jobs:
                return
            n_steps = self._slice(jobs)
            draw = partial(self._draw, n_steps=n_steps)
            due = self._isolated(jobs, draw, self._undo_call, fail=self._fall_silent)
        for job, look in due:
            if look is not None:
                self._guarded(job, self._drew, look, fail=self._fall_silent)

    def _make_rows(self, jobs: list[Job]) -> None:
        def condition(some: list[Job]) -> list[Any]:
            calls = [_first_without_rows(job) for job in some]
            slots = [job.slot for job in some]
            return self._speaker.condition(slots, [call.ids for call in calls], [call.text_eos for call in calls])

        for job, rows in self._isolated(jobs, condition, _nothing, fail=self._fall_silent):
            _first_without_rows(job).rows = rows.clone()

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

    def _undo_call(self, job: Job) -> None:
        self._duplex.rewind_speech(job.slot, job.calls[0].at)

    def _slice(self, jobs: list[Job]) -> int:
        """Codes to draw before anything else gets its turn."""
        if any(job.step is not None for job in self._jobs):
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
            self.observer.spoke(job.session.id, call.at.speech_rows, call.rows, call.least, codes)
        for n in call.cuts(len(codes), look.over):
            new, call.n_taken = codes[call.n_taken : n], n
            job.drew(call, new, look.over and n == len(codes), look.ended)
        if look.over:
            job.calls.popleft()
            if job.session.voice.slot is None:
                job.windows.clear()

    # --- sound ---------------------------------------------------------------------------------

    def _voice(self, jobs: list[Job]) -> None:
        while jobs := [job for job in jobs if job.windows]:
            with self._timed(jobs, "sound"):
                voiced = self._isolated(jobs, self._voice_batch, _nothing, fail=self._fall_silent)
            for job, pcm in voiced:
                self._guarded(job, self._voiced, pcm, fail=self._fall_silent)

    def _voice_batch(self, jobs: list[Job]) -> list[np.ndarray]:
        chunks = [Chunk(job.session.voice.slot, job.windows[0].codes, job.windows[0].last) for job in jobs]
        # Copying is part of the call: a chunk whose sound never arrives has not been spoken.
        return self._vocoder.speak(chunks, take=_to_host)

    def _voiced(self, job: Job, pcm: np.ndarray) -> None:
        if not np.isfinite(pcm).all():
            raise NumericsError(f"sound of session {job.session.id}", expected="finite samples", got="NaN or infinity")
        window = job.windows.popleft()
        self.observer.voiced(job.session.id, window.codes, window.last)
        if len(pcm):
            if job.times.first_sound is None:
                job.times.first_sound = 1000 * (self._clock() - job.arrived)
            job.say(pcm=pcm)
        if window.last:
            self._voices.begin_turn(job.session)

    # --- outcome -------------------------------------------------------------------------------

    def _finish(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.times.total = 1000 * (self._clock() - job.arrived)
            self._guarded(job, self._tell)
        jobs = [job for job in jobs if job in self._jobs]
        closing = [job for job in jobs if job.session.reference]
        with self._timed(jobs, "finalize"):
            evictions: dict[Job, deque[Any]] = {}
            for job in jobs:
                self._guarded(job, lambda job: evictions.update({job: deque(job.close())}))
            closing = [job for job in closing if job in self._jobs and job.session.pending]
            before = {job.slot: self._duplex.counters(job.slot) for job in closing}
            self._isolated(closing, self._feed_pending, lambda job: self._duplex.rewind(job.slot, before[job.slot]))
            while moving := [job for job in jobs if job in self._jobs and evictions[job]]:
                self._evict({job: evictions[job].popleft() for job in moving})
        for job in [job for job in jobs if job in self._jobs]:
            job.session.move("finalize")
            self._jobs.remove(job)
            self.observer.closed(job.session.id)

    def _tell(self, job: Job) -> None:
        event = job.fail(job.error) if job.error is not None else job.result()
        if not isinstance(event, Failure):
            event = replace(event, llm_rows=self._duplex.runner.llm_rows(job.slot))
        job.session.move("generate")
        job.session.tell(event)
        self.observer.done(job.session.id, event)

    def _feed_pending(self, jobs: list[Job]) -> list[None]:
        """In reference a unit is closed at once; otherwise its last rows go in front of the next unit's."""
        slots = [job.slot for job in jobs]
        for job in jobs:
            past = self._duplex.runner.llm_rows(job.slot)
            self.observer.fed(job.session.id, "finalize", past, job.session.pending)
        self._duplex.feed(slots, [self._rows(job.session.pending, []) for job in jobs], [False] * len(jobs))
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
            self._guarded(job, move_rows)

    # --- failures ------------------------------------------------------------------------------

    def _isolated(
        self,
        jobs: list[Job],
        call: Callable[[list[Job]], Sequence[Any]],
        undo: Callable[[Job], None],
        *,
        fail: Callable[[Job, Exception], None] | None = None,
    ) -> list[tuple[Job, Any]]:
        """Run a batch; if it fails, undo it and run each job by itself. Returns: the jobs it worked for, and what."""
        if not jobs:
            return []
        try:
            return list(zip(jobs, call(jobs), strict=True))
        except Exception as error:
            for job in jobs:
                undo(job)
            if len(jobs) == 1:
                (fail or self._fail)(jobs[0], error)
                return []
        return [pair for job in jobs for pair in self._isolated([job], call, undo, fail=fail)]

    def _guarded(
        self,
        job: Job,
        call: Callable[..., None],
        *arguments: Any,
        fail: Callable[[Job, Exception], None] | None = None,
    ) -> None:
        try:
            call(job, *arguments)
        except Exception as error:
            (fail or self._fail)(job, error)

    def _fall_silent(self, job: Job, error: Exception) -> None:
        """Go on without a voice: the text stands."""
        job.error = error
        if job.calls and job.calls[0].is_begun:
            self._undo_call(job)  # so that what is drawn next is what the host believes it to be
        job.calls.clear()
        job.windows.clear()
        self._voices.cut(job.session)

    def _fail(self, job: Job, error: Exception) -> None:
        """End a job without touching others: its text is taken back, or stands if only its voice failed."""
        session = job.session
        if job.error is None and job.is_text_done and session.phase is Phase.PREFILLED:
            self._fall_silent(job, error)
            return
        self._jobs.remove(job)
        if session.phase is Phase.GENERATED:
            # Half-closed, the context cannot be trusted any more: the session has to be prepared again.
            self._duplex.empty(job.slot)
            session.move("reset")
        else:
            self._duplex.rewind(job.slot, job.at)
            session.move("fail")
        event = job.fail(error)
        session.tell(event)
        self.observer.done(session.id, event)

    @contextmanager
    def _timed(self, jobs: Sequence[Job], stage: str) -> Iterator[None]:
        start = self._clock()
        yield
        spent = 1000 * (self._clock() - start)
        for job in jobs:
            setattr(job.times, stage, getattr(job.times, stage) + spent)


def _to_host(sounds: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Sounds of a batch, in one copy."""
    together = torch.cat(list(sounds)).cpu().numpy()
    return np.split(together, np.cumsum([len(sound) for sound in sounds])[:-1])


def _nothing(job: Job) -> None:
    """What there is to undo where a stage changes nothing that counts."""


def _first_without_rows(job: Job) -> SpeechCall | None:
    return next((call for call in job.calls if call.rows is None), None)
