"""Turn-based answers: text chunks in, batches of codes out, across the chunks of one turn.

Knows what may stay in the code model's cache between two text chunks. Does not know text nor sound.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from models.checkpoint.config import AttentionType
from models.errors import NumericsError, SettingsError
from models.sampling.settings import check_number
from models.stages.speech_steps import SPEECH_TOKENS_PER_SECOND, Speaker

STREAM_MAX_SPEECH_TOKENS = 500


@dataclass
class SpeechStream:
    """Text chunks in, batches of codes out, for one slot and one turn.

    Whoever draws codes side by side for many slots calls `make_room` before a chunk's call and `close` after it, and
    `batches` where codes leave in batches; `push` is all of that for one slot.

    attention_type, window: default as the checkpoint says. What stands between two text chunks follows the type:
        full_attention     nothing; where no room is left the older half goes, but in "reference" the chunk is refused
        sliding_window     only the newest `window` rows stay visible
        sliding_recompute  the last chunk is fed again from position 0
        reindex            the first and last chunk stay and close up; the last one's keys are turned to their new
                           positions, unless compat is "reference": the public code leaves them as they are
    """

    speaker: Speaker
    slot: int
    attention_type: AttentionType | None = None
    window: int | None = None
    max_speech_tokens: int = STREAM_MAX_SPEECH_TOKENS
    batch: int = SPEECH_TOKENS_PER_SECOND
    compat: Literal["reference", "fixed"] = "fixed"
    buffer: list[int] = field(default_factory=list)
    _chunks: list[int] = field(default_factory=list)  # rows each text chunk left in the cache
    _last: tuple[Tensor, list[int]] | None = None
    _chunk: tuple[Tensor, int] | None = None  # the chunk being spoken and the rows held before it
    _failed: bool = False

    def __post_init__(self) -> None:
        self.speaker.runner.check_slots([self.slot])
        config = self.speaker.runner.model.config.tts_config
        self.attention_type = self.attention_type or config.attention_type
        self.window = config.streaming_sliding_window_audio_window_size if self.window is None else self.window
        for name, value, allowed in (
            ("attention_type", self.attention_type, get_args(AttentionType)),
            ("compat", self.compat, ("reference", "fixed")),
        ):
            if value not in allowed:
                raise SettingsError(name, expected=f"one of {', '.join(allowed)}", got=value)
        for name in ("window", "max_speech_tokens", "batch"):
            check_number(name, getattr(self, name), at_least=1, whole=True)

    def push(self, rows: Tensor, final: bool) -> list[list[int]]:
        """Speak one text chunk. rows: [n, D] conditioning rows.

        Returns: full batches; with `final`, if the speech ended, also the rest, be it empty.
        Raises: as `Speaker.one`; what is refused before a code is drawn leaves the turn as it was.
        """
        fed = self.make_room(rows)
        (call,) = self.speaker.call(
            [self.slot], [fed], min_speech_tokens=[0], max_speech_tokens=[self.max_speech_tokens]
        )
        if call.bad:
            self._failed = True
            raise NumericsError(f"speech of slot {self.slot}", expected="finite logits", got="NaN or infinity")
        self.close(call.speech_tokens, call.ended)
        return self.batches(call.speech_tokens, final and call.ended)

    def make_room(self, rows: Tensor) -> Tensor:
        """Prepare the slot for one text chunk's call, which the caller makes. Returns: the rows that call must feed.

        Raises: as `push`.
        """
        self.speaker.check_rows(self.slot, rows)
        if self._failed:
            raise NumericsError(f"speech of slot {self.slot}", expected="a new turn", got="more of one that failed")
        fed = self._between_chunks(rows)
        self._chunk = rows, self.speaker.rows(self.slot)
        return fed

    def close(self, speech_tokens: list[int], ended: bool) -> None:
        """The call that `make_room` prepared is over and has drawn `speech_tokens`; ended: by its end code."""
        rows, before = self._chunk
        if not ended:
            # The last code was never fed, yet counts as spoken: the next chunk leaves a gap of one position.
            self.speaker.join()
            self.speaker.state.cache.positions[self.slot] += 1
        self._chunks.append(self.speaker.rows(self.slot) - before)
        self._last = (rows, speech_tokens)

    def batches(self, speech_tokens: list[int], last: bool) -> list[list[int]]:
        """Full batches that `speech_tokens` complete; with `last` also the rest, be it empty."""
        self.buffer += speech_tokens
        full = len(self.buffer) // self.batch * self.batch
        batches = [self.buffer[i : i + self.batch] for i in range(0, full, self.batch)]
        self.buffer = self.buffer[full:]
        return [*batches, self.flush()] if last else batches

    def flush(self) -> list[int]:
        """What is left when the text ended without an end code."""
        rest, self.buffer = self.buffer, []
        return rest

    def _between_chunks(self, rows: Tensor) -> Tensor:
        """Make room as the attention type says, once it is sure that the chunk fits. Returns: the rows to feed."""
        speaker, slot, held = self.speaker, self.slot, self.speaker.rows(self.slot)
        fed, keep, drop = rows, 0, 0
        if self._last is not None and self.attention_type == "sliding_recompute":
            previous, speech_tokens = self._last
            fed, drop = torch.cat((previous, speaker.code_rows(speech_tokens), rows)), held
        elif self.attention_type == "reindex":
            keep, drop = sum(self._chunks[:1]), sum(self._chunks[1:-1])
        elif self.attention_type == "sliding_window":
            drop = max(0, held - self.window)
        elif self.compat == "fixed" and held + len(rows) + self.max_speech_tokens - 1 > speaker.state.cache.max_len:
            drop = held - held // 2
        speaker.check(slot, len(fed), self.max_speech_tokens, held=held - drop)
        cache = speaker.state.cache
        if self.attention_type == "sliding_recompute":
            speaker.empty_cache(slot)
        elif self.attention_type == "sliding_window":
            # Rows out of sight make room; what is left keeps its positions.
            speaker.join()
            cache.windows[slot] = self.window
            speaker.drop_rows(slot, 0, drop, turn=False)
            cache.positions[slot] += drop
        elif drop:
            speaker.drop_rows(slot, keep, drop, turn=self.compat == "fixed")
            self._chunks = [self._chunks[0], self._chunks[-1]]
        return fed
