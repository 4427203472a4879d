"""Host side of speech: one call of the code loop, and how chat, half duplex and duplex make calls.

Knows rows, codes and lengths. Does not know text tokens (`TTS.condition` makes the rows) nor sound.

The three ways differ only in settings:
    chat         one call per answer, at least 50 and at most 2048 codes, the last code drawn is dropped
    half duplex  `CodeStream`: one call per text chunk, codes leave in batches of 25 across chunks
    duplex       `unit`: one call per second, at most 25 codes, the 26th is drawn and dropped
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from models.config import AttentionType
from models.errors import ContextOverflowError, NumericsError, SettingsError, ShapeError
from models.runner import Runner, check_stretch
from models.sampling_settings import CodeSampling, check_number
from models.speech import CODES_PER_CALL

CODES_PER_SECOND = 25
CHAT_MIN_CODES = 50
STREAM_MAX_CODES = 500


@dataclass(frozen=True)
class Call:
    """What one call drew for one slot.

    codes: ordinary codes in order. ended: it drew its end code after them. bad: its logits turned NaN or infinite
    after them, so the slot's turn is over.
    """

    codes: list[int]
    ended: bool
    bad: bool

    def without_last(self) -> "Call":
        """The same without the last ordinary code if the call ran into its limit: that code was never fed."""
        return self if self.ended or self.bad else replace(self, codes=self.codes[:-1])


class Speaker:
    """The code loop of a runner's slots."""

    def __init__(self, runner: Runner):
        if runner.state.speech is None:
            raise SettingsError("speech", expected="a checkpoint with tts", got="init_tts false")
        self.runner, self.state = runner, runner.state.speech

    def start_turn(self, slot: int, settings: CodeSampling, *, seed: int | None = None, eos: int | None = None) -> None:
        """A new turn: cache and recent codes empty. eos: end code, default the checkpoint's.

        Raises: SlotError or SettingsError, with nothing changed.
        """
        self.runner.check_slots([slot])
        eos = self.runner.model.config.tts_config.eos_code if eos is None else eos
        self.state.sampler.configure(slot, settings, eos, seed)
        self.empty_cache(slot)
        self.state.sampler.forget(self.runner.tensor([slot], 1, slot))

    def empty_cache(self, slot: int) -> None:
        """Forget what was spoken; settings, recent codes and random numbers stay."""
        self.state.cache.reset(self.runner.tensor([slot], 1, slot))
        self.runner.speech_rows[slot] = 0

    def drop_rows(self, slot: int, keep: int, drop: int, *, turn: bool) -> None:
        """Drop rows [keep, keep + drop) of the slot, closing the gap as `KVCache.evict` does.

        Raises: ContextOverflowError if the slot does not hold them.
        """
        check_stretch(f"speech of slot {slot}", self.rows(slot), keep, drop)
        one = (self.runner.tensor([value], 1, 0) for value in (slot, keep, drop))
        self.state.cache.evict(*one, self.runner.model.tts.model.frequencies, turn)
        self.runner.speech_rows[slot] -= drop

    def code_rows(self, codes: list[int]) -> Tensor:
        """The rows [n, D] that feeding these codes would feed."""
        return self.runner.model.tts.emb_code[0](self.runner.tensor(codes, len(codes), 0).long())

    def rows(self, slot: int) -> int:
        """Rows the slot's cache holds."""
        return self.runner.speech_rows[slot]

    def check_rows(self, slot: int, rows: Tensor) -> None:
        """Raises: ShapeError unless `rows` is one or more conditioning rows [n, D]."""
        width = self.runner.model.config.tts_config.hidden_size
        shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != width or len(rows) < 1:
            raise ShapeError(f"speech of slot {slot}", expected=f"conditioning rows [1 or more, {width}]", got=shape)

    def check(self, slot: int, n_rows: int, max_codes: int, held: int | None = None) -> None:
        """Raises: SettingsError, ShapeError or ContextOverflowError if a slot that holds `held` rows (default: what
        it holds now) cannot take `n_rows` more and draw `max_codes`.
        """
        check_number("max_codes", max_codes, at_least=1, at_most=CODES_PER_CALL, whole=True)
        self._token_bucket(n_rows)
        total = (self.rows(slot) if held is None else held) + n_rows + max_codes - 1
        if total > self.state.cache.max_len:
            raise ContextOverflowError(
                f"speech of slot {slot}", expected=f"at most {self.state.cache.max_len} rows", got=f"{total} rows"
            )

    def _token_bucket(self, n_rows: int) -> int:
        """Text tokens of the smallest bucket for `n_rows` conditioning rows, which hold two markers besides."""
        return self.runner.shapes.fit("speech_begin", "tokens", max(n_rows - 2, 1))

    def call(
        self, slots: Sequence[int], rows: Sequence[Tensor], *, min_codes: Sequence[int], max_codes: Sequence[int]
    ) -> list[Call]:
        """Feed conditioning rows [n, D] to each slot and draw codes until each ends or has max_codes.

        Raises: SlotError, or as `check`, before anything is fed; ShapeError for too many slots.
        """
        runner = self.runner
        runner.check_slots(slots, rows, min_codes, max_codes)
        for slot, own, most in zip(slots, rows, max_codes, strict=True):
            self.check_rows(slot, own)
            self.check(slot, len(own), most)
        size, slot_ids = runner.batch("speech_begin", slots)
        longest = max(map(len, rows))
        n_padded = self._token_bucket(longest) + 2
        padded = torch.zeros(size, n_padded, rows[0].shape[-1], dtype=runner.model.dtype, device=slot_ids.device)
        for row, own in enumerate(rows):
            padded[row, : len(own)] = own
        runner.regions(
            "speech_begin",
            slot_ids,
            padded,
            runner.tensor([len(own) for own in rows], size, 0),
            runner.tensor(min_codes, size, 0),
            runner.tensor(max_codes, size, 0),
            kv_len=self._kv_len("speech_begin", slots, n_padded),
        )
        for drawn in range(1, max(max_codes)):
            # One look from the host per second of speech: slots that are done stand still meanwhile.
            if drawn % CODES_PER_SECOND == 0 and bool(self.state.done[slot_ids].all()):
                break
            runner.regions("speech_step", slot_ids, kv_len=self._kv_len("speech_step", slots, longest + drawn))
        return self._collect(slots, slot_ids, rows)

    def _kv_len(self, region: str, slots: Sequence[int], n_new: int) -> int:
        held = max(map(self.rows, slots)) + n_new
        return self.runner.shapes.fit(region, "speech_kv", min(held, self.state.cache.max_len))

    def _collect(self, slots: Sequence[int], slot_ids: Tensor, rows: Sequence[Tensor]) -> list[Call]:
        n_drawn = self.state.sampler.step[slot_ids].tolist()
        drawn = self.state.codes[slot_ids, : max(n_drawn)].tolist()
        ends, bad = self.state.sampler.eos_id[slot_ids].tolist(), self.state.bad[slot_ids].tolist()
        calls = []
        for i, (slot, own) in enumerate(zip(slots, rows, strict=True)):
            codes = drawn[i][: n_drawn[i]]
            ended = bool(codes) and codes[-1] == ends[i]
            calls.append(Call(codes[: len(codes) - ended], ended, bad[i]))
            # The newest code is in the cache only if another draw, be it a bad one, was made after it.
            self.runner.speech_rows[slot] += len(own) + max(n_drawn[i] - 1 + bad[i], 0)
        return calls

    def one(self, slot: int, rows: Tensor, min_codes: int, max_codes: int) -> Call:
        """`call` for a single slot. Raises: NumericsError too."""
        (call,) = self.call([slot], [rows], min_codes=[min_codes], max_codes=[max_codes])
        if call.bad:
            raise NumericsError(f"speech of slot {slot}", expected="finite logits", got="NaN or infinity")
        return call

    def answer(
        self, slot: int, rows: Tensor, *, min_codes: int = CHAT_MIN_CODES, max_codes: int = CODES_PER_CALL
    ) -> list[int]:
        """Chat: the codes of one whole answer, at most max_codes - 1. Raises: as `one`."""
        return self.one(slot, rows, min_codes, max_codes).without_last().codes

    def unit(self, slots: Sequence[int], rows: Sequence[Tensor], may_end: Sequence[bool]) -> list[Call]:
        """Duplex: up to 25 codes for each slot's second; fewer only where the turn `may_end` (first or last unit).

        A slot whose call is bad does not keep the others from their codes.
        """
        most = CODES_PER_SECOND + 1
        min_codes = [0 if free else most for free in may_end]
        calls = self.call(slots, rows, min_codes=min_codes, max_codes=[most] * len(slots))
        return [call.without_last() for call in calls]


