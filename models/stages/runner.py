"""Host side of the regions: pads requests into buckets, keeps count of what slots hold, calls the table.

Knows slots, lengths and shapes. Does not know messages, turns or sockets. Everything that is checked is
checked before a slot is touched, so a refused call leaves all slots as they were.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.errors import AudioError, ContextOverflowError, SettingsError, ShapeError, SlotError
from models.graphs.compiler import force_eager
from models.graphs.input_block import Input, padded_array
from models.graphs.streams import tensor_to_device
from models.inputs.audio import LogMel, conv_length, frame_count, split_clip, token_count
from models.inputs.image import ImagePatches, pad_batch
from models.layers.apm import UNIT_ROWS
from models.omni import OmniModel
from models.sampling.settings import TextSampling
from models.sampling.text import Sampled, TokenSets
from models.stages.region_table import Regions, Shapes
from models.stages.state import SlotPool, SlotState

Column = tuple[Sequence[int] | Sequence[bool], int | bool]  # values, and what pads them


@dataclass(frozen=True)
class Rows:
    """A stretch of context to feed: token ids, with media rows standing in where `is_row` is true.

    ids: [n] int64, is_row: [n] bool or None: on the host, where those of several slots are put together and sent at
    once. media: the media rows alone [sum of is_row, D] in order, on the model's device, or None.
    """

    ids: Tensor
    media: Tensor | None = None
    is_row: Tensor | None = None

    @classmethod
    def mixed(cls, ids: Sequence[int], media: Sequence[tuple[int, Tensor]]) -> "Rows":
        """Ids with media in their places.

        ids: any number where media stand. media: first row and rows [n, D] of each stretch of those, none of them
        empty, in any order.
        """
        is_row = np.zeros(len(ids), np.bool_)
        for start, rows in media:
            is_row[start : start + len(rows)] = True
        table = torch.from_numpy(np.array(ids, np.int64))
        if not media:
            return cls(table)
        in_order = [rows for _, rows in sorted(media, key=lambda span: span[0])]
        return cls(table, torch.cat(in_order), torch.from_numpy(is_row))

    def __len__(self) -> int:
        return self.ids.shape[0]

    def cut(self, start: int, end: int) -> "Rows":
        """Those from `start` to `end`, which may lie beyond the last one; their own media go along."""
        if start <= 0 and end >= len(self):
            return self
        first, last = (0 if self.is_row is None else int(self.is_row[:at].sum()) for at in (start, end))
        if first == last:
            return Rows(self.ids[start:end])
        return Rows(self.ids[start:end], self.media[first:last], self.is_row[start:end])


def check_span(what: str, held: int, first: int, count: int) -> None:
    """Raises: ContextOverflowError unless rows [first, first + count) are among the `held` ones."""
    if first < 0 or count < 0 or first + count > held:
        raise ContextOverflowError(what, expected=f"rows inside 0..{held}", got=f"{first}..{first + count}")


class Runner:
    """One model, its slots and its regions."""

    def __init__(
        self,
        model: OmniModel,
        sets: TokenSets,
        *,
        n_slots: int = 4,
        llm_len: int = 4096,
        tts_len: int | None = None,
        shapes: Shapes | None = None,
        shared_scratch: bool = False,
    ):
        """llm_len, tts_len: context rows per slot. shared_scratch: as `SlotState.allocate` has it.

        Raises: ContextOverflowError beyond the model's positions.
        """
        tts_len = tts_len or model.config.tts_config.max_position_embeddings
        if llm_len > model.config.max_position_embeddings:
            raise ContextOverflowError(
                "llm_len", expected=f"at most {model.config.max_position_embeddings}", got=llm_len
            )
        self.model, self.llm_len, self._tts_len, self._sets = model, llm_len, tts_len, sets
        self.state = SlotState.allocate(
            model, n_slots=n_slots, llm_len=llm_len, tts_len=tts_len, shared_scratch=shared_scratch
        )
        self.log_mel = LogMel(model.device, model.config.audio_config.num_mel_bins)
        self.use_shapes(shapes or Shapes())
        self.pool = SlotPool(self.state)
        # Host mirrors of the caches' lengths, so that choosing a bucket needs no sync.
        self._context_len = [0] * n_slots
        self.speech_rows = [0] * n_slots

    def use_shapes(self, shapes: Shapes) -> None:
        """Sizes of calls from now on, between two calls; slots stay what they are.

        `regions` is another table then, of which nothing is compiled or captured.
        """
        # A view may be longer than what a slot holds, never longer than what a slot has.
        self.shapes = shapes.capped(kv=self.llm_len, speech_kv=self._tts_len)
        self.regions = Regions(self.model, self.state, self.log_mel, self._sets, self.shapes)

    @contextmanager
    def lease(self) -> Iterator[int]:
        """An empty slot for the length of a `with` block. Raises: SlotError if none is free."""
        with self.pool.lease() as slot:
            try:
                yield slot
            finally:
                self.forget_rows(slot)

    def check_text(self, sampling: TextSampling, seed: int | None) -> None:
        """Raises: SettingsError if a slot cannot be configured so."""
        n_sets = len(self._sets.pad_id)
        if sampling.set_index >= n_sets:
            raise SettingsError("setting set_index", expected=f"below {n_sets}", got=sampling.set_index)
        self.state.text.check(sampling, seed)

    def configure_text(self, slot: int, sampling: TextSampling, seed: int | None = None) -> None:
        """How the slot's tokens are chosen from now on. Raises: SlotError or SettingsError, with nothing changed."""
        self.check_slots([slot])
        self.check_text(sampling, seed)
        self.state.text.configure(slot, sampling, seed)

    def context_len(self, slot: int) -> int:
        """Context rows the slot holds."""
        return self._context_len[slot]

    def set_context_len(self, slot: int, n_rows: int) -> None:
        """Tell the runner what the slot holds after something else has changed it."""
        self._context_len[slot] = n_rows

    def add_context_len(self, slots: Sequence[int], n_rows: int) -> None:
        """Each of these slots has been fed so many rows."""
        for slot in slots:
            self._context_len[slot] += n_rows

    def forget_rows(self, slot: int) -> None:
        """The slot has been emptied."""
        self._context_len[slot] = self.speech_rows[slot] = 0

    def tensor(self, values: Sequence[int] | Sequence[bool], size: int, fill: int | bool) -> Tensor:
        """A short host list as a device tensor of `size`, padded with `fill`."""
        return tensor_to_device(self.model.device, torch.from_numpy(padded_array(values, size, fill)))

    def check_slots(self, slots: Sequence[int], *others: Sequence[object]) -> None:
        """Raises: SlotError unless `slots` are one or more different slots of this runner, and each of `others` has an
        entry for each.
        """
        n_slots = self.state.n_slots
        if not slots or len(set(slots)) != len(slots) or min(slots) < 0 or max(slots) >= n_slots:
            raise SlotError("slots of one call", expected=f"different numbers from 0 to {n_slots - 1}", got=list(slots))
        for other in others:
            if len(other) != len(slots):
                raise SlotError("slots of one call", expected=f"{len(slots)} entries", got=len(other))

    def batch(self, region: str, slots: Sequence[int], *others: Column) -> tuple[Any, ...]:
        """What a call takes one number per slot of, as arrays for the region.

        others: lists with an entry for each slot, and what pads them.
        Returns: the batch bucket, the padded slots, and an array for each of `others`.
        Raises: ShapeError for more slots than any bucket holds.
        """
        size = self.shapes.fit(region, "batch", len(slots))
        columns = ((slots, self.state.scratch), *others)
        return size, *[padded_array(values, size, fill) for values, fill in columns]

    def check_room(self, slot: int, n_rows: int) -> None:
        """Raises: ContextOverflowError if `n_rows` more do not fit the slot's context."""
        total = self._context_len[slot] + n_rows
        if total > self.llm_len:
            raise ContextOverflowError(
                f"context of slot {slot}", expected=f"at most {self.llm_len} rows", got=f"{total} rows"
            )

    # --- media ---------------------------------------------------------------------------------

    def encode_images(self, images: Sequence[ImagePatches]) -> list[Tensor]:
        """Each slice's LLM rows [query_num, D], in order."""
        rows: list[Tensor] = []
        while len(rows) < len(images):
            group = images[len(rows) : len(rows) + self.shapes.slices[-1]]
            length = self.shapes.fit("vision", "patches", max(len(image.pixels) for image in group))
            group = group[: self.shapes.most_seen(length)]
            size = self.shapes.fit("vision", "slices", len(group))
            batch = pad_batch(group, length, size)
            out = self.regions("vision", batch.pixels, batch.position_ids, batch.coords, batch.mask)
            rows += out[: len(group)].clone().unbind()
        return rows

    def encode_clips(
        self, waves: Sequence[Tensor], *, chunk_length: float, batch_padding: bool = False
    ) -> list[Tensor]:
        """Each clip's LLM rows [n, D]; clips above 30 s are encoded in pieces of 30 s.

        Args:
            waves: [n] float32 each, checked.
            chunk_length: seconds a row may look ahead at most (its own chunk); <= 0: the whole clip.
            batch_padding: let shorter clips see the zeros that pad them to the longest one, as the public
                implementation does when it encodes clips together. Off, a clip does not depend on others.
        """
        # Once a session: compiled layers would compile again for each length, in the middle of serving.
        with force_eager():
            return self._encode_clips(waves, chunk_length, batch_padding)

    def _encode_clips(self, waves: Sequence[Tensor], chunk_length: float, batch_padding: bool) -> list[Tensor]:
        pieces = [(owner, piece) for owner, wave in enumerate(waves) for piece in split_clip(wave)]
        longest = max((frame_count(piece.shape[0]) for _, piece in pieces), default=0)
        most_rows = self.model.config.audio_config.max_source_positions
        if conv_length(longest) > most_rows:
            raise AudioError("clip", expected=f"at most {most_rows} encoder rows", got=conv_length(longest))
        rows: list[list[Tensor]] = [[] for _ in waves]
        most = self.shapes.batch[-1]
        for start in range(0, len(pieces), most):
            group = pieces[start : start + most]
            frames = [frame_count(piece.shape[0]) for _, piece in group]
            seen = [longest] * len(group) if batch_padding else frames
            n_keys = [min(n, conv_length(longest)) if batch_padding else conv_length(n) for n in frames]
            size = self.shapes.fit("clips", "batch", len(group))
            bucket = self.shapes.fit("clips", "clip_frames", max(seen))
            chunk = int(chunk_length * UNIT_ROWS) if chunk_length > 0 else 0
            out = self.regions(
                "clips",
                self._clip_mel([piece for _, piece in group], size, bucket),
                padded_array(seen, size, 0),
                padded_array(n_keys, size, 0),
                chunk=chunk,
            )
            for (owner, _), n_frames, encoded in zip(group, frames, out, strict=False):
                rows[owner].append(encoded[: token_count(n_frames)].clone())
        return [torch.cat(parts) for parts in rows]

    def _clip_mel(self, waves: Sequence[Tensor], size: int, bucket: int) -> Tensor:
        """[size, bins, bucket] log-mel, zero behind each clip's own frames."""
        mel = torch.zeros(size, self.model.config.audio_config.num_mel_bins, bucket, device=self.model.device)
        for row, wave in enumerate(waves):
            n_frames = frame_count(wave.shape[0])
            samples = wave.to(self.model.device)[None]
            mel[row, :, :n_frames] = self.log_mel.log_mel(samples, self.tensor([wave.shape[0]], 1, 0))[0, :, :n_frames]
        return mel

    # --- text ----------------------------------------------------------------------------------

    def feed(self, slots: Sequence[int], stretches: Sequence[Rows]) -> tuple[list[Tensor], Tensor]:
        """Append a stretch to each slot, in pieces of at most the largest row bucket.

        Returns: each slot's hidden states [n, D] and the logits [len(slots), V] after its last row.
        Raises: SlotError, ShapeError or ContextOverflowError before anything is fed.
        """
        self.check_slots(slots, stretches)
        for slot, span in zip(slots, stretches, strict=True):
            if len(span) == 0:
                raise ShapeError(f"feed to slot {slot}", expected="at least one row", got="none")
            self.check_room(slot, len(span))
        hidden: list[list[Tensor]] = [[] for _ in slots]
        logits: list[Tensor | None] = [None] * len(slots)
        most = self.shapes.rows[-1]
        for start in range(0, max(map(len, stretches)), most):
            live = [i for i, span in enumerate(stretches) if len(span) > start]
            states, last = self._feed_piece(
                [slots[i] for i in live], [stretches[i].cut(start, start + most) for i in live]
            )
            for row, i in enumerate(live):
                hidden[i].append(states[row])
                logits[i] = last[row]
        return [torch.cat(parts) for parts in hidden], torch.stack(logits)

    def _feed_piece(self, slots: Sequence[int], pieces: Sequence[Rows]) -> tuple[list[Tensor], Tensor]:
        inputs, kv_len = self.prefill_inputs("llm_prefill", slots, pieces)
        hidden, logits = self.regions("llm_prefill", *inputs, kv_len=kv_len)
        for slot, piece in zip(slots, pieces, strict=True):
            self._context_len[slot] += len(piece)
        return [hidden[row, : len(piece)] for row, piece in enumerate(pieces)], logits[: len(slots)]

    def prefill_inputs(
        self, region: str, slots: Sequence[int], pieces: Sequence[Rows], *others: Column
    ) -> tuple[tuple[Input, ...], int]:
        """Padded inputs of a prefill region (slots, ids, media, is_row, n_new, and `others` as in `batch`), and the kv
        bucket. The media are left open where `is_row` is false.
        """
        model, n_rows = self.model, self.shapes.fit(region, "rows", max(map(len, pieces)))
        size, slot_ids, n_new, *more = self.batch(region, slots, ([len(piece) for piece in pieces], 0), *others)
        ids, is_row = np.zeros((size, n_rows), np.int64), np.zeros((size, n_rows), np.bool_)
        for row, piece in enumerate(pieces):
            ids[row, : len(piece)] = piece.ids.numpy()
            if piece.media is not None:
                is_row[row, : len(piece)] = piece.is_row.numpy()
        media = torch.empty(size * n_rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
        if own := [piece.media for piece in pieces if piece.media is not None]:
            # Of all slots at once: one by one they would be most of what the host does here.
            places = tensor_to_device(model.device, torch.from_numpy(np.flatnonzero(is_row)))
            media.index_copy_(0, places, (torch.cat(own) if len(own) > 1 else own[0]).to(model.dtype))
        media = media.view(size, n_rows, -1)
        return (slot_ids, ids, media, is_row, n_new, *more), self.kv_len(region, slots, n_rows)

    def kv_len(self, region: str, slots: Sequence[int], n_new: int) -> int:
        """Context bucket for feeding `n_new` rows to the longest of `slots`. Raises: ShapeError."""
        longest = max(self._context_len[slot] for slot in slots) + n_new
        return self.shapes.fit(region, "kv", min(longest, self.llm_len))

    def decode(self, slots: Sequence[int], ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Feed one token to each slot. Returns: hidden states and logits, [len(slots), D] and [len(slots), V]."""
        self.check_slots(slots, ids)
        for slot in slots:
            self.check_room(slot, 1)
        _, *inputs = self.batch("llm_decode", slots, (ids, 0), ([True] * len(slots), False))
        hidden, logits = self.regions("llm_decode", *inputs, kv_len=self.kv_len("llm_decode", slots, 1))
        self.add_context_len(slots, 1)
        return hidden[: len(slots)], logits[: len(slots)]

    def sample(self, slots: Sequence[int], logits: Tensor) -> Sampled:
        """Choose one token per slot from its logits [len(slots), V]; tensors, no sync."""
        self.check_slots(slots, logits)
        size, slot_ids, active = self.batch("sample_text", slots, ([True] * len(slots), False))
        padded = torch.nn.functional.pad(logits, (0, 0, 0, size - len(slots)))
        chosen = self.regions("sample_text", slot_ids, padded, active, candidates=None)
        return Sampled(*(tensor[: len(slots)] for tensor in chosen))

    def evict(self, slots: Sequence[int], keep: Sequence[int], drop: Sequence[int], *, turn: bool = True) -> None:
        """Drop context rows [keep, keep + drop) of each slot and close the gap. turn: as `regions.llm_evict`.

        Raises: ContextOverflowError if a slot does not hold them, before anything is moved.
        """
        self.check_slots(slots, keep, drop)
        for slot, first, count in zip(slots, keep, drop, strict=True):
            check_span(f"evict from slot {slot}", self._context_len[slot], first, count)
        _, *inputs = self.batch("llm_evict", slots, (keep, 0), (drop, 0))
        self.regions("llm_evict", *inputs, turn=turn)
        for slot, count in zip(slots, drop, strict=True):
            self._context_len[slot] -= count
