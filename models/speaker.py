"""Host side of speech: one call of the code loop, and how chat, half duplex and duplex make calls.

Knows rows, codes and lengths. Does not know text tokens (`TTS.condition` makes the rows) nor sound.

The three ways differ only in settings:
    chat         one call per answer, at least 50 and at most 2048 codes, the last code drawn is dropped
    half duplex  `CodeStream`: one call per text chunk, codes leave in batches of 25 across chunks
    duplex       `unit`: one call per second, at most 25 codes, the 26th is drawn and dropped
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.errors import ContextOverflowError, SettingsError
from models.runner import Runner
from models.sampling_settings import CodeSampling
from models.speech import CODES_PER_CALL

CODES_PER_SECOND = 25
CHAT_MIN_CODES = 50
STREAM_MAX_CODES = 500


@dataclass(frozen=True)
class Call:
    """What one call drew for one slot. codes: ordinary codes in order. ended: it drew its end code after them."""

    codes: list[int]
    ended: bool


class Speaker:
    """The code loop of a runner's slots, with a host mirror of how many rows each slot holds."""

    def __init__(self, runner: Runner):
        if runner.state.speech is None:
            raise SettingsError("speech", expected="a checkpoint with tts", got="init_tts false")
        self.runner, self.state = runner, runner.state.speech
        self._rows = [0] * runner.state.n_slots

    def start_turn(self, slot: int, settings: CodeSampling, *, seed: int | None = None, eos: int | None = None) -> None:
        """A new turn: cache and recent codes empty. eos: end code, default the checkpoint's."""
        self.empty_cache(slot)
        self.state.sampler.forget(self.runner.tensor([slot], 1, slot))
        eos = self.runner.model.config.tts_config.eos_code if eos is None else eos
        self.state.sampler.configure(slot, settings, eos, seed)

    def empty_cache(self, slot: int) -> None:
        """Forget what was spoken; settings, recent codes and random numbers stay."""
        self.state.cache.reset(self.runner.tensor([slot], 1, slot))
        self._rows[slot] = 0

    def drop_rows(self, slot: int, keep: int, drop: int) -> None:
        """Drop rows [keep, keep + drop) of the slot and turn the keys behind them to close the gap."""
        one = (self.runner.tensor([value], 1, 0) for value in (slot, keep, drop))
        self.state.cache.evict(*one, self.runner.model.tts.model.frequencies)
        self._rows[slot] -= drop

    def code_rows(self, codes: list[int]) -> Tensor:
        """The rows [n, D] that feeding these codes would feed."""
        return self.runner.model.tts.emb_code[0](self.runner.tensor(codes, len(codes), 0).long())

    def rows(self, slot: int) -> int:
        """Rows the slot's cache holds."""
        return self._rows[slot]

    def call(
        self, slots: Sequence[int], rows: Sequence[Tensor], *, min_codes: Sequence[int], max_codes: Sequence[int]
    ) -> list[Call]:
        """Feed conditioning rows [n, D] to each slot and draw codes until each ends or has max_codes.

        Raises: SettingsError or ContextOverflowError before anything is fed.
        """
        for slot, own, most in zip(slots, rows, max_codes, strict=True):
            if not 1 <= most <= CODES_PER_CALL:
                raise SettingsError("max_codes", expected=f"1..{CODES_PER_CALL}", got=most)
            total = self._rows[slot] + len(own) + most - 1
            if total > self.state.cache.max_len:
                raise ContextOverflowError(
                    f"speech of slot {slot}", expected=f"at most {self.state.cache.max_len} rows", got=f"{total} rows"
                )
        runner = self.runner
        size = runner.shapes.fit("speech_begin", "batch", len(slots))
        slot_ids = runner.tensor(slots, size, runner.state.scratch)
        n_tokens = runner.shapes.fit("speech_begin", "tokens", max(max(map(len, rows)) - 2, 1))
        padded = torch.zeros(size, n_tokens + 2, rows[0].shape[-1], dtype=runner.model.dtype, device=slot_ids.device)
        for row, own in enumerate(rows):
            padded[row, : len(own)] = own
        runner.regions(
            "speech_begin",
            slot_ids,
            padded,
            runner.tensor([len(own) for own in rows], size, 0),
            runner.tensor(min_codes, size, 0),
            runner.tensor(max_codes, size, 0),
            kv_len=self._kv_len("speech_begin", slots, n_tokens + 2),
        )
        longest = max(map(len, rows))
        for drawn in range(1, max(max_codes)):
            # One look from the host per second of speech: slots that are done stand still meanwhile.
            if drawn % CODES_PER_SECOND == 0 and bool(self.state.done[slot_ids].all()):
                break
            runner.regions("speech_step", slot_ids, kv_len=self._kv_len("speech_step", slots, longest + drawn))
        return self._collect(slots, slot_ids, rows)

    def _kv_len(self, region: str, slots: Sequence[int], n_new: int) -> int:
        held = max(self._rows[slot] for slot in slots) + n_new
        return self.runner.shapes.fit(region, "speech_kv", min(held, self.state.cache.max_len))

    def _collect(self, slots: Sequence[int], slot_ids: Tensor, rows: Sequence[Tensor]) -> list[Call]:
        n_drawn = self.state.sampler.step[slot_ids].tolist()
        drawn = self.state.codes[slot_ids, : max(n_drawn)].tolist()
        ends = self.state.sampler.eos_id[slot_ids].tolist()
        calls = []
        for i, (slot, own) in enumerate(zip(slots, rows, strict=True)):
            codes = drawn[i][: n_drawn[i]]
            ended = bool(codes) and codes[-1] == ends[i]
            calls.append(Call(codes[: len(codes) - ended], ended))
            self._rows[slot] += len(own) + max(n_drawn[i] - 1, 0)
        return calls

    def answer(
        self, slot: int, rows: Tensor, *, min_codes: int = CHAT_MIN_CODES, max_codes: int = CODES_PER_CALL
    ) -> list[int]:
        """Chat: the codes of one whole answer, at most max_codes - 1."""
        (call,) = self.call([slot], [rows], min_codes=[min_codes], max_codes=[max_codes])
        return call.codes if call.ended else call.codes[:-1]

    def unit(self, slots: Sequence[int], rows: Sequence[Tensor], may_end: Sequence[bool]) -> list[list[int]]:
        """Duplex: up to 25 codes for each slot's second; fewer only where the turn `may_end` (first or last unit)."""
        most = CODES_PER_SECOND + 1
        min_codes = [0 if free else most for free in may_end]
        calls = self.call(slots, rows, min_codes=min_codes, max_codes=[most] * len(slots))
        return [call.codes if call.ended else call.codes[:-1] for call in calls]