@dataclass
class CodeStream:
    """Half duplex: text chunks in, batches of codes out, for one slot and one turn.

    attention_type, window: default as the checkpoint says. What stands between two text chunks follows the type:
        full_attention     nothing
        sliding_window     only the newest `window` rows stay visible
        sliding_recompute  the last chunk is fed again from position 0
        reindex            the first and last chunk stay and close up; the last one's keys are turned to their new
                           positions, unless compat is "reference": the public code leaves them as they are
    """

    speaker: Speaker
    slot: int
    attention_type: AttentionType | None = None
    window: int | None = None
    max_codes: int = STREAM_MAX_CODES
    batch: int = CODES_PER_SECOND
    compat: Literal["reference", "fixed"] = "fixed"
    buffer: list[int] = field(default_factory=list)
    _chunks: list[int] = field(default_factory=list)  # rows each text chunk left in the cache
    _last: tuple[Tensor, list[int]] | None = None
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
        for name in ("window", "max_codes", "batch"):
            check_number(name, getattr(self, name), at_least=1, whole=True)

    def push(self, rows: Tensor, final: bool) -> list[list[int]]:
        """Speak one text chunk. rows: [n, D] conditioning rows.

        Returns: full batches; with `final`, if the speech ended, also the rest, be it empty.
        Raises: as `Speaker.one`; what is refused before a code is drawn leaves the turn as it was.
        """
        self.speaker.check_rows(self.slot, rows)
        if self._failed:
            raise NumericsError(f"speech of slot {self.slot}", expected="a new turn", got="more of one that failed")
        fed = self._between_chunks(rows)
        before = self.speaker.rows(self.slot)
        try:
            call = self.speaker.one(self.slot, fed, 0, self.max_codes)
        except NumericsError:
            self._failed = True
            raise
        if not call.ended:
            # The last code was never fed, yet counts as spoken: the next chunk leaves a gap of one position.
            self.speaker.state.cache.positions[self.slot] += 1
        self._chunks.append(self.speaker.rows(self.slot) - before)
        self._last = (rows, call.codes)
        self.buffer += call.codes
        full = len(self.buffer) // self.batch * self.batch
        batches = [self.buffer[i : i + self.batch] for i in range(0, full, self.batch)]
        self.buffer = self.buffer[full:]
        if final and call.ended:
            batches.append(self.flush())
        return batches

    def flush(self) -> list[int]:
        """What is left when the text ended without an end code."""
        rest, self.buffer = self.buffer, []
        return rest

    def _between_chunks(self, rows: Tensor) -> Tensor:
        """Make room as the attention type says, once it is sure that the chunk fits. Returns: the rows to feed."""
        speaker, slot, held = self.speaker, self.slot, self.speaker.rows(self.slot)
        fed, keep, drop = rows, 0, 0
        if self._last is not None and self.attention_type == "sliding_recompute":
            previous, codes = self._last
            fed, drop = torch.cat((previous, speaker.code_rows(codes), rows)), held
        elif self.attention_type == "reindex":
            keep, drop = sum(self._chunks[:1]), sum(self._chunks[1:-1])
        elif self.attention_type == "sliding_window":
            drop = max(0, held - self.window)
        speaker.check(slot, len(fed), self.max_codes, held=held - drop)
        cache = speaker.state.cache
        if self.attention_type == "sliding_recompute":
            speaker.empty_cache(slot)
        elif self.attention_type == "sliding_window":
            # Rows out of sight make room; what is left keeps its positions.
            cache.windows[slot] = self.window
            speaker.drop_rows(slot, 0, drop, turn=False)
            cache.positions[slot] += drop
        elif drop:
            speaker.drop_rows(slot, keep, drop, turn=self.compat == "fixed")
            self._chunks = [self._chunks[0], self._chunks[-1]]
        return fed
