"""Host side of speech: calls of the speech model, from conditioning rows to speech tokens.

Contains rows, speech tokens and lengths. Does not contain text (`TTS.condition` makes the rows) or sound.

A *call* feeds conditioning rows and then draws tokens. The modes of operation differ in their calls:
    unit               one call per second, at most 26 tokens; the caller drops the 26th
    turn-based answer  one call per text chunk, at most 500 tokens (`speech_stream`)

With a pool of pages, a slot gets the pages that a call may fill before the call begins. The pool gets all of them back
when the slot's cache is emptied, and those beyond its rows when rows are dropped or a call is undone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.checkpoint.config import TTSConfig
from models.errors import ContextOverflowError, SettingsError, ShapeError
from models.graphs.streams import AsyncHostCopy, SideStream
from models.layers.speech_state import SPEECH_TOKENS_PER_CALL
from models.sampling.settings import SpeechSampling, check_number
from models.stages import regions
from models.stages.region_table import SPEECH_STEPS
from models.stages.runner import Runner, check_span


@dataclass(frozen=True)
class Call:
    """Result of one call for one slot.

    Args:
        speech_tokens: ordinary speech tokens in order.
        ended: the call drew its end token after them.
        bad: the logits became NaN or infinite after them, so the slot's turn cannot go on.
    """

    speech_tokens: list[int]
    ended: bool
    bad: bool


@dataclass(frozen=True)
class Poll:
    """State of a call in progress.

    Args:
        speech_tokens: ordinary speech tokens so far.
        over: the call draws no more tokens.
        ended, bad: as in `Call`.
    """

    speech_tokens: list[int]
    over: bool
    ended: bool
    bad: bool


@dataclass
class _Running:
    """A call in progress. n_rows: conditioning rows of the call. n_drawn: tokens drawn at most."""

    n_rows: int
    n_drawn: int = 1


class Readback:
    """Results of calls on their way to the host.

    Args:
        table: [B, 4 + n], a row per call: number of tokens drawn, end token, over, bad, then the tokens.
    """

    def __init__(self, table: Tensor):
        self._copy = AsyncHostCopy(table)

    @property
    def is_here(self) -> bool:
        """Whether `take` returns without waiting."""
        return self._copy.is_ready

    def take(self) -> list[Poll]:
        """Wait for the copy and return its polls. This is the only synchronization for all tokens drawn before."""
        polls = []
        for n_drawn, eos, over, bad, *speech_tokens in self._copy.result().tolist():
            speech_tokens = speech_tokens[:n_drawn]
            ended = bool(speech_tokens) and speech_tokens[-1] == eos
            polls.append(Poll(speech_tokens[: len(speech_tokens) - ended], bool(over), ended, bool(bad)))
        return polls


class Speaker:
    """The speech model's calls over a runner's slots.

    On a GPU, tokens are drawn on a side stream. Code that touches the speech state of slots other than through this
    class calls `join` first.

    Raises: SettingsError for a checkpoint without a speech model.
    """

    def __init__(self, runner: Runner):
        if runner.state.speech is None:
            raise SettingsError("speech", expected="a checkpoint with tts", got="init_tts false")
        self.runner, self.state = runner, runner.state.speech
        self._rows = [0] * runner.state.n_slots  # host copy of the cache's lengths, without the calls in progress
        self._running: dict[int, _Running] = {}
        self._side = SideStream(runner.model.device, high_priority=True)

    @property
    def is_beside(self) -> bool:
        """Whether tokens are drawn on a side stream instead of before the call returns."""
        return self._side.is_async

    @property
    def config(self) -> TTSConfig:
        """Sizes and defaults of the speech model."""
        return self.runner.model.config.tts_config

    def check_slot(self, slot: int) -> None:
        """Raises: SlotError if there is no such slot."""
        self.runner.check_slots([slot])

    def join(self) -> None:
        """Let later work on the caller's stream wait for all tokens requested so far."""
        self._side.join()

    def start_turn(
        self, slot: int, settings: SpeechSampling, *, seed: int | None = None, eos: int | None = None
    ) -> None:
        """Configure the slot and start a turn with empty cache and token history.

        Args:
            seed: start of the random numbers; None: they continue.
            eos: end token; default the checkpoint's.
        Raises: SlotError or SettingsError, with nothing changed.
        """
        self.runner.check_slots([slot])
        eos = self.config.speech_eos_id if eos is None else eos
        self.join()
        self.state.sampler.configure(slot, settings, eos, seed)
        self.empty_cache(slot)
        self.forget_tokens(slot)

    def configure(self, slot: int, settings: SpeechSampling) -> None:
        """Change the slot's settings; cache, token history and random numbers stay. Raises: SlotError."""
        self.runner.check_slots([slot])
        self.join()
        self.state.sampler.configure(slot, settings, self.config.speech_eos_id)

    def forget_tokens(self, slot: int) -> None:
        """Empty the slot's token history."""
        self.join()
        self.state.sampler.forget(self.runner.tensor([slot], 1, slot))

    def empty_cache(self, slot: int) -> None:
        """Empty the slot's cache; settings, token history and random numbers stay."""
        self.join()
        self.state.cache.reset(self.runner.tensor([slot], 1, slot))
        self.set_rows(slot, 0)

    def drop_rows(self, slot: int, keep: int, drop: int, *, rotates: bool) -> None:
        """Drop cache rows [keep, keep + drop) of the slot and close the gap. rotates: as in `KVCache.evict`.

        Raises: ContextOverflowError if the slot does not hold these rows.
        """
        check_span(f"speech of slot {slot}", self.rows(slot), keep, drop)
        slots, first, count = (self.runner.tensor([value], 1, 0) for value in (slot, keep, drop))
        self.join()
        self.state.cache.evict(slots, first, count, self.runner.model.tts.model.frequencies, rotates)
        self.set_rows(slot, self.rows(slot) - drop)

    def token_rows(self, speech_tokens: list[int]) -> Tensor:
        """Embedding rows [n, D] of speech tokens, as a call appends them."""
        ids = self.runner.tensor(speech_tokens, len(speech_tokens), 0).long()
        rows: Tensor = self.runner.model.tts.emb_code[0](ids)
        return rows

    @property
    def max_rows(self) -> int:
        """Rows of one slot's cache."""
        return self.state.cache.max_len

    def rows(self, slot: int) -> int:
        """Number of cache rows in the slot, without a call in progress."""
        return self._rows[slot]

    def set_rows(self, slot: int, n_rows: int) -> None:
        """Record the slot's number of cache rows after `join` and a change that left only zeros beyond them.

        A shared pool gets the pages beyond them back.
        """
        # Another slot may take them at once: `join` came before the zeros, and the side stream writes after both.
        self.state.cache.pages.release(slot, n_rows)
        self._rows[slot] = n_rows

    def has_room(self, slot: int, n_rows: int, max_speech_tokens: int) -> bool:
        """Whether a call fits after the slot's rows, in its cache and in a shared pool. Arguments as for `check`."""
        total, cache = self._n_filled(self.rows(slot), n_rows, max_speech_tokens), self.state.cache
        return total <= cache.max_len and cache.pages.has_room(slot, total)

    def reserve(self, slot: int, n_rows: int, max_speech_tokens: int) -> None:
        """Give the slot the pages of a shared pool that a call may fill. Arguments as for `check`.

        Raises: SlotError if too few are free, with nothing changed.
        """
        total, pages = self._n_filled(self.rows(slot), n_rows, max_speech_tokens), self.state.cache.pages
        if pages.capacity(slot) < total:
            self.join()  # calls in flight read the table
            pages.reserve(slot, total)

    @staticmethod
    def _n_filled(held: int, n_rows: int, max_speech_tokens: int) -> int:
        """Cache rows after a call that draws all its tokens: the last one is not fed."""
        return held + n_rows + max_speech_tokens - 1

    def check_rows(self, slot: int, rows: Tensor) -> None:
        """Raises: ShapeError unless `rows` is one or more conditioning rows [n, D]."""
        width = self.config.hidden_size
        if rows.ndim != 2 or rows.shape[1] != width or len(rows) < 1:
            expected = f"conditioning rows [1 or more, {width}]"
            raise ShapeError(f"speech of slot {slot}", expected=expected, got=tuple(rows.shape))

    def check(self, slot: int, n_rows: int, max_speech_tokens: int, held: int | None = None) -> None:
        """Check that the slot has room for a call.

        Args:
            n_rows: conditioning rows of the call.
            held: cache rows before the call; default `rows(slot)`.
        Raises: SettingsError, ShapeError or ContextOverflowError; SlotError if a shared pool has too few free pages.
        """
        check_number("max_speech_tokens", max_speech_tokens, at_least=1, at_most=SPEECH_TOKENS_PER_CALL, whole=True)
        self._token_bucket(n_rows)
        total = self._n_filled(self.rows(slot) if held is None else held, n_rows, max_speech_tokens)
        if total > self.state.cache.max_len:
            raise ContextOverflowError(
                f"speech of slot {slot}", expected=f"at most {self.state.cache.max_len} rows", got=f"{total} rows"
            )
        self.state.cache.pages.check(slot, total)

    def _token_bucket(self, n_rows: int) -> int:
        """Text tokens of the smallest bucket for `n_rows` conditioning rows, two of which are markers."""
        return self.runner.shapes.fit("speech_begin", "tokens", max(n_rows - 2, 1))

    def condition(self, slots: Sequence[int], ids: Sequence[Sequence[int]], text_eos: Sequence[bool]) -> list[Tensor]:
        """Conditioning rows [n, D] of each slot's spoken tokens, from the states in the slot's `hidden`.

        Args:
            text_eos: the answer's text ends here.
        Raises: SlotError; ShapeError for too many tokens.
        """
        runner = self.runner
        runner.check_slots(slots, ids, text_eos)
        n_text = [len(own) for own in ids]
        size, slot_ids, others = runner.batch("spoken_rows", slots, (n_text, 0), (text_eos, False))
        width = runner.shapes.fit("spoken_rows", "spoken", max(1, *n_text))
        padded = np.zeros((size, width), np.int64)
        for row, own in enumerate(ids):
            padded[row, : len(own)] = own
        self.join()  # the region's graph may share memory with those of the speech loop
        rows = runner.regions.run(regions.spoken_rows, slot_ids, padded, *others)
        # Copies: a captured graph writes the next result to the same memory.
        lengths = [len(own) + end + 1 for own, end in zip(ids, text_eos, strict=True)]
        return [rows[row, :length].clone() for row, length in enumerate(lengths)]

    def begin(
        self,
        slots: Sequence[int],
        rows: Sequence[Tensor],
        *,
        min_speech_tokens: Sequence[int],
        max_speech_tokens: Sequence[int],
    ) -> None:
        """Start a call in each slot: append its conditioning rows [n, D] and draw the first token.

        Args:
            min_speech_tokens, max_speech_tokens: of each call, the end token included.
        Raises: SlotError, or as `check`, before any change but pages that slots have reserved.
        """
        runner = self.runner
        runner.check_slots(slots, rows, min_speech_tokens, max_speech_tokens)
        for slot, own, limit in zip(slots, rows, max_speech_tokens, strict=True):
            assert slot not in self._running, f"slot {slot} is in a call"
            self.check_rows(slot, own)
            self.check(slot, len(own), limit)
        for slot, own, limit in zip(slots, rows, max_speech_tokens, strict=True):
            self.reserve(slot, len(own), limit)
        self._side.record_use(*rows)
        with self._side.work():
            n_max = runner.shapes.max_prefill_batch(self._token_bucket(max(map(len, rows))))
            for start in range(0, len(slots), n_max):
                part = slice(start, start + n_max)
                self._begin(slots[part], rows[part], min_speech_tokens[part], max_speech_tokens[part])
        for slot, own in zip(slots, rows, strict=True):
            self._running[slot] = _Running(len(own))

    def _begin(
        self,
        slots: Sequence[int],
        rows: Sequence[Tensor],
        min_speech_tokens: Sequence[int],
        max_speech_tokens: Sequence[int],
    ) -> None:
        runner, n_rows = self.runner, [len(own) for own in rows]
        n_padded = self._token_bucket(max(n_rows)) + 2
        kv_len = self._kv_len("speech_begin", [self.rows(slot) + n_padded for slot in slots])
        size, slot_ids, counts = runner.batch(
            "speech_begin", slots, (n_rows, 0), (min_speech_tokens, 0), (max_speech_tokens, 0)
        )
        padded = torch.zeros(size, n_padded, rows[0].shape[-1], dtype=runner.model.dtype, device=runner.model.device)
        for row, own in enumerate(rows):
            padded[row, : len(own)] = own
        runner.regions.run(regions.speech_begin, slot_ids, padded, *counts, kv_len=kv_len)

    def advance(self, slots: Sequence[int], n_steps: int = 1) -> None:
        """Draw up to `n_steps` more tokens in slots with a call, in as few region calls as possible, without a sync."""
        running = [self._running[slot] for slot in slots]
        with self._side.work():
            _, slot_ids, _ = self.runner.batch("speech_step", slots)
            while n_steps > 0:
                # Rows after the first step; the rows of further steps must fit the same kv bucket.
                held = [self.rows(slot) + call.n_rows + call.n_drawn for slot, call in zip(slots, running, strict=True)]
                kv_len = self._kv_len("speech_step", held)
                room = n_steps if kv_len == self.state.cache.max_len else kv_len - max(held) + 1
                size = max(size for size in SPEECH_STEPS if size <= min(n_steps, room))
                self.runner.regions.run(regions.speech_step, slot_ids, kv_len=kv_len, n_steps=size)
                for call in running:
                    call.n_drawn += size
                n_steps -= size

    def poll(self, slots: Sequence[int]) -> list[Poll]:
        """Results of the calls of `slots` so far; one synchronization for all of them."""
        return self.start_poll(slots).take()

    def start_poll(self, slots: Sequence[int]) -> Readback:
        """Start the copy of the results so far to the host. Later draws and rewinds do not change it."""
        state, n_shown = self.state, max(self._running[slot].n_drawn for slot in slots)
        with self._side.work():
            slot_ids = self.runner.tensor(slots, len(slots), 0)
            columns = (state.sampler.step, state.sampler.eos_id, state.done.long(), state.bad.long())
            table = torch.cat((torch.stack(columns, 1)[slot_ids], state.speech_tokens[slot_ids, :n_shown]), 1)
            return Readback(table)

    def is_in_call(self, slot: int) -> bool:
        """Whether the slot has a call in progress."""
        return slot in self._running

    def end(self, slots: Sequence[int], polls: Sequence[Poll] | None = None) -> list[Call]:
        """Close the calls of `slots`, over or not, and count their cache rows.

        Args:
            polls: the calls' newest polls; default: a new poll.
        """
        calls = []
        for slot, poll in zip(slots, polls or self.poll(slots), strict=True):
            n_drawn = len(poll.speech_tokens) + poll.ended
            # The newest token is in the cache only if another draw, valid or not, was made after it.
            self._rows[slot] += self._running.pop(slot).n_rows + max(n_drawn - 1 + poll.bad, 0)
            calls.append(Call(poll.speech_tokens, poll.ended, poll.bad))
        return calls

    def drop_call(self, slot: int) -> None:
        """Abandon the slot's call in progress, if any; the caller undoes its rows."""
        self._running.pop(slot, None)

    def _kv_len(self, region: str, held: Sequence[int]) -> int:
        return self.runner.shapes.fit(region, "speech_kv", min(max(held), self.state.cache.max_len))
