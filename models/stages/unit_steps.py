"""Tensor work of a unit or turn-based answer for batches of slots: encode audio, prefill, decode, and rewind.

Contains slots, rows and counters. Does not contain sessions, turns or the meaning of tokens: the caller decides what is
fed, which hidden states are kept for speech and which slots choose another token.

The host has a copy of every counter of a slot (`Counters`), so no counter is read from the device. A failed call is
undone by writing the counters back: rows beyond a length do not exist, and ring buffers are written by position.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, repeat, takewhile
from typing import TypeVar

import torch
from torch import Tensor

from models.errors import AudioError, NumericsError, ShapeError
from models.inputs.audio import N_FFT
from models.inputs.mel_stream import plan_emission
from models.layers.apm import UNIT_ROWS
from models.layers.audio_overlap import needs_overlap
from models.layers.kv_cache import KVCache, SavedRows
from models.sampling.settings import SpeechSampling, TextSampling
from models.stages import regions
from models.stages.beam_steps import BeamSteps
from models.stages.context_mover import ContextMover
from models.stages.runner import Rows, Runner
from models.stages.runner_facts import RunnerFacts
from models.stages.speech_steps import Speaker
from models.stages.step_types import EMPTY_COUNTERS, AudioParts, AudioUnit, Chosen, Counters

REDUNDANCY = 2  # mel frames of context around a unit's own

Item = TypeVar("Item")


class UnitSteps(RunnerFacts):
    """The steps of units over a runner's slots.

    Args:
        speaker: the speech model's calls; None for a checkpoint without one.

    `context` drops and moves rows of a slot's context; `beams` searches for the text after them.
    """

    def __init__(self, runner: Runner, speaker: Speaker | None):
        super().__init__(runner)
        self.runner, self.speaker, self.state = runner, speaker, runner.state
        self._counters = [EMPTY_COUNTERS] * runner.state.n_slots
        self.context = ContextMover(runner, self._feed_text)
        self.beams = BeamSteps(runner)
        self._positions = runner.model.config.audio_config.max_source_positions

    # --- slots ---------------------------------------------------------------------------------

    def open(self, n_rows: int | None = None) -> int:
        """Lease an empty slot, as `SlotPool.acquire`."""
        return self.runner.pool.acquire(n_rows)

    def close(self, slot: int) -> None:
        """Empty a slot and return it to the pool."""
        self.empty(slot)
        self.runner.pool.release(slot)

    @contextmanager
    def lease(self) -> Iterator[int]:
        """An empty slot for the length of a `with` block. Raises: SlotError if none is free."""
        slot = self.open()
        try:
            yield slot
        finally:
            self.close(slot)

    def empty(self, slot: int) -> None:
        """Empty a slot, its settings included."""
        self.early_images.forget(slot)
        if self.speaker is not None:
            self.speaker.drop_call(slot)
            self.speaker.join()
        self.state.reset(self._slots(slot))
        if self.speaker is not None:
            self.speaker.set_rows(slot, 0)
        self.runner.set_context_len(slot, 0)
        self.context.release(slot)
        self._counters[slot] = EMPTY_COUNTERS

    def configure(self, slot: int, text: TextSampling, speech: SpeechSampling, seed: int) -> None:
        """Set how text and speech tokens are chosen; random numbers start at `seed`. Raises: SettingsError."""
        self.configure_text(slot, text, seed)
        if self.speaker is not None:
            self.speaker.start_turn(slot, speech, seed=seed)
            self._counters[slot] = self._counters[slot]._replace(speech_draws=0, tokens_remembered=0)

    def configure_text(self, slot: int, text: TextSampling, seed: int) -> None:
        """Set how the slot's text tokens are chosen; random numbers start at `seed`. Raises: SettingsError."""
        self.runner.configure_text(slot, text, seed)
        self._counters[slot] = self._counters[slot]._replace(draws=0)

    def adjust(self, slot: int, text: TextSampling | None, speech: SpeechSampling | None) -> None:
        """Change how tokens are chosen; token histories and random numbers continue. None: unchanged.

        Raises: SettingsError.
        """
        if text is not None:
            self.runner.configure_text(slot, text)
        if speech is not None and self.speaker is not None:
            self.speaker.configure(slot, speech)

    def context_len(self, slot: int) -> int:
        """Number of context rows in the slot."""
        return self.runner.context_len(slot)

    def speech_rows(self, slot: int) -> int:
        """Number of speech cache rows in the slot."""
        return 0 if self.speaker is None else self.speaker.rows(slot)

    def counters(self, slot: int) -> Counters:
        """The slot's counters now."""
        # Called at each step of each slot: slicing takes half the time of `_replace`.
        return Counters(self.runner.context_len(slot), self.speech_rows(slot), *self._counters[slot][2:])

    def set_counters(self, slot: int, to: Counters) -> None:
        """Record the slot's counters after a change that did not go through this class; the speech is unchanged."""
        self.runner.set_context_len(slot, to.context_len)
        self._counters[slot] = to

    def rewind(self, slot: int, to: Counters) -> None:
        """Restore the slot to an earlier state; later rows are overwritten, so no NaN remains beyond its length."""
        slots, state = self._slots(slot), self.state
        self._set_rows(state.llm, slots, to.context_len)
        self.runner.set_context_len(slot, to.context_len)
        for tensor, value in (
            (state.text.draws, to.draws),
            (state.text.count, to.remembered),
            (state.text.chunk_start, to.chunk_start),
        ):
            tensor[slot] = value
        if state.apm is not None:
            apm, mel, recent_mel = self._audio
            self._set_rows(apm, slots, to.audio_rows)
            mel.tail[slot] = to.tail.to(slots.device)
            mel.n_samples[slot] = to.n_samples
            mel.n_emitted[slot] = to.n_frames
            recent_mel.n_units[slot] = to.n_units
            for tensor, kept in zip(self._audio_tensors() if to.audio_state else (), to.audio_state, strict=True):
                tensor[slot] = kept
        self._counters[slot] = to._replace(audio_state=(), recent_tokens=None)
        self.rewind_speech(slot, to)

    def cut_context(self, slot: int, n_rows: int) -> None:
        """Keep the slot's first `n_rows` context rows; those after them have sampled nothing."""
        self._set_rows(self.state.llm, self._slots(slot), n_rows)
        self.runner.set_context_len(slot, n_rows)

    def keep_audio_state(self, slot: int, at: Counters) -> Counters:
        """`at` with a copy of the audio tensors. Needed to rewind several units: the ring buffers hold one."""
        return at._replace(audio_state=tuple(tensor[slot].clone() for tensor in self._audio_tensors()))

    def keep_recent_tokens(self, slot: int, at: Counters) -> Counters:
        """`at` with a copy of the speech token history. Needed where a call may overwrite the whole ring buffer."""
        speaker = self._speaker
        speaker.join()
        return at._replace(recent_tokens=speaker.state.sampler.history[slot].clone())

    @property
    def _audio(self) -> AudioParts:
        state = self.state
        assert state.apm is not None and state.mel is not None and state.recent_mel is not None, (
            "no audio in the checkpoint"
        )
        return AudioParts(state.apm, state.mel, state.recent_mel)

    @property
    def _speaker(self) -> Speaker:
        assert self.speaker is not None, "no speech in the checkpoint"
        return self.speaker

    def _audio_tensors(self) -> list[Tensor]:
        return [tensor for part in self._audio for tensor in part.tensors()]

    def rewind_speech(self, slot: int, to: Counters) -> None:
        """Restore only the slot's speech to an earlier state."""
        if self.speaker is None:
            return
        speech = self.speaker.state
        self.speaker.drop_call(slot)
        self.speaker.join()
        self._set_rows(speech.cache, self._slots(slot), to.speech_rows)
        self.speaker.set_rows(slot, to.speech_rows)
        speech.sampler.draws[slot], speech.sampler.count[slot] = to.speech_draws, to.tokens_remembered
        if to.recent_tokens is not None:
            speech.sampler.history[slot] = to.recent_tokens
        self._counters[slot] = self._counters[slot]._replace(
            speech_rows=to.speech_rows,
            speech_draws=to.speech_draws,
            tokens_remembered=to.tokens_remembered,
        )

    def _set_rows(self, cache: KVCache, slots: Tensor, n_rows: int) -> None:
        length = torch.full_like(slots, n_rows)
        cache.set_length(slots, length)
        cache.wipe(slots, length)

    def _slots(self, slot: int) -> Tensor:
        return self.runner.tensor([slot], 1, slot)

    # --- prompt --------------------------------------------------------------------------------

    def save(self, slot: int) -> SavedRows:
        """A copy of the slot's context, for `load` into other slots."""
        return self.state.llm.save(slot, self.runner.context_len(slot))

    def save_keys(self, slot: int, n: int) -> Tensor:
        """A copy of the keys of the slot's first `n` rows, for `context.hold`."""
        return self.state.llm.save_keys(slot, n)

    def load(self, slot: int, saved: SavedRows) -> None:
        """Fill an empty slot with a copied context."""
        self.state.llm.load(slot, saved)
        self.runner.set_context_len(slot, saved.n_rows)

    # --- audio ---------------------------------------------------------------------------------

    def encode_audio(self, slots: Sequence[int], samples: Sequence[Tensor], overlap: Sequence[bool]) -> list[Tensor]:
        """Encode one unit of audio per slot into LLM rows [10, D] each.

        Args:
            samples: [n] float32 on the CPU: 16 480 samples in the first unit, 16 000 later.
            overlap: when the encoder's positions run out, encode the last seconds again instead of starting over.
        Raises: AudioError for samples that are not a whole unit, with nothing changed.
        """
        self.runner.check_slots(slots, samples, overlap)
        units = [self._plan(*one) for one in zip(slots, samples, overlap, strict=True)]
        return [rows for part in self._parts(units) for rows in self._encode_audio(part)]

    def _plan(self, slot: int, samples: Tensor, overlap: bool) -> AudioUnit:
        at = self._counters[slot]
        first, end, n_frames = plan_emission(at.n_samples + len(samples), at.n_frames, REDUNDANCY)
        if end == 0:
            raise AudioError(f"sound of slot {slot}", expected="a whole unit", got=f"{len(samples)} samples")
        overlap = overlap and needs_overlap(at.audio_rows, first, end, self._positions)
        return AudioUnit(slot, samples, first, end, n_frames, overlap)

    def _encode_audio(self, units: Sequence[AudioUnit]) -> list[Tensor]:
        runner, n, recent_mel = self.runner, len(units), self._audio.recent_mel
        slots, n_new = [unit.slot for unit in units], [len(unit.samples) for unit in units]
        columns = ((n_new, 0), ([True] * n, False), ([False] * n, False))
        size, slot_ids, pushed = runner.batch("audio_unit", slots, *columns)
        if starting_over := [unit.slot for unit in units if unit.overlap]:
            _, some_slots, (active,) = runner.batch(
                "audio_overlap", starting_over, ([True] * len(starting_over), False)
            )
            runner.regions.run(regions.audio_overlap, some_slots, active)
        padded = torch.zeros(size, runner.shapes.fit("mel_unit", "samples", max(n_new)))
        for row, unit in enumerate(units):
            padded[row, : len(unit.samples)] = unit.samples
        inputs = slot_ids, padded.numpy(), *pushed
        mel, lo, hi = runner.regions.run(regions.mel_unit, *inputs, redundancy=REDUNDANCY, clip="auto")
        encoded, _ = runner.regions.run(regions.audio_unit, slot_ids, mel, lo, hi)
        for unit in units:
            at = self._counters[unit.slot]
            held = at.audio_rows
            if unit.overlap:
                held = UNIT_ROWS * min(at.n_units, recent_mel.mel.shape[1] - 1)
            elif needs_overlap(held, unit.first, unit.end, self._positions):
                held = 0
            self._counters[unit.slot] = at._replace(
                n_samples=at.n_samples + len(unit.samples),
                n_frames=unit.n_frames,
                n_units=at.n_units + 1,
                audio_rows=held + UNIT_ROWS,
                tail=torch.cat((at.tail, unit.samples[-N_FFT:]))[-N_FFT:],
            )
        return list(encoded[:n].clone().unbind())

    # --- text ----------------------------------------------------------------------------------

    def feed(self, slots: Sequence[int], spans: Sequence[Rows], sample: Sequence[bool]) -> list[Chosen]:
        """Append a span of rows to each slot and choose a token after it where `sample` is true; one sync per region
        call.

        Raises: SlotError, ShapeError or ContextOverflowError before any change.
        """
        runner = self.runner
        runner.check_slots(slots, spans, sample)
        for slot, span in zip(slots, spans, strict=True):
            if len(span) == 0:
                raise ShapeError(f"feed to slot {slot}", expected="at least one row", got="none")
            runner.check_room(slot, len(span))
        n_max = runner.shapes.rows[-1]
        chosen: dict[int, Chosen] = {}
        for start in range(0, max(map(len, spans)), n_max):
            live = [i for i, span in enumerate(spans) if len(span) > start]
            longest = min(n_max, max(len(spans[i]) - start for i in live))
            batch = runner.shapes.max_prefill_batch(runner.shapes.fit("unit_prefill", "rows", longest))
            for part in self._parts(live, runner.shapes.parts("batch", len(live), batch)):
                is_last = [len(spans[i]) <= start + n_max for i in part]
                results = self._feed_piece(
                    [slots[i] for i in part],
                    [spans[i].cut(start, start + n_max) for i in part],
                    [sample[i] and last for i, last in zip(part, is_last, strict=True)],
                )
                # A long span is bad as soon as one of its pieces is.
                for i, one in zip(part, results, strict=True):
                    chosen[i] = one._replace(bad=one.bad or (i in chosen and chosen[i].bad))
        return [chosen[i] for i in range(len(slots))]

    def _feed_text(self, slot: int, rows: Rows) -> None:
        if self.feed([slot], [rows], [False])[0].bad:
            raise NumericsError(f"context of slot {slot}", expected="finite numbers", got="NaN or infinity")

    def _feed_piece(self, slots: Sequence[int], pieces: Sequence[Rows], sample: Sequence[bool]) -> list[Chosen]:
        inputs, kv_len = self.runner.prefill_inputs("unit_prefill", slots, pieces, (sample, False))
        packed, logits = self.runner.regions.run(regions.unit_prefill, *inputs, kv_len=kv_len)
        for slot, piece in zip(slots, pieces, strict=True):
            self.runner.set_context_len(slot, self.runner.context_len(slot) + len(piece))
        return self._chosen(slots, sample, packed, logits)

    def step(
        self, slots: Sequence[int], ids: Sequence[int], places: Sequence[int | None], sample: Sequence[bool]
    ) -> list[Chosen]:
        """Append one token to each slot and choose the next where `sample` is true; one sync per region call.

        Args:
            places: row of the slot's `hidden` that receives the token's state for speech; None: it is not spoken.
        Raises: SlotError or ContextOverflowError before any change.
        """
        runner = self.runner
        runner.check_slots(slots, ids, places, sample)
        for slot in slots:
            runner.check_room(slot, 1)
        chosen: list[Chosen] = []
        n_max = runner.shapes.batch[-1]
        for start in range(0, len(slots), n_max):
            part = slice(start, start + n_max)
            own, wanted = slots[part], sample[part]
            rows = [-1 if place is None else place for place in places[part]]
            columns = ((ids[part], 0), ([True] * len(own), False), (rows, -1), (wanted, False))
            _, slot_ids, inputs = runner.batch("unit_step", own, *columns)
            kv_len = runner.kv_len("unit_step", own, 1)
            packed, logits = runner.regions.run(regions.unit_step, slot_ids, *inputs, kv_len=kv_len)
            runner.add_context_len(own, 1)
            chosen += self._chosen(own, wanted, packed, logits)
        return chosen

    def _chosen(self, slots: Sequence[int], sample: Sequence[bool], packed: Tensor, logits: Tensor) -> list[Chosen]:
        chosen = []
        ids, bad, remembered = packed.tolist()  # the one sync; padding included, since slicing would launch a kernel
        for row, (slot, wanted) in enumerate(zip(slots, sample, strict=True)):
            at, is_bad = self._counters[slot], bad[row] != 0
            drawn = wanted and not is_bad
            if drawn or remembered[row]:
                self._counters[slot] = at._replace(draws=at.draws + drawn, remembered=at.remembered + remembered[row])
            chosen.append(Chosen(ids[row] if drawn else None, is_bad, logits, row, remembered[row] != 0))
        return chosen

    def begin_text_chunk(self, slot: int) -> None:
        """Start a text chunk of a turn-based answer: its repetition window ends here."""
        self.state.text.begin_chunk(self._slots(slot))
        self._counters[slot] = self._counters[slot]._replace(chunk_start=self._counters[slot].remembered)

    def begin_answer(self, slot: int) -> None:
        """Start a turn-based answer with an empty token history."""
        self.state.text.forget(self._slots(slot))
        self._counters[slot] = self._counters[slot]._replace(remembered=0, chunk_start=0)

    # --- speech --------------------------------------------------------------------------------

    def end_turn(self, slot: int) -> None:
        """Empty the slot's speech cache and token history. Settings stay; draws of a call in progress are undone."""
        speaker = self._speaker
        if speaker.is_in_call(slot):
            speaker.join()
            speaker.state.sampler.draws[slot] = self._counters[slot].speech_draws
            speaker.drop_call(slot)
        speaker.empty_cache(slot)
        speaker.forget_tokens(slot)
        self._counters[slot] = self._counters[slot]._replace(tokens_remembered=0)

    def count_tokens(self, slot: int, n_drawn: int, n_speech_tokens: int, *, per_call: bool) -> None:
        """Count a finished speech call.

        Args:
            n_drawn: draws of the call.
            n_speech_tokens: ordinary speech tokens among them.
            per_call: the token history started empty with the call.
        """
        at = self._counters[slot]
        before = 0 if per_call else at.tokens_remembered
        self._counters[slot] = at._replace(
            speech_draws=at.speech_draws + n_drawn, tokens_remembered=before + n_speech_tokens
        )

    def _parts(self, items: list[Item], sizes: Iterable[int] | None = None) -> list[list[Item]]:
        """`items` in groups of these sizes, by default of the largest batch."""
        remaining, sizes = iter(items), sizes or repeat(self.runner.shapes.batch[-1])
        return list(takewhile(bool, (list(islice(remaining, size)) for size in sizes)))
