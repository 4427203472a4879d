"""Host side of the regions: pads requests into buckets, counts the context rows of each slot, calls the table.

Contains slots, lengths and shapes. Does not contain messages, turns or sockets. All checks come before the first
change to a slot, so a refused call leaves every slot as it was.
"""

from collections.abc import Sequence, Sized
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.errors import AudioError, ContextOverflowError, SettingsError, SlotError
from models.graphs.compiler import force_eager
from models.graphs.input_block import Array, Input, padded_array
from models.graphs.streams import SideStream, tensor_to_device
from models.inputs.audio import LogMel, conv_length, frame_count, split_clip, token_count
from models.inputs.image import ImagePatches, pad_batch
from models.layers.apm import UNIT_ROWS
from models.layers.kv_pages import PageSizes
from models.omni import OmniModel
from models.sampling.settings import TextSampling
from models.sampling.text import TokenSets
from models.stages import regions
from models.stages.region_table import Regions, Shapes
from models.stages.state import SlotPool, SlotState

Column = tuple[Sequence[int] | Sequence[bool], int | bool]  # values, and the padding value


@dataclass(frozen=True)
class Rows:
    """A span of context to prefill: token ids, replaced by media rows where `is_row` is true.

    Args:
        ids: [n] int64 on the host, where the spans of several slots are combined and sent in one copy.
        media: [sum of is_row, D] the media rows in order, on the model's device; None without media.
        is_row: [n] bool on the host; None without media.
    """

    ids: Tensor
    media: Tensor | None = None
    is_row: Tensor | None = None

    @classmethod
    def mixed(cls, ids: Sequence[int], media: Sequence[tuple[int, Tensor]]) -> "Rows":
        """Ids with media rows in their places.

        Args:
            ids: any number at the places of media rows.
            media: first place and rows [n, D], n >= 1, of each span of media, in any order.
        """
        is_row = np.zeros(len(ids), np.bool_)
        for start, rows in media:
            is_row[start : start + len(rows)] = True
        table = torch.from_numpy(np.array(ids, np.int64))
        if not media:
            return cls(table)
        in_order = [rows for _, rows in sorted(media, key=lambda span: span[0])]
        return cls(table, torch.cat(in_order), torch.from_numpy(is_row))

    @classmethod
    def joined(cls, spans: Sequence["Rows"]) -> "Rows":
        """One or more spans after each other."""
        ids = torch.cat([span.ids for span in spans])
        media = [span.media for span in spans if span.media is not None]
        if not media:
            return cls(ids)
        marks = [torch.zeros(len(one), dtype=torch.bool) if one.is_row is None else one.is_row for one in spans]
        return cls(ids, torch.cat(media), torch.cat(marks))

    def __len__(self) -> int:
        return self.ids.shape[0]

    def cut(self, start: int, end: int) -> "Rows":
        """Rows [start, end) with their media; `end` may lie beyond the last row."""
        if start <= 0 and end >= len(self):
            return self
        if self.media is None or self.is_row is None:
            return Rows(self.ids[start:end])
        first, last = (int(self.is_row[:at].sum()) for at in (start, end))
        if first == last:
            return Rows(self.ids[start:end])
        return Rows(self.ids[start:end], self.media[first:last], self.is_row[start:end])


