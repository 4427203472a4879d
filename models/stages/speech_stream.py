"""Speech of a turn-based answer: keeps the speech model's cache within bounds across the text chunks of one turn.

Contains what stays in the cache between two text chunks. Does not contain text or sound, and draws no tokens itself.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from models.checkpoint.config import AttentionType
from models.errors import SettingsError
from models.sampling.settings import check_number
from models.stages.speech_steps import Speaker

STREAM_MAX_SPEECH_TOKENS = 500
Compat = Literal["reference", "fixed"]


@dataclass(frozen=True)
class _Chunk:
    """A text chunk in progress. held: cache rows before it."""

    rows: Tensor
    held: int


class SpeechStream:
    """The cache of one slot during one turn.

    The caller draws the tokens: it calls `make_room` before the speech call of a text chunk and `close` after it.

    Args:
        attention_type: what stays in the cache between two text chunks; default the checkpoint's.
            full_attention     everything; without room for the next chunk, in the cache or in a shared pool, the older
                               half is dropped, but in "reference" the chunk is refused
            sliding_window     the newest `window` rows
            sliding_recompute  nothing; the last chunk is fed again from position 0
            reindex            the first and last chunk, moved together; the last one's keys are rotated to their new
                               positions, unless compat is "reference": the public code does not rotate them
        window: rows; default the checkpoint's.
        max_speech_tokens: of one text chunk.
    Raises: SlotError, SettingsError.
    """

    def __init__(
        self,
        speaker: Speaker,
        slot: int,
        attention_type: AttentionType | None = None,
        window: int | None = None,
        max_speech_tokens: int = STREAM_MAX_SPEECH_TOKENS,
        compat: Compat = "fixed",
    ):
        speaker.check_slot(slot)
        config = speaker.config
        self.speaker, self.slot, self.max_speech_tokens, self.compat = speaker, slot, max_speech_tokens, compat
        self.attention_type: AttentionType = attention_type or config.attention_type
        self.window: int = config.streaming_sliding_window_audio_window_size if window is None else window
        for name, value, allowed in (
            ("attention_type", self.attention_type, get_args(AttentionType)),
            ("compat", self.compat, get_args(Compat)),
        ):
            if value not in allowed:
                raise SettingsError(name, expected=f"one of {', '.join(allowed)}", got=value)
        for name, number in (("window", self.window), ("max_speech_tokens", max_speech_tokens)):
            check_number(name, number, at_least=1, whole=True)
        self._chunks: list[int] = []  # cache rows of each finished text chunk
        self._last: tuple[Tensor, list[int]] | None = None  # conditioning rows and speech tokens of the last chunk
        self._chunk: _Chunk | None = None  # the chunk in progress

    def make_room(self, rows: Tensor) -> Tensor:
        """Prepare the slot for the call of one text chunk.

        Args:
            rows: [n, D] conditioning rows of the chunk.
        Returns: the rows [m, D] to feed, m >= n. The slot has the pages that they and the tokens of the call need.
        Raises: ShapeError; as `Speaker.check`, with nothing changed.
        """
        self.speaker.check_rows(self.slot, rows)
        fed = self._between_chunks(rows)
        self._chunk = _Chunk(rows, self.speaker.rows(self.slot))
        return fed

    def close(self, speech_tokens: list[int], ended: bool) -> None:
        """Record the end of the call that `make_room` prepared.

        Args:
            speech_tokens: all ordinary tokens of the call.
            ended: the call drew its end token.
        """
        assert self._chunk is not None, "`make_room` comes before `close`"
        if not ended:
            # The last token is not in the cache, but counts as spoken: the next chunk leaves a gap of one position.
            self.speaker.join()
            self.speaker.state.cache.positions[self.slot] += 1
        self._chunks.append(self.speaker.rows(self.slot) - self._chunk.held)
        self._last = (self._chunk.rows, speech_tokens)

    def _between_chunks(self, rows: Tensor) -> Tensor:
        """Check that the chunk fits, then drop rows by the attention type. Returns: the rows to feed."""
        speaker, slot, held = self.speaker, self.slot, self.speaker.rows(self.slot)
        fed, keep, drop = rows, 0, 0
        if self._last is not None and self.attention_type == "sliding_recompute":
            previous, speech_tokens = self._last
            fed, drop = torch.cat((previous, speaker.token_rows(speech_tokens), rows)), held
        elif self.attention_type == "reindex":
            keep, drop = sum(self._chunks[:1]), sum(self._chunks[1:-1])
        elif self.attention_type == "sliding_window":
            drop = max(0, held - self.window)
        elif self.compat == "fixed" and not speaker.has_room(slot, len(rows), self.max_speech_tokens):
            drop = held - held // 2
        speaker.check(slot, len(fed), self.max_speech_tokens, held=held - drop)
        cache = speaker.state.cache
        if self.attention_type == "sliding_recompute":
            speaker.empty_cache(slot)
        elif self.attention_type == "sliding_window":
            # Rows outside the window are dropped; the others keep their positions.
            speaker.join()
            cache.windows[slot] = self.window
            speaker.drop_rows(slot, 0, drop, rotates=False)
            cache.positions[slot] += drop
        elif drop:
            speaker.drop_rows(slot, keep, drop, rotates=self.compat == "fixed")
            self._chunks = [self._chunks[0], self._chunks[-1]]
        speaker.reserve(slot, len(fed), self.max_speech_tokens)
        return fed
