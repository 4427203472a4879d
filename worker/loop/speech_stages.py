"""The stages after a unit's text that draw speech tokens from the hidden states of its spoken tokens.

Draws are launched now and polled later: on a GPU they run beside other sessions' text. Contains how jobs share batches
and when drawn tokens are polled. Does not contain text, sound, nor where a turn ends (jobs).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from models.errors import NumericsError
from models.stages.speech_steps import Poll, Readback, Speaker
from worker.loop.batch_runner import BatchRunner
from worker.loop.job import Job, SpeechCall

SLICE_SPEECH_TOKENS = 6  # drawn between two decode steps of other jobs
FIRST_SLICE_SPEECH_TOKENS = 7  # the same at most, if they complete a first piece; all but one of the default piece of 8
FEW_JOBS = 4  # in flight, up to which a unit's further tokens wait for its first sound
MAX_POLLS = 2  # in flight per call: draws that are needed in any case are launched before the last poll has arrived


Item = TypeVar("Item")


@dataclass(eq=False)
class _PendingPoll:
    """A poll in flight. calls: those it covers. start: clock reading when their draws were launched."""

    calls: list[tuple[Job, SpeechCall]]
    readback: Readback
    start: float


class SpeechStages:
    """draw: condition, begin and advance the speech calls of jobs. poll: hand drawn tokens to their jobs."""

    def __init__(self, batch: BatchRunner, speaker: Speaker, *, first_sound_alone: bool = False):
        """first_sound_alone: with few jobs, a unit's further tokens wait until the vocoder has made its first sound."""
        self._batch, self._unit_steps, self._speaker = batch, batch.unit_steps, speaker
        self._first_sound_alone = first_sound_alone and speaker.is_beside
        self._condition, self._begin = _Condition(batch, speaker), _Begin(batch, speaker)
        self._polls: list[_PendingPoll] = []
        self._max_polls = MAX_POLLS if speaker.is_beside else 1

    # --- draw ----------------------------------------------------------------------------------

    def draw(self, jobs: list[Job], *, is_alone: bool) -> None:
        """Launch draws for every job with a speech call.

        is_alone: no job has text to work on now: draw until a poll, otherwise one slice.
        """
        if not jobs:
            return
        with self._batch.timed(jobs, "condition"):
            while unconditioned := [job for job in jobs if _first_unconditioned(job) is not None]:
                for job, rows in self._batch.run_with_retry(unconditioned, self._condition):
                    _require(_first_unconditioned(job)).prepare(rows)
                jobs = [job for job in jobs if job.calls]
        start = self._batch.clock()
        new = [job for job in jobs if not job.calls[0].is_begun]
        for job in new:
            self._batch.guard_speech(job, self._make_room)
        self._batch.run_with_retry([job for job in new if job.calls], self._begin)
        while jobs := [job for job in jobs if self._may_draw(job)]:
            # If no other stage waits, draw up to the next poll, and on from there before its tokens have arrived.
            n_steps = min(job.calls[0].n_until_poll for job in jobs) if is_alone else _slice(jobs)
            draw = _Draw(self._batch, self._speaker, self._polls, n_steps, start)
            drawn = self._batch.run_with_retry(jobs, draw)
            self._batch.count([job for job, is_polled in drawn if not is_polled], "speech", start)
            if not is_alone:
                break
            start = self._batch.clock()

    def can_draw(self, jobs: Sequence[Job]) -> bool:
        """Whether draws of any job can be launched now."""
        return any(self._may_draw(job) for job in jobs)

    def _may_draw(self, job: Job) -> bool:
        """Whether more tokens of the running call may be drawn before the polls in flight have arrived."""
        call = job.calls[0] if job.calls else None
        if call is None or not (call.n_drawn < call.max_tokens or _is_undone(job, self._speaker)):
            return False
        n_polls = sum(call is other for poll in self._polls for _, other in poll.calls)
        if self._waits_for_sound(job, call, n_polls):
            return False
        return n_polls < (1 if call.may_end else self._max_polls)

    def _waits_for_sound(self, job: Job, call: SpeechCall, n_polls: int) -> bool:
        """Whether further tokens of a unit wait for its first sound, so that the vocoder has the GPU to itself.

        They would run beside it and delay that sound. With more jobs in flight, others would do so in their place.
        """
        if not self._first_sound_alone or len(self._batch.jobs) > FEW_JOBS:
            return False
        if job.session.speech.vocoder_slot is None or job.times.first_sound is not None:
            return False
        is_first_drawn = bool(call.pieces) and call.n_drawn >= call.pieces[0]
        return is_first_drawn and (n_polls > 0 or bool(job.windows))

    def _make_room(self, job: Job) -> None:
        """Reserve the pages of the next call; drop speech rows of the slot first if the call does not fit after them.

        Raises: SlotError if the pool has too few free pages even then.
        """
        call, slot, speaker = job.calls[0], job.slot, self._speaker
        rows = _require(call.rows)
        if call.stream is not None:
            rows = call.stream.make_room(rows)
            call.prepare(rows)
        else:
            held = speaker.rows(slot)
            is_long = held + len(rows) + call.max_tokens > speaker.max_rows
            if not job.session.reference and (is_long or not speaker.has_room(slot, len(rows), call.max_tokens)):
                # A turn longer than the speech cache or the pool keeps only the newer half of its rows.
                speaker.drop_rows(slot, 0, held - held // 2, rotates=True)
            speaker.reserve(slot, len(rows), call.max_tokens)
        start = self._unit_steps.counters(slot)
        call.begin(start if call.per_call else self._unit_steps.keep_recent_tokens(slot, start))

    # --- poll ----------------------------------------------------------------------------------

    @property
    def oldest_poll(self) -> Readback | None:
        """The poll in flight that arrives first."""
        return self._polls[0].readback if self._polls else None

    def poll(self) -> None:
        """Hand drawn tokens that have arrived to their jobs; does not wait for the others."""
        while self._polls:
            poll = self._polls[0]
            jobs = self._live_jobs(poll)
            if jobs and not poll.readback.is_here:
                return
            self._polls.pop(0)
            read = self._batch.run_with_retry(jobs, _ReadPoll(self._batch, self._speaker, poll))
            for job, call in poll.calls:
                # Draws launched before the last poll arrived were queued behind it.
                self._batch.count([job] if job in jobs else [], "speech", max(poll.start, call.polled_at))
                call.mark_polled(self._batch.clock())
            for job, drawn in read:
                self._batch.guard_speech(job, self._take, drawn)

    def _live_jobs(self, poll: _PendingPoll) -> list[Job]:
        """Jobs of a poll whose call goes on. A call that was undone since draws its tokens again later."""
        return [
            job
            for job, call in poll.calls
            if job in self._batch.jobs and job.calls and job.calls[0] is call and self._speaker.is_in_call(job.slot)
        ]

    def _take(self, job: Job, drawn: Poll) -> None:
        call, speech_tokens = job.calls[0], drawn.speech_tokens
        if drawn.bad:
            what = f"speech of session {job.session.id}"
            raise NumericsError(what, expected="finite logits", got="NaN or infinity")
        if drawn.over:
            n_spoken = len(speech_tokens)
            self._speaker.end([job.slot], [drawn])
            self._unit_steps.count_tokens(job.slot, n_spoken + drawn.ended, n_spoken, per_call=call.per_call)
            if call.per_call and not drawn.ended:
                speech_tokens = speech_tokens[: call.max_tokens - 1]
            self._batch.observer.speech_call_ended(
                job.session.id, _require(call.start).speech_rows, _require(call.rows), call.min_tokens, speech_tokens
            )
        for n in call.cuts(len(speech_tokens), drawn.over):
            new = call.take(speech_tokens, n)
            job.on_speech_tokens(call, new, drawn.over and n == len(speech_tokens), drawn.ended)
        if drawn.over:
            job.calls.popleft()
            if job.session.speech.vocoder_slot is None:
                job.windows.clear()


class _SpeechStage:
    """Base of stages whose failure ends only the job's speech."""

    def __init__(self, batch: BatchRunner, speaker: Speaker):
        self._batch, self._speaker = batch, speaker

    def fail(self, job: Job, error: Exception) -> None:
        self._batch.disable_speech(job, error)


class _Condition(_SpeechStage):
    """Conditioning rows [n, D] of each job's first call that has none."""

    def run(self, jobs: list[Job]) -> list[Tensor]:
        calls = [_require(_first_unconditioned(job)) for job in jobs]
        slots = [job.slot for job in jobs]
        return self._speaker.condition(slots, [call.ids for call in calls], [call.text_eos for call in calls])

    def undo(self, job: Job) -> None:
        """The slot is unchanged."""


class _CallStage(_SpeechStage):
    """Base of stages of the running call: `undo` rewinds the slot's speech to where the call began."""

    def undo(self, job: Job) -> None:
        self._batch.unit_steps.rewind_speech(job.slot, _require(job.calls[0].start))

    def _begin(self, jobs: list[Job]) -> None:
        calls = [job.calls[0] for job in jobs]
        slots = [job.slot for job in jobs]
        least, most = [call.min_tokens for call in calls], [call.max_tokens for call in calls]
        rows = [_require(call.rows) for call in calls]
        self._speaker.begin(slots, rows, min_speech_tokens=least, max_speech_tokens=most)
        for call in calls:
            call.set_drawn(1)

    def _draw_again(self, jobs: list[Job]) -> None:
        """Begin calls that were undone and draw as many tokens as before."""
        for job in jobs:
            call = job.calls[0]
            n_drawn = call.n_drawn
            self._begin([job])
            self._speaker.advance([job.slot], n_drawn - 1)
            call.set_drawn(n_drawn)


class _Begin(_CallStage):
    """Begins each job's call and draws its first token."""

    def run(self, jobs: list[Job]) -> list[None]:
        self._begin(jobs)
        return [None] * len(jobs)


class _Draw(_CallStage):
    """Launches `n_steps` draws per job and a poll of the calls that are due. Result: whether the job is polled."""

    def __init__(self, batch: BatchRunner, speaker: Speaker, polls: list[_PendingPoll], n_steps: int, start: float):
        super().__init__(batch, speaker)
        self._polls, self._n_steps, self._start = polls, n_steps, start

    def run(self, jobs: list[Job]) -> list[bool]:
        self._draw_again([job for job in jobs if _is_undone(job, self._speaker)])
        self._speaker.advance([job.slot for job in jobs], self._n_steps)
        for job in jobs:
            call = job.calls[0]
            call.set_drawn(call.n_drawn + self._n_steps)
        due = [job for job in jobs if job.calls[0].is_due]
        if due:
            readback = self._speaker.start_poll([job.slot for job in due])
            self._polls.append(_PendingPoll([(job, job.calls[0]) for job in due], readback, self._start))
        return [job in due for job in jobs]


class _ReadPoll(_CallStage):
    """Reads a poll that has arrived. Result: what each call has drawn."""

    def __init__(self, batch: BatchRunner, speaker: Speaker, poll: _PendingPoll):
        super().__init__(batch, speaker)
        self._poll = poll

    def run(self, jobs: list[Job]) -> list[Poll]:
        undone = [job for job in jobs if not self._speaker.is_in_call(job.slot)]
        if undone:
            self._draw_again(undone)
            return self._speaker.poll([job.slot for job in jobs])
        polls = dict(zip((job for job, _ in self._poll.calls), self._poll.readback.take(), strict=True))
        return [polls[job] for job in jobs]


def _slice(jobs: Sequence[Job]) -> int:
    """Tokens that all of `jobs` draw between two decode steps of others: up to a first piece if few are missing."""
    left = [call.pieces[0] - call.n_drawn for call in (job.calls[0] for job in jobs) if call.pieces]
    first = [n for n in left if SLICE_SPEECH_TOKENS < n <= FIRST_SLICE_SPEECH_TOKENS]
    return max(first, default=SLICE_SPEECH_TOKENS)


def _is_undone(job: Job, speaker: Speaker) -> bool:
    """Whether the tokens of the running call were undone and have to be drawn again."""
    return job.calls[0].is_begun and not speaker.is_in_call(job.slot)


def _first_unconditioned(job: Job) -> SpeechCall | None:
    return next((call for call in job.calls if call.rows is None), None)


def _require(value: Item | None) -> Item:
    assert value is not None, "expected a value that an earlier stage has set, got None"
    return value
