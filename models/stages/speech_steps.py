"""Host side of speech: one call of the code loop, and how chat, half duplex and duplex make calls.

Knows rows, codes and lengths. Does not know text tokens (`TTS.condition` makes the rows) nor sound.

The three ways differ only in settings:
    chat         one call per answer, at least 50 and at most 2048 codes, the last code drawn is dropped
    half duplex  `code_stream`: one call per text chunk, codes leave in batches of 25 across chunks
    duplex       `unit`: one call per second, at most 25 codes, the 26th is drawn and dropped
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from models.errors import ContextOverflowError, NumericsError, SettingsError, ShapeError
from models.graphs.streams import AsyncHostCopy, SideStream
from models.layers.speech_state import SPEECH_TOKENS_PER_CALL
from models.sampling.settings import SpeechSampling, check_number
from models.stages.region_table import SPEECH_STEPS
from models.stages.runner import Runner, check_span

SPEECH_TOKENS_PER_SECOND = 25
CHAT_MIN_SPEECH_TOKENS = 50


@dataclass(frozen=True)
class Call:
    """What one call drew for one slot.

    codes: ordinary codes in order. ended: it drew its end code after them. bad: its logits turned NaN or infinite
    after them, so the slot's turn is over.
    """

    speech_tokens: list[int]
    ended: bool
    bad: bool

    def without_last(self) -> "Call":
        """The same without the last ordinary code if the call ran into its limit: that code was never fed."""
        return self if self.ended or self.bad else replace(self, speech_tokens=self.speech_tokens[:-1])


@dataclass(frozen=True)
class Poll:
    """A call seen while it runs. codes: ordinary codes so far. over: no more will come. ended, bad: as `Call`."""

    speech_tokens: list[int]
    over: bool
    ended: bool
    bad: bool


@dataclass
class _Running:
    """A call in progress. n_rows: conditioning rows it fed. n_drawn: codes it has drawn at most."""

    n_rows: int
    n_drawn: int = 1


class Readback:
    """What calls have drawn, on its way to the host.

    table: [B, 4 + n], a row per call: codes drawn, its end code, whether it is over, whether it is bad, the codes.
    """

    def __init__(self, table: Tensor):
        self._arrival = AsyncHostCopy(table)

    @property
    def is_here(self) -> bool:
        """Whether `take` would not wait."""
        return self._arrival.is_ready

    def take(self) -> list[Poll]:
        """Waited for: the one sync of all that was drawn until then."""
        polls = []
        for n_drawn, eos, over, bad, *speech_tokens in self._arrival.result().tolist():
            speech_tokens = speech_tokens[:n_drawn]
            ended = bool(speech_tokens) and speech_tokens[-1] == eos
            polls.append(Poll(speech_tokens[: len(speech_tokens) - ended], bool(over), ended, bool(bad)))
        return polls


class Speaker:
    """The code loop of a runner's slots.

    On a GPU it draws codes beside what the caller's stream does. Whoever touches the speech of slots there, by another
    way than through here, calls `join` first.
    """

    def __init__(self, runner: Runner):
        if runner.state.speech is None:
            raise SettingsError("speech", expected="a checkpoint with tts", got="init_tts false")
        self.runner, self.state = runner, runner.state.speech
        self._running: dict[int, _Running] = {}
        self._beside = SideStream(runner.model.device, high_priority=True)

    @property
    def is_beside(self) -> bool:
        """Whether codes are drawn beside what the caller does, and not before it goes on."""
        return self._beside.is_async

    def join(self) -> None:
        """What the caller's stream is given next starts when all codes asked for so far are drawn."""
        self._beside.join()

    def start_turn(
        self, slot: int, settings: SpeechSampling, *, seed: int | None = None, eos: int | None = None
    ) -> None:
        """A new turn: cache and recent codes empty. eos: end code, default the checkpoint's.

        Raises: SlotError or SettingsError, with nothing changed.
        """
        self.runner.check_slots([slot])
        eos = self.runner.model.config.tts_config.speech_eos_id if eos is None else eos
        self.join()
        self.state.sampler.configure(slot, settings, eos, seed)
        self.empty_cache(slot)
        self.forget_tokens(slot)

    def forget_tokens(self, slot: int) -> None:
        """The next code is the first of its turn."""
        self.join()
        self.state.sampler.forget(self.runner.tensor([slot], 1, slot))

    def empty_cache(self, slot: int) -> None:
        """Forget what was spoken; settings, recent codes and random numbers stay."""
        self.join()
        self.state.cache.reset(self.runner.tensor([slot], 1, slot))
        self.runner.speech_rows[slot] = 0

    def drop_rows(self, slot: int, keep: int, drop: int, *, turn: bool) -> None:
        """Drop rows [keep, keep + drop) of the slot, closing the gap as `KVCache.evict` does.

        Raises: ContextOverflowError if the slot does not hold them.
        """
        check_span(f"speech of slot {slot}", self.rows(slot), keep, drop)
        one = (self.runner.tensor([value], 1, 0) for value in (slot, keep, drop))
        self.join()
        self.state.cache.evict(*one, self.runner.model.tts.model.frequencies, turn)
        self.runner.speech_rows[slot] -= drop

    def code_rows(self, speech_tokens: list[int]) -> Tensor:
        """The rows [n, D] that feeding these codes would feed."""
        return self.runner.model.tts.emb_code[0](self.runner.tensor(speech_tokens, len(speech_tokens), 0).long())

    def rows(self, slot: int) -> int:
        """Rows the slot's cache holds."""
        return self.runner.speech_rows[slot]

    def check_rows(self, slot: int, rows: Tensor) -> None:
        """Raises: ShapeError unless `rows` is one or more conditioning rows [n, D]."""
        width = self.runner.model.config.tts_config.hidden_size
        shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != width or len(rows) < 1:
            raise ShapeError(f"speech of slot {slot}", expected=f"conditioning rows [1 or more, {width}]", got=shape)

    def check(self, slot: int, n_rows: int, max_speech_tokens: int, held: int | None = None) -> None:
        """Raises: SettingsError, ShapeError or ContextOverflowError if a slot that holds `held` rows (default: what
        it holds now) cannot take `n_rows` more and draw `max_speech_tokens`.
        """
        check_number("max_speech_tokens", max_speech_tokens, at_least=1, at_most=SPEECH_TOKENS_PER_CALL, whole=True)
        self._token_bucket(n_rows)
        total = (self.rows(slot) if held is None else held) + n_rows + max_speech_tokens - 1
        if total > self.state.cache.max_len:
            raise ContextOverflowError(
                f"speech of slot {slot}", expected=f"at most {self.state.cache.max_len} rows", got=f"{total} rows"
            )

    def _token_bucket(self, n_rows: int) -> int:
        """Text tokens of the smallest bucket for `n_rows` conditioning rows, which hold two markers besides."""
        return self.runner.shapes.fit("speech_begin", "tokens", max(n_rows - 2, 1))

    def condition(self, slots: Sequence[int], ids: Sequence[Sequence[int]], text_eos: Sequence[bool]) -> list[Tensor]:
        """Conditioning rows [n, D] of each slot's spoken tokens, whose states wait in the slot's `hidden`.

        text_eos: the answer's text ends here. Raises: SlotError; ShapeError for too many tokens.
        """
        runner = self.runner
        runner.check_slots(slots, ids, text_eos)
        n_text = [len(own) for own in ids]
        size, slot_ids, *others = runner.batch("spoken_rows", slots, (n_text, 0), (text_eos, False))
        width = runner.shapes.fit("spoken_rows", "spoken", max(1, *n_text))
        padded = np.zeros((size, width), np.int64)
        for row, own in enumerate(ids):
            padded[row, : len(own)] = own
        self.join()  # its graph may share memory with those of the code loop
        rows = runner.regions("spoken_rows", slot_ids, padded, *others)
        # Copies: other slots may ask next, one by one, and a captured graph answers all of them in the same place.
        lengths = [len(own) + end + 1 for own, end in zip(ids, text_eos, strict=True)]
        return [rows[row, :length].clone() for row, length in enumerate(lengths)]

    def call(
        self,
        slots: Sequence[int],
        rows: Sequence[Tensor],
        *,
        min_speech_tokens: Sequence[int],
        max_speech_tokens: Sequence[int],
    ) -> list[Call]:
        """Feed conditioning rows [n, D] to each slot and draw codes until each ends or has max_codes.

        Raises: as `begin`.
        """
        self.begin(slots, rows, min_speech_tokens=min_speech_tokens, max_speech_tokens=max_speech_tokens)
        n_drawn, most = 1, max(max_speech_tokens)
        while n_drawn < most:
            # One look from the host per second of speech: slots that are done stand still meanwhile.
            if n_drawn % SPEECH_TOKENS_PER_SECOND == 0 and all(poll.over for poll in self.poll(slots)):
                break
            n_steps = min(SPEECH_TOKENS_PER_SECOND - n_drawn % SPEECH_TOKENS_PER_SECOND, most - n_drawn)
            self.advance(slots, n_steps)
            n_drawn += n_steps
        return self.end(slots)

    def begin(
        self,
        slots: Sequence[int],
        rows: Sequence[Tensor],
        *,
        min_speech_tokens: Sequence[int],
        max_speech_tokens: Sequence[int],
    ) -> None:
        """Start a call in each slot: feed its conditioning rows [n, D] and draw the first code.

        Raises: SlotError, or as `check`, before anything is fed; ShapeError for too many slots.
        """
        runner = self.runner
        runner.check_slots(slots, rows, min_speech_tokens, max_speech_tokens)
        for slot, own, most in zip(slots, rows, max_speech_tokens, strict=True):
            assert slot not in self._running, f"slot {slot} is in a call"
            self.check_rows(slot, own)
            self.check(slot, len(own), most)
        self._beside.record_use(*rows)
        with self._beside.work():
            most = runner.shapes.most_fed(self._token_bucket(max(map(len, rows))))
            for start in range(0, len(slots), most):
                self._begin(
                    *(
                        list(values[start : start + most])
                        for values in (slots, rows, min_speech_tokens, max_speech_tokens)
                    )
                )
        for slot, own in zip(slots, rows, strict=True):
            self._running[slot] = _Running(len(own))

    def _begin(
        self, slots: list[int], rows: list[Tensor], min_speech_tokens: list[int], max_speech_tokens: list[int]
    ) -> None:
        runner, n_rows = self.runner, [len(own) for own in rows]
        n_padded = self._token_bucket(max(n_rows)) + 2
        kv_len = self._kv_len("speech_begin", [self.rows(slot) + n_padded for slot in slots])
        size, slot_ids, *counts = runner.batch(
            "speech_begin", slots, (n_rows, 0), (min_speech_tokens, 0), (max_speech_tokens, 0)
        )
        padded = torch.zeros(size, n_padded, rows[0].shape[-1], dtype=runner.model.dtype, device=runner.model.device)
        for row, own in enumerate(rows):
            padded[row, : len(own)] = own
        runner.regions("speech_begin", slot_ids, padded, *counts, kv_len=kv_len)

    def advance(self, slots: Sequence[int], n_steps: int = 1) -> None:
        """Draw up to `n_steps` more codes in slots with a call, in as few calls as there are sizes for; no sync."""
        running = [self._running[slot] for slot in slots]
        with self._beside.work():
            _, slot_ids = self.runner.batch("speech_step", slots)
            while n_steps > 0:
                # Rows after the first step; the others must find room beside them.
                held = [self.rows(slot) + call.n_rows + call.n_drawn for slot, call in zip(slots, running, strict=True)]
                kv_len = self._kv_len("speech_step", held)
                room = n_steps if kv_len == self.state.cache.max_len else kv_len - max(held) + 1
                size = max(size for size in SPEECH_STEPS if size <= min(n_steps, room))
                self.runner.regions("speech_step", slot_ids, kv_len=kv_len, n_steps=size)
                for call in running:
                    call.n_drawn += size
                n_steps -= size

    def poll(self, slots: Sequence[int]) -> list[Poll]:
        """What the calls of `slots` have drawn so far: one sync for all of them."""
        return self.start_look(slots).take()

    def start_look(self, slots: Sequence[int]) -> Readback:
        """The same without waiting for it; what is drawn or undone later does not change it."""
        state, n_shown = self.state, max(self._running[slot].n_drawn for slot in slots)
        with self._beside.work():
            slot_ids = self.runner.tensor(slots, len(slots), 0)
            columns = (state.sampler.step, state.sampler.eos_id, state.done.long(), state.bad.long())
            table = torch.cat((torch.stack(columns, 1)[slot_ids], state.speech_tokens[slot_ids, :n_shown]), 1)
            return Readback(table)

    def is_in_call(self, slot: int) -> bool:
        return slot in self._running

    def end(self, slots: Sequence[int], polls: Sequence[Poll] | None = None) -> list[Call]:
        """Close the calls of `slots`, over or not, and count what is in their caches. looks: what was seen last."""
        calls = []
        for slot, poll in zip(slots, polls or self.poll(slots), strict=True):
            n_drawn = len(poll.speech_tokens) + poll.ended
            # The newest code is in the cache only if another draw, be it a bad one, was made after it.
            self.runner.speech_rows[slot] += self._running.pop(slot).n_rows + max(n_drawn - 1 + poll.bad, 0)
            calls.append(Call(poll.speech_tokens, poll.ended, poll.bad))
        return calls

    def drop_call(self, slot: int) -> None:
        """Forget that the slot is in a call, if it is; what it fed is for the caller to undo."""
        self._running.pop(slot, None)

    def _kv_len(self, region: str, held: Sequence[int]) -> int:
        return self.runner.shapes.fit(region, "speech_kv", min(max(held), self.state.cache.max_len))

    def one(self, slot: int, rows: Tensor, min_speech_tokens: int, max_speech_tokens: int) -> Call:
        """`call` for a single slot. Raises: NumericsError too."""
        (call,) = self.call(
            [slot], [rows], min_speech_tokens=[min_speech_tokens], max_speech_tokens=[max_speech_tokens]
        )
        if call.bad:
            raise NumericsError(f"speech of slot {slot}", expected="finite logits", got="NaN or infinity")
        return call

    def answer(
        self,
        slot: int,
        rows: Tensor,
        *,
        min_speech_tokens: int = CHAT_MIN_SPEECH_TOKENS,
        max_speech_tokens: int = SPEECH_TOKENS_PER_CALL,
    ) -> list[int]:
        """Chat: the codes of one whole answer, at most max_codes - 1. Raises: as `one`."""
        return self.one(slot, rows, min_speech_tokens, max_speech_tokens).without_last().speech_tokens

    def unit(self, slots: Sequence[int], rows: Sequence[Tensor], may_end: Sequence[bool]) -> list[Call]:
        """Duplex: up to 25 codes for each slot's second; fewer only where the turn `may_end` (first or last unit).

        A slot whose call is bad does not keep the others from their codes.
        """
        most = SPEECH_TOKENS_PER_SECOND + 1
        min_speech_tokens = [0 if free else most for free in may_end]
        calls = self.call(slots, rows, min_speech_tokens=min_speech_tokens, max_speech_tokens=[most] * len(slots))
        return [call.without_last() for call in calls]
