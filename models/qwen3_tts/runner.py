"""Host side of the language models: leases of slots, buckets, prompts in parts, frames of many slots at once.

Reads nothing from the device: the host counts the rows that a slot may have. Does not contain when frames run, or what
their outcomes mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from models.errors import ContextOverflowError, SlotError
from models.graphs.input_block import padded_array
from models.qwen3_tts import regions
from models.qwen3_tts.model import Qwen3TTS
from models.qwen3_tts.prompt import NONE, Array, SpeechPrompt
from models.qwen3_tts.region_table import CANDIDATES, TalkerRegions, TalkerShapes
from models.qwen3_tts.settings import CodeSampling, FrameSampling
from models.qwen3_tts.state import GROUPS, TEXT_RING, TalkerState


@dataclass
class _OpenSlot:
    """What the host knows of a slot."""

    rows: int  # of its cache, at most
    frames: int  # asked for
    text: int  # text tokens written, exactly
    sorts_all: bool  # its settings need all codes sorted


class TalkerRunner:
    """Slots of one model's language models.

    Frames of any slots run together. A slot that waits, or is over, costs nothing but its row of the batch.
    """

    def __init__(self, model: Qwen3TTS, *, n_slots: int, max_len: int = 2048, shapes: TalkerShapes | None = None):
        """
        Args:
            n_slots: requests at a time.
            max_len: rows of a slot: its prompt and its frames.
        """
        shapes = shapes or TalkerShapes()
        batch, rows, kv = n_slots, min(max_len, shapes.rows[-1]), max_len
        self.shapes = shapes.capped(batch=batch, rows=rows, kv=kv)
        self.model, self.n_slots, self.max_len = model, n_slots, max_len
        self.state = TalkerState.allocate(model.talker, n_slots, max_len)
        self.table = TalkerRegions(model, self.state, self.shapes)
        self._open: dict[int, _OpenSlot] = {}

    @property
    def free_slots(self) -> list[int]:
        """Slots without a request."""
        return [slot for slot in range(self.n_slots) if slot not in self._open]

    def open(self, slot: int, sampling: FrameSampling, *, seed: int, max_frames: int) -> None:
        """Give a free slot to a request; feed its prompt next.

        Raises: SlotError if the slot is not free, SettingsError for a seed out of range.
        """
        if slot in self._open or not 0 <= slot < self.n_slots:
            raise SlotError(f"slot {slot}", expected=f"one of the free slots {self.free_slots}", got="another")
        self.table.run(regions.reset, self._slots([slot], 1))
        self.state.configure(slot, sampling, seed, max_frames)
        sorts_all = any(_sorts_all(codes) for codes in (sampling.first, sampling.rest))
        self._open[slot] = _OpenSlot(rows=0, frames=0, text=0, sorts_all=sorts_all)

    def close(self, slot: int) -> None:
        """Free a slot. Frames in flight keep their outputs."""
        del self._open[slot]

    def feed(self, prompts: dict[int, SpeechPrompt]) -> None:
        """Feed the prompts of open slots, together, in parts if they are long; afterwards they draw frames.

        Raises: ContextOverflowError if a prompt does not fit its slot with a frame; nothing is fed then.
        """
        for prompt in prompts.values():
            if len(prompt) >= self.max_len:
                raise ContextOverflowError("prompt", expected=f"fewer than {self.max_len} rows", got=len(prompt))
        widest = max(len(prompt) for prompt in prompts.values())
        rows = min(self.shapes.rows[-1], widest)
        most = self.shapes.max_prefill_batch(self.shapes.fit("feed_prompt", "rows", rows))
        slots = list(prompts)
        for first in range(0, len(slots), most):
            some = slots[first : first + most]
            for start in range(0, max(len(prompts[slot]) for slot in some), rows):
                self._feed_part(some, [prompts[slot] for slot in some], start, rows)
        for slot, prompt in prompts.items():
            self._open[slot].rows = len(prompt)
            self.append_text(slot, prompt.trailing, is_open=prompt.is_open)
        n = self.shapes.fit("start", "batch", len(slots))
        self.table.run(regions.start, self._slots(slots, n), padded_array([True] * len(slots), n, False))

    def frames_that_fit(self, prompt: SpeechPrompt) -> int:
        """Frames that a slot has rows for after this prompt; the last one is not fed."""
        return self.max_len - len(prompt) + 1

    def text_room(self, slot: int, *, n_read: int = 0) -> int:
        """Text tokens that `append_text` takes now. n_read: as there."""
        n_text = self._open[slot].text
        return TEXT_RING - (n_text - min(n_read, n_text))

    def append_text(self, slot: int, ids: Sequence[int], *, is_open: bool, n_read: int = 0) -> None:
        """Append text tokens to a slot.

        Args:
            is_open: more text follows; without it, padding is fed after these tokens.
            n_read: tokens of the slot that its frames have read, as far as the caller knows: drawn frames less one.
        Raises: ContextOverflowError if they do not fit the ring; nothing is appended then.
        """
        known, free = self._open[slot], self.text_room(slot, n_read=n_read)
        if len(ids) > free:
            raise ContextOverflowError(
                "text that waits for its frames", expected=f"at most {free} tokens", got=len(ids)
            )
        known.text += len(ids)
        widest = self.shapes.text[-1]
        for start in range(0, max(1, len(ids)), widest):
            part = list(ids[start : start + widest])
            n = self.shapes.fit("append_text", "text", max(1, len(part)))
            remains = start + widest < len(ids)
            batch = self.shapes.batch[0]
            self.table.run(
                regions.append_text,
                self._slots([slot], batch),
                np.stack([padded_array(part, n, 0)] * batch),
                padded_array([len(part)], batch, 0),
                padded_array([is_open or remains], batch, False),
            )

    def frame(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The next frame of open slots, none of which is known to be over.

        Returns: codes [B, 16] int64 and outcomes [B] int64 on the device; B is a bucket's size, rows beyond `slots`
            are padding. With captured graphs, the next frame overwrites both.
        Raises: ContextOverflowError if a slot has no row left.
        """
        known = [self._open[slot] for slot in slots]
        n = self.shapes.fit("frame", "batch", len(slots))
        candidates = None if any(one.sorts_all for one in known) else CANDIDATES
        is_first = all(one.frames == 0 for one in known)
        if is_first:
            result = self.table.run(regions.first_frame, self._slots(slots, n), candidates=candidates)
        else:
            longest = max(one.rows + (one.frames > 0) for one in known)
            if longest > self.max_len:
                raise ContextOverflowError("rows of a slot", expected=f"at most {self.max_len}", got=longest)
            kv_len = self.shapes.fit("frame", "kv", longest)
            result = self.table.run(regions.frame, self._slots(slots, n), kv_len=kv_len, candidates=candidates)
        for one in known:
            one.rows += one.frames > 0
            one.frames += 1
        return result

    def limit(self, slot: int, max_frames: int) -> None:
        """Set the number of frames after which a slot that is not over ends."""
        self.state.limit[slot] = max_frames

    def take_back(self, slot: int) -> None:
        """Note that a frame asked for had the outcome WAITED, so that it took no row of the slot."""
        self._open[slot].rows -= 1

    def _feed_part(self, slots: list[int], prompts: list[SpeechPrompt], start: int, rows: int) -> None:
        """Feed rows [start, start + rows) of prompts."""
        width = self.model.config.talker_config.hidden_size
        sizes = [min(max(len(prompt) - start, 0), rows) for prompt in prompts]
        n = self.shapes.fit("feed_prompt", "batch", len(slots))
        n_rows = self.shapes.fit("feed_prompt", "rows", max(sizes))
        text: Array = np.full((n, n_rows), NONE, np.int64)
        codes: Array = np.full((n, n_rows, GROUPS), NONE, np.int64)
        speakers: Array = np.zeros((n, width), np.float32)
        speaker_row: Array = np.full(n, NONE, np.int64)
        for row, (prompt, size) in enumerate(zip(prompts, sizes, strict=True)):
            text[row, :size] = prompt.text[start : start + size]
            codes[row, :size] = prompt.codes[start : start + size]
            if prompt.speaker is not None and 0 <= prompt.speaker_row - start < size:
                speakers[row], speaker_row[row] = prompt.speaker, prompt.speaker_row - start
        kv_len = self.shapes.fit("feed_prompt", "kv", max(n_rows, start + max(sizes)))
        n_new = padded_array(sizes, n, 0)
        self.table.run(
            regions.feed_prompt, self._slots(slots, n), text, codes, speakers, speaker_row, n_new, kv_len=kv_len
        )

    def _slots(self, slots: Sequence[int], n: int) -> Array:
        return padded_array(list(slots), n, self.state.scratch)


def _sorts_all(codes: CodeSampling) -> bool:
    """Whether a draw needs more than the best CANDIDATES codes. Ties at the last kept rank are cut at CANDIDATES."""
    return not codes.greedy and not 0 < codes.top_k < CANDIDATES