def check_span(what: str, held: int, first: int, count: int) -> None:
    """Raises: ContextOverflowError unless rows [first, first + count) are among rows [0, held)."""
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
        early_slices: int = 0,
        llm_pages: PageSizes | None = None,
        speech_pages: PageSizes | None = None,
    ):
        """Allocate the slots and make the table of regions.

        Args:
            llm_len, tts_len: context rows per slot of the language model and of the speech model.
            shared_scratch, early_slices, llm_pages, speech_pages: as in `SlotState.allocate`.
        Raises: ContextOverflowError if `llm_len` exceeds the model's positions.
        """
        tts_len = tts_len or model.config.tts_config.max_position_embeddings
        if llm_len > model.config.max_position_embeddings:
            raise ContextOverflowError(
                "llm_len", expected=f"at most {model.config.max_position_embeddings}", got=llm_len
            )
        self.model, self.llm_len, self._tts_len, self.sets = model, llm_len, tts_len, sets
        self.state = SlotState.allocate(
            model,
            n_slots=n_slots,
            llm_len=llm_len,
            tts_len=tts_len,
            shared_scratch=shared_scratch,
            early_slices=early_slices,
            llm_pages=llm_pages,
            speech_pages=speech_pages,
        )
        self.early_stream = SideStream(model.device)  # of `EarlyImages`
        self.log_mel = LogMel(model.device, model.config.audio_config.num_mel_bins)
        self.use_shapes(shapes or Shapes())
        self.pool = SlotPool(self.state)
        # Host copy of the cache's lengths: choosing a bucket needs no device synchronization.
        self._context_len = [0] * n_slots

    def use_shapes(self, shapes: Shapes) -> None:
        """Change the bucket sizes of later calls. Slots keep their content.

        `regions` becomes a new table without compiled or captured regions.
        """
        # A call may read more rows than a slot holds, but not more than it has.
        self.shapes = shapes.capped(kv=self.llm_len, speech_kv=self._tts_len)
        self.regions = Regions(self.model, self.state, self.log_mel, self.sets, self.shapes)

    def check_text(self, sampling: TextSampling, seed: int | None) -> None:
        """Raises: SettingsError if `configure_text` would."""
        n_sets = len(self.sets.pad_id)
        if sampling.set_index >= n_sets:
            raise SettingsError("setting set_index", expected=f"below {n_sets}", got=sampling.set_index)
        self.state.text.check(sampling, seed)

    def configure_text(self, slot: int, sampling: TextSampling, seed: int | None = None) -> None:
        """Set how the slot's text tokens are chosen. Raises: SlotError or SettingsError, with nothing changed."""
        self.check_slots([slot])
        self.check_text(sampling, seed)
        self.state.text.configure(slot, sampling, seed)

    def context_len(self, slot: int) -> int:
        """Number of context rows in the slot."""
        return self._context_len[slot]

    def set_context_len(self, slot: int, n_rows: int) -> None:
        """Record the slot's number of context rows after a change that did not go through this class."""
        self._context_len[slot] = n_rows

    def add_context_len(self, slots: Sequence[int], n_rows: int) -> None:
        """Record that `n_rows` were appended to each of `slots`."""
        for slot in slots:
            self._context_len[slot] += n_rows

    def tensor(self, values: Sequence[int] | Sequence[bool], size: int, fill: int | bool) -> Tensor:
        """A short host list as a device tensor of `size`, padded with `fill`."""
        return tensor_to_device(self.model.device, torch.from_numpy(padded_array(values, size, fill)))

    def check_slots(self, slots: Sequence[int], *others: Sized) -> None:
        """Raises: SlotError unless `slots` are one or more different slots and each of `others` has as many entries."""
        n_slots = self.state.n_slots
        if not slots or len(set(slots)) != len(slots) or min(slots) < 0 or max(slots) >= n_slots:
            raise SlotError("slots of one call", expected=f"different numbers from 0 to {n_slots - 1}", got=list(slots))
        for other in others:
            if len(other) != len(slots):
                raise SlotError("slots of one call", expected=f"{len(slots)} entries", got=len(other))

    def batch(self, region: str, slots: Sequence[int], *others: Column) -> tuple[int, Array, list[Array]]:
        """Pad one-number-per-slot inputs of a region to its batch bucket.

        Args:
            others: lists with an entry for each slot, and their padding values.
        Returns: the batch bucket, the padded slots, and an array for each of `others`.
        Raises: ShapeError for more slots than the largest bucket holds.
        """
        size = self.shapes.fit(region, "batch", len(slots))
        slot_ids = padded_array(slots, size, self.state.scratch)
        return size, slot_ids, [padded_array(values, size, fill) for values, fill in others]

    def capacity(self, slot: int) -> int:
        """Context rows that the slot holds at most: `llm_len`, or the rows that it has of a shared pool."""
        return self.state.llm.pages.capacity(slot)

    def check_room(self, slot: int, n_rows: int) -> None:
        """Raises: ContextOverflowError if `n_rows` more rows do not fit into the slot's context."""
        total, most = self._context_len[slot] + n_rows, self.capacity(slot)
        if total > most:
            raise ContextOverflowError(f"context of slot {slot}", expected=f"at most {most} rows", got=f"{total} rows")

    # --- media ---------------------------------------------------------------------------------

    def encode_images(self, images: Sequence[ImagePatches]) -> list[Tensor]:
        """Each slice's LLM rows [query_num, D], in order."""
        rows: list[Tensor] = []
        while len(rows) < len(images):
            out = self.encode_slices(images[len(rows) : len(rows) + self.shapes.slices[-1]])
            rows += out.clone().unbind()
        return rows

    def encode_slices(self, images: Sequence[ImagePatches]) -> Tensor:
        """LLM rows [n, query_num, D] of the first slices, as many as one call takes; valid until the next call.

        Args:
            images: one or more slices, at most the largest size of `Shapes.slices`.
        """
        self.early_stream.join()  # a graph must not run twice at the same time
        length = self.shapes.fit("vision", "patches", max(len(image.pixels) for image in images))
        group = images[: self.shapes.parts("slices", len(images), self.shapes.max_slices(length))[0]]
        batch = pad_batch(group, length, self.shapes.fit("vision", "slices", len(group)))
        out = self.regions.run(regions.vision, batch.pixels, batch.position_ids, batch.coords, batch.mask)
        return out[: len(group)]

    def encode_clips(
        self, waves: Sequence[Tensor], *, chunk_length: float, batch_padding: bool = False
    ) -> list[Tensor]:
        """Each clip's LLM rows [n, D]; clips above 30 s are encoded in pieces of 30 s.

        Args:
            waves: [n] float32 at 16 kHz each, validated.
            chunk_length: length in seconds of the chunks that limit a row's lookahead; <= 0: the whole clip.
            batch_padding: shorter clips attend to the zeros that pad them to the longest one, as in the public
                implementation, which encodes clips together. Off: a clip's rows do not depend on other clips.
        """
        # Uncompiled: compiled layers would compile again for each length while the server serves.
        with force_eager():
            return self._encode_clips(waves, chunk_length, batch_padding)

    def _encode_clips(self, waves: Sequence[Tensor], chunk_length: float, batch_padding: bool) -> list[Tensor]:
        pieces = [(owner, piece) for owner, wave in enumerate(waves) for piece in split_clip(wave)]
        longest = max((frame_count(piece.shape[0]) for _, piece in pieces), default=0)
        max_rows = self.model.config.audio_config.max_source_positions
        if conv_length(longest) > max_rows:
            raise AudioError("clip", expected=f"at most {max_rows} encoder rows", got=conv_length(longest))
        rows: list[list[Tensor]] = [[] for _ in waves]
        n_max = self.shapes.batch[-1]
        for start in range(0, len(pieces), n_max):
            group = pieces[start : start + n_max]
            frames = [frame_count(piece.shape[0]) for _, piece in group]
            seen = [longest] * len(group) if batch_padding else frames
            n_keys = [min(n, conv_length(longest)) if batch_padding else conv_length(n) for n in frames]
            size = self.shapes.fit("clips", "batch", len(group))
            bucket = self.shapes.fit("clips", "clip_frames", max(seen))
            chunk = int(chunk_length * UNIT_ROWS) if chunk_length > 0 else 0
            out = self.regions.run(
                regions.clips,
                self._clip_mel([piece for _, piece in group], size, bucket),
                padded_array(seen, size, 0),
                padded_array(n_keys, size, 0),
                chunk=chunk,
            )
            for (owner, _), n_frames, encoded in zip(group, frames, out, strict=False):
                rows[owner].append(encoded[: token_count(n_frames)].clone())
        return [torch.cat(parts) for parts in rows]

    def _clip_mel(self, waves: Sequence[Tensor], size: int, bucket: int) -> Tensor:
        """[size, bins, bucket] log-mel, zero after each clip's frames."""
        mel = torch.zeros(size, self.model.config.audio_config.num_mel_bins, bucket, device=self.model.device)
        for row, wave in enumerate(waves):
            n_frames = frame_count(wave.shape[0])
            samples = wave.to(self.model.device)[None]
            mel[row, :, :n_frames] = self.log_mel.log_mel(samples, self.tensor([wave.shape[0]], 1, 0))[0, :, :n_frames]
        return mel

    # --- text ----------------------------------------------------------------------------------

    def prefill_inputs(
        self, region: str, slots: Sequence[int], pieces: Sequence[Rows], *others: Column
    ) -> tuple[tuple[Input, ...], int]:
        """Padded inputs of a prefill region: slots, ids, media, is_row, n_new and `others` as in `batch`; and the kv
        bucket. Media rows are uninitialized where `is_row` is false.
        """
        model, n_rows = self.model, self.shapes.fit(region, "rows", max(map(len, pieces)))
        size, slot_ids, (n_new, *more) = self.batch(region, slots, ([len(piece) for piece in pieces], 0), *others)
        ids, is_row = np.zeros((size, n_rows), np.int64), np.zeros((size, n_rows), np.bool_)
        for row, piece in enumerate(pieces):
            ids[row, : len(piece)] = piece.ids.numpy()
            if piece.is_row is not None:
                is_row[row, : len(piece)] = piece.is_row.numpy()
        media = torch.empty(size * n_rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
        if own := [piece.media for piece in pieces if piece.media is not None]:
            # One copy for all slots: a copy per slot would take most of this function's host time.
            places = tensor_to_device(model.device, torch.from_numpy(np.flatnonzero(is_row)))
            media.index_copy_(0, places, (torch.cat(own) if len(own) > 1 else own[0]).to(model.dtype))
        media = media.view(size, n_rows, -1)
        return (slot_ids, ids, media, is_row, n_new, *more), self.kv_len(region, slots, n_rows)

    def kv_len(self, region: str, slots: Sequence[int], n_new: int) -> int:
        """KV bucket for appending `n_new` rows to the longest of `slots`. Raises: ShapeError."""
        longest = max(self._context_len[slot] for slot in slots) + n_new
        return self.shapes.fit(region, "kv", min(longest, self.llm_len))

    def evict(self, slots: Sequence[int], keep: Sequence[int], drop: Sequence[int], *, rotates: bool = True) -> None:
        """Drop context rows [keep, keep + drop) of each slot and close the gap. rotates: as in `regions.llm_evict`.

        Raises: ContextOverflowError if a slot does not hold these rows, before any change.
        """
        self.check_slots(slots, keep, drop)
        for slot, first, count in zip(slots, keep, drop, strict=True):
            check_span(f"evict from slot {slot}", self._context_len[slot], first, count)
        _, slot_ids, spans = self.batch("llm_evict", slots, (keep, 0), (drop, 0))
        self.regions.run(regions.llm_evict, slot_ids, *spans, rotates=rotates)
        for slot, count in zip(slots, drop, strict=True):
            self._context_len[slot] -= count
