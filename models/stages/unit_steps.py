"""A unit's tensor work for batches of slots: hear, feed, choose, step, and going back to where a slot was.

Knows slots, rows and counts. Does not know sessions, turns or what tokens mean: the caller says what is fed, which
states are kept for speech and who wants another token.

The host knows every counter of a slot (`Counters`) without asking the device. So what a failed call has done to a slot
is undone by writing its counters back: rows beyond a length do not exist, and rings are written by position.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from models.errors import AudioError, NumericsError, ShapeError
from models.inputs.audio import N_FFT
from models.inputs.mel_stream import plan_emission
from models.layers.apm import UNIT_ROWS
from models.layers.audio_overlap import needs_overlap
from models.sampling.settings import SpeechSampling, TextSampling
from models.stages.context_mover import ContextMover
from models.stages.runner import Rows, Runner
from models.stages.speech_steps import Speaker

REDUNDANCY = 2  # mel frames of context around a unit's own

Item = TypeVar("Item")


class Chosen(NamedTuple):
    """token: chosen next, None if none was wanted. bad: the logits were NaN or infinite. batch: [B, V] logits of the
    call; row: the slot's among them.
    """

    token: int | None
    bad: bool
    batch: Tensor
    row: int

    @property
    def logits(self) -> Tensor:
        """[V], on the device, valid until the next call. Few ask, and a view for each slot would cost every step."""
        return self.batch[self.row]


class Counters(NamedTuple):
    """Where a slot stands. llm_rows, speech_rows: first, since `UnitSteps.counters` fills these two in. tail: [400]
    newest
    samples that were heard, on the CPU. heard, recent_codes: what `hold_hearing` and `hold_tokens` kept.
    """

    context_len: int
    speech_rows: int
    draws: int
    remembered: int
    chunk_start: int
    n_samples: int
    n_frames: int
    n_units: int
    audio_rows: int
    tail: Tensor
    speech_draws: int
    tokens_remembered: int
    heard: tuple[Tensor, ...] = ()
    recent_tokens: Tensor | None = None


_EMPTY = Counters(0, 0, 0, 0, 0, 0, 0, 0, 0, torch.zeros(N_FFT), 0, 0)


class UnitSteps:
    """The stages of a unit over a runner's slots. speaker: None for a checkpoint that does not speak.

    context: how rows leave a slot's context.
    """

    def __init__(self, runner: Runner, speaker: Speaker | None):
        self.runner, self.speaker, self.state = runner, speaker, runner.state
        self._at = [_EMPTY] * runner.state.n_slots
        self.context = ContextMover(runner, self._feed_text)
        self._positions = runner.model.config.audio_config.max_source_positions

    # --- slots ---------------------------------------------------------------------------------

    def open(self) -> int:
        """Lease an empty slot. Raises: SlotError if none is free."""
        return self.runner.pool.acquire()

    def close(self, slot: int) -> None:
        """Give a slot back, emptied."""
        self.empty(slot)
        self.runner.pool.release(slot)

    def empty(self, slot: int) -> None:
        """Forget everything the slot holds, its settings included."""
        if self.speaker is not None:
            self.speaker.drop_call(slot)
            self.speaker.join()
        self.state.reset(self._one(slot))
        self.runner.forget_rows(slot)
        self.context.let_go(slot)
        self._at[slot] = _EMPTY

    def configure(self, slot: int, text: TextSampling, speech_tokens: SpeechSampling, seed: int) -> None:
        """How the slot's tokens and codes are chosen; random numbers start at `seed`. Raises: SettingsError."""
        self.runner.configure_text(slot, text, seed)
        self._at[slot] = self._at[slot]._replace(draws=0)
        if self.speaker is not None:
            self.speaker.start_turn(slot, speech_tokens, seed=seed)
            self._at[slot] = self._at[slot]._replace(speech_draws=0, tokens_remembered=0)

    def adjust_text(self, slot: int, text: TextSampling) -> None:
        """Other settings from now on; history and random numbers go on. Raises: SettingsError."""
        self.runner.configure_text(slot, text)

    def counters(self, slot: int) -> Counters:
        """Where the slot stands now."""
        runner = self.runner
        _, _, *others = self._at[slot]  # asked for at each step of each slot: in half the time of `_replace`
        return Counters(runner.context_len(slot), runner.speech_rows[slot], *others)

    def rewind(self, slot: int, to: Counters) -> None:
        """Put a slot back to where it stood; nothing that came after is left, not even a NaN beyond its rows."""
        one, state = self._one(slot), self.state
        self._set_rows(state.llm, one, to.context_len)
        self.runner.set_context_len(slot, to.context_len)
        for tensor, value in (
            (state.text.draws, to.draws),
            (state.text.count, to.remembered),
            (state.text.chunk_start, to.chunk_start),
        ):
            tensor[slot] = value
        if state.apm is not None:
            self._set_rows(state.apm, one, to.audio_rows)
            state.mel.tail[slot] = to.tail.to(one.device)
            state.mel.n_samples[slot] = to.n_samples
            state.mel.n_emitted[slot] = to.n_frames
            state.recent_mel.n_units[slot] = to.n_units
            for tensor, kept in zip(self._audio_buffer() if to.heard else (), to.heard, strict=True):
                tensor[slot] = kept
        self._at[slot] = to._replace(heard=(), recent_tokens=None)
        self.rewind_speech(slot, to)

    def hold_hearing(self, slot: int, at: Counters) -> Counters:
        """Counters to go back to across several units of sound, of which the rings remember one only."""
        return at._replace(heard=tuple(tensor[slot].clone() for tensor in self._audio_buffer()))

    def hold_tokens(self, slot: int, at: Counters) -> Counters:
        """Counters to go back to across codes that are remembered beyond their call, more than the ring holds."""
        self.speaker.join()
        return at._replace(recent_tokens=self.state.speech.sampler.history[slot].clone())

    def _audio_buffer(self) -> list[Tensor]:
        return [*self.state.apm.tensors(), *self.state.mel.tensors(), *self.state.recent_mel.tensors()]

    def rewind_speech(self, slot: int, to: Counters) -> None:
        """As `rewind`, of what the slot has spoken only."""
        if self.speaker is None:
            return
        one, sampler = self._one(slot), self.state.speech.sampler
        self.speaker.drop_call(slot)
        self.speaker.join()
        self._set_rows(self.state.speech.cache, one, to.speech_rows)
        self.runner.speech_rows[slot] = to.speech_rows
        sampler.draws[slot], sampler.count[slot] = to.speech_draws, to.tokens_remembered
        if to.recent_tokens is not None:
            sampler.history[slot] = to.recent_tokens
        self._at[slot] = self._at[slot]._replace(
            speech_rows=to.speech_rows,
            speech_draws=to.speech_draws,
            tokens_remembered=to.tokens_remembered,
        )

    def _set_rows(self, cache: object, one: Tensor, rows: int) -> None:
        length = torch.full_like(one, rows)
        cache.set_length(one, length)
        cache.wipe(one, length)

    def _one(self, slot: int) -> Tensor:
        return self.runner.tensor([slot], 1, slot)

    # --- prompt --------------------------------------------------------------------------------

    def save(self, slot: int) -> list[Tensor]:
        """A copy of the slot's context, for other slots to start from."""
        return self.state.llm.save(slot, self.runner.context_len(slot))

    def save_keys(self, slot: int, n: int) -> list[Tensor]:
        """A copy of the keys of the slot's first n rows, for `context.hold`."""
        return self.state.llm.save_keys(slot, n)

    def load(self, slot: int, saved: list[Tensor]) -> None:
        """Start an empty slot from a copy."""
        self.state.llm.load(slot, saved)
        self.runner.set_context_len(slot, saved[0].shape[1])

    # --- hearing -------------------------------------------------------------------------------

    def hear(self, slots: Sequence[int], sounds: Sequence[Tensor], *, smooth: Sequence[bool]) -> list[Tensor]:
        """One unit of sound per slot to LLM rows [10, D] each.

        Args:
            sounds: [n] float32 on the CPU: 16 480 samples first, 16 000 later.
            smooth: encode the last seconds again where the encoder's positions run out, instead of forgetting them.
        Raises: AudioError if a sound is not a whole unit; nothing has been heard then.
        """
        self.runner.check_slots(slots, sounds, smooth)
        plans = [self._plan(slot, len(sound)) for slot, sound in zip(slots, sounds, strict=True)]
        again = [
            on and needs_overlap(self._at[slot].audio_rows, lo, hi, self._positions)
            for slot, on, (lo, hi, _) in zip(slots, smooth, plans, strict=True)
        ]
        rows: list[Tensor] = []
        for part in self._parts(list(range(len(slots)))):
            rows += self._hear(
                [slots[i] for i in part], [sounds[i] for i in part], [plans[i] for i in part], [again[i] for i in part]
            )
        return rows

    def _plan(self, slot: int, n_new: int) -> tuple[int, int, int]:
        at = self._at[slot]
        lo, hi, n_frames = plan_emission(at.n_samples + n_new, at.n_frames, REDUNDANCY)
        if hi == 0:
            raise AudioError(f"sound of slot {slot}", expected="a whole unit", got=f"{n_new} samples")
        return lo, hi, n_frames

    def _hear(
        self,
        slots: Sequence[int],
        sounds: Sequence[Tensor],
        plans: Sequence[tuple[int, int, int]],
        again: Sequence[bool],
    ) -> list[Tensor]:
        runner = self.runner
        n_new = [len(sound) for sound in sounds]
        columns = ((n_new, 0), ([True] * len(slots), False), ([False] * len(slots), False), (again, False))
        size, slot_ids, *heard, starts_over = runner.batch("audio_unit", slots, *columns)
        if any(again):
            runner.regions("audio_overlap", slot_ids, starts_over)
        n_padded = runner.shapes.fit("mel_unit", "samples", max(map(len, sounds)))
        padded = torch.zeros(size, n_padded)
        for row, sound in enumerate(sounds):
            padded[row, : len(sound)] = sound
        mel, lo, hi = runner.regions("mel_unit", slot_ids, padded.numpy(), *heard, redundancy=REDUNDANCY, clip="auto")
        encoded, _ = runner.regions("audio_unit", slot_ids, mel, lo, hi)
        for slot, sound, (first, end, n_frames), overlaps in zip(slots, sounds, plans, again, strict=True):
            at = self._at[slot]
            held = at.audio_rows
            if overlaps:
                held = UNIT_ROWS * min(at.n_units, self.state.recent_mel.mel.shape[1] - 1)
            elif needs_overlap(held, first, end, self._positions):
                held = 0
            self._at[slot] = at._replace(
                n_samples=at.n_samples + len(sound),
                n_frames=n_frames,
                n_units=at.n_units + 1,
                audio_rows=held + UNIT_ROWS,
                tail=torch.cat((at.tail, sound[-N_FFT:]))[-N_FFT:],
            )
        return list(encoded[: len(slots)].clone().unbind())

    # --- text ----------------------------------------------------------------------------------

    def feed(self, slots: Sequence[int], stretches: Sequence[Rows], wants: Sequence[bool]) -> list[Chosen]:
        """Append a stretch to each slot and choose a token after it where wanted; one sync.

        Raises: SlotError, ShapeError or ContextOverflowError before anything is fed.
        """
        runner = self.runner
        runner.check_slots(slots, stretches, wants)
        for slot, span in zip(slots, stretches, strict=True):
            if len(span) == 0:
                raise ShapeError(f"feed to slot {slot}", expected="at least one row", got="none")
            runner.check_room(slot, len(span))
        most = runner.shapes.rows[-1]
        chosen: dict[int, Chosen] = {}
        for start in range(0, max(map(len, stretches)), most):
            live = [i for i, span in enumerate(stretches) if len(span) > start]
            longest = min(most, max(len(stretches[i]) - start for i in live))
            held = runner.shapes.most_fed(runner.shapes.fit("unit_prefill", "rows", longest))
            for part in self._parts(live, held):
                last = [len(stretches[i]) <= start + most for i in part]
                got = self._feed_piece(
                    [slots[i] for i in part],
                    [stretches[i].cut(start, start + most) for i in part],
                    [wants[i] and end for i, end in zip(part, last, strict=True)],
                )
                # A long stretch is bad as soon as one of its pieces is.
                for i, one in zip(part, got, strict=True):
                    chosen[i] = one._replace(bad=one.bad or (i in chosen and chosen[i].bad))
        return [chosen[i] for i in range(len(slots))]

    def _feed_text(self, slot: int, rows: Rows) -> None:
        if self.feed([slot], [rows], [False])[0].bad:
            raise NumericsError(f"context of slot {slot}", expected="finite numbers", got="NaN or infinity")

    def _feed_piece(self, slots: Sequence[int], pieces: Sequence[Rows], wants: Sequence[bool]) -> list[Chosen]:
        inputs, kv_len = self.runner.prefill_inputs("unit_prefill", slots, pieces, (wants, False))
        out = self.runner.regions("unit_prefill", *inputs, kv_len=kv_len)
        for slot, piece in zip(slots, pieces, strict=True):
            self.runner.set_context_len(slot, self.runner.context_len(slot) + len(piece))
        return self._chosen(slots, wants, *out)

    def step(
        self, slots: Sequence[int], ids: Sequence[int], places: Sequence[int | None], wants: Sequence[bool]
    ) -> list[Chosen]:
        """Feed one token to each slot and choose the next where wanted; one sync a batch.

        places: row of the slot's `hidden` that keeps the token's state for speech; None: it is not spoken.
        Raises: SlotError or ContextOverflowError before anything is fed.
        """
        runner = self.runner
        runner.check_slots(slots, ids, places, wants)
        for slot in slots:
            runner.check_room(slot, 1)
        chosen: list[Chosen] = []
        most = runner.shapes.batch[-1]
        for start in range(0, len(slots), most):
            own, fed, kept, wanted = (values[start : start + most] for values in (slots, ids, places, wants))
            kept = [-1 if place is None else place for place in kept]
            columns = ((fed, 0), ([True] * len(own), False), (kept, -1), (wanted, False))
            _, *inputs = runner.batch("unit_step", own, *columns)
            out = runner.regions("unit_step", *inputs, kv_len=runner.kv_len("unit_step", own, 1))
            runner.add_context_len(own, 1)
            chosen += self._chosen(own, wanted, *out)
        return chosen

    def _chosen(self, slots: Sequence[int], wants: Sequence[bool], packed: Tensor, logits: Tensor) -> list[Chosen]:
        chosen = []
        ids, bad, remembered = packed.tolist()  # the one sync; with the padding: to leave it out would be a kernel more
        for row, (slot, wanted) in enumerate(zip(slots, wants, strict=True)):
            at, is_bad = self._at[slot], bad[row] != 0
            drawn = wanted and not is_bad
            if drawn or remembered[row]:
                self._at[slot] = at._replace(draws=at.draws + drawn, remembered=at.remembered + remembered[row])
            chosen.append(Chosen(ids[row] if drawn else None, is_bad, logits, row))
        return chosen

    def begin_text_chunk(self, slot: int) -> None:
        """A chunk of a turn-based answer starts: its repetition window reaches back from here."""
        self.state.text.begin_chunk(self._one(slot))
        self._at[slot] = self._at[slot]._replace(chunk_start=self._at[slot].remembered)

    def begin_answer(self, slot: int) -> None:
        """A turn-based answer starts: what was said before does not count as repeated."""
        self.state.text.forget(self._one(slot))
        self._at[slot] = self._at[slot]._replace(remembered=0, chunk_start=0)

    # --- speech --------------------------------------------------------------------------------

    def end_turn(self, slot: int) -> None:
        """Forget what was spoken; settings and random numbers go on, those of a call that runs are taken back."""
        if self.speaker.is_in_call(slot):
            self.speaker.join()
            self.state.speech.sampler.draws[slot] = self._at[slot].speech_draws
            self.speaker.drop_call(slot)
        self.speaker.empty_cache(slot)
        self.speaker.forget_tokens(slot)
        self._at[slot] = self._at[slot]._replace(tokens_remembered=0)

    def count_tokens(self, slot: int, n_drawn: int, n_speech_tokens: int, *, per_call: bool) -> None:
        """A call of the slot has ended after `n_drawn` draws, `n_speech_tokens` of them ordinary codes."""
        at = self._at[slot]
        before = 0 if per_call else at.tokens_remembered
        self._at[slot] = at._replace(speech_draws=at.speech_draws + n_drawn, tokens_remembered=before + n_speech_tokens)

    def _parts(self, items: list[Item], most: int | None = None) -> list[list[Item]]:
        """Items in groups of at most the largest batch, or of `most`."""
        each = iter(items)
        parts = []
        while part := list(islice(each, most or self.runner.shapes.batch[-1])):
            parts.append(part)
        return parts