@dataclass
class CodeStream:
    """Half duplex: text chunks in, batches of codes out, for one slot and one turn.

    What stands between two text chunks follows `attention_type`: nothing (full_attention), only the newest
    `window` rows stay visible (sliding_window), the last chunk is fed again from position 0
    (sliding_recompute), or the first and last chunk stay and close up (reindex).
    """

    speaker: Speaker
    slot: int
    attention_type: str
    window: int
    max_codes: int = STREAM_MAX_CODES
    batch: int = CODES_PER_SECOND
    buffer: list[int] = field(default_factory=list)
    _chunks: list[int] = field(default_factory=list)  # rows each text chunk left in the cache
    _last: tuple[Tensor, list[int]] | None = None

    def __post_init__(self) -> None:
        if self.attention_type == "sliding_window":
            self.speaker.state.cache.windows[self.slot] = self.window

    def push(self, rows: Tensor, final: bool) -> list[list[int]]:
        """Speak one text chunk. rows: [n, D] conditioning rows. Returns: full batches; with `final` also the rest."""
        fed = self._between_chunks(rows)
        before = self.speaker.rows(self.slot)
        (call,) = self.speaker.call([self.slot], [fed], min_codes=[0], max_codes=[self.max_codes])
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
            batches.append(self.buffer)
            self.buffer = []
        return batches

    def flush(self) -> list[int]:
        """What is left when the text ended without an end code."""
        rest, self.buffer = self.buffer, []
        return rest

    def _between_chunks(self, rows: Tensor) -> Tensor:
        if self._last is None:
            return rows
        if self.attention_type == "sliding_recompute":
            previous, codes = self._last
            self.speaker.empty_cache(self.slot)
            spoken = self.speaker.code_rows(codes)
            return torch.cat((previous, spoken, rows))
        if self.attention_type == "reindex" and len(self._chunks) > 2:
            self.speaker.drop_rows(self.slot, self._chunks[0], sum(self._chunks[1:-1]))
            self._chunks = [self._chunks[0], self._chunks[-1]]
        return rows
