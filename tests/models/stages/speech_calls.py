"""Whole speech calls in one function, for tests: `Speaker` and `SpeechStream` that draw until a call is over."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from models.errors import NumericsError
from models.sampling.settings import check_number
from models.stages.speech_steps import Call, Speaker
from models.stages.speech_stream import SpeechStream

SPEECH_TOKENS_PER_SECOND = 25
CHAT_MIN_SPEECH_TOKENS = 50
CHAT_MAX_SPEECH_TOKENS = 2048


def without_last(call: Call) -> Call:
    """The call without its last token if it ran into its limit: that token was never fed."""
    return call if call.ended or call.bad else replace(call, speech_tokens=call.speech_tokens[:-1])


class WholeCallSpeaker(Speaker):
    """A speaker whose calls run to their end."""

    def call(
        self,
        slots: Sequence[int],
        rows: Sequence[Tensor],
        *,
        min_speech_tokens: Sequence[int],
        max_speech_tokens: Sequence[int],
    ) -> list[Call]:
        """Feed conditioning rows [n, D] to each slot and draw tokens until each ends or reaches its maximum."""
        self.begin(slots, rows, min_speech_tokens=min_speech_tokens, max_speech_tokens=max_speech_tokens)
        n_drawn, limit = 1, max(max_speech_tokens)
        while n_drawn < limit:
            # One poll per second of speech: slots that are done do not change meanwhile.
            if n_drawn % SPEECH_TOKENS_PER_SECOND == 0 and all(poll.over for poll in self.poll(slots)):
                break
            n_steps = min(SPEECH_TOKENS_PER_SECOND - n_drawn % SPEECH_TOKENS_PER_SECOND, limit - n_drawn)
            self.advance(slots, n_steps)
            n_drawn += n_steps
        return self.end(slots)

    def answer(
        self,
        slot: int,
        rows: Tensor,
        *,
        min_speech_tokens: int = CHAT_MIN_SPEECH_TOKENS,
        max_speech_tokens: int = CHAT_MAX_SPEECH_TOKENS,
    ) -> list[int]:
        """The speech tokens of a whole answer in one call. Raises: NumericsError."""
        (call,) = self.call(
            [slot], [rows], min_speech_tokens=[min_speech_tokens], max_speech_tokens=[max_speech_tokens]
        )
        if call.bad:
            raise NumericsError(f"speech of slot {slot}", expected="finite logits", got="NaN or infinity")
        return without_last(call).speech_tokens

    def unit(self, slots: Sequence[int], rows: Sequence[Tensor], may_end: Sequence[bool]) -> list[Call]:
        """Up to 25 tokens for each slot's second; fewer only where the turn `may_end`."""
        limit = SPEECH_TOKENS_PER_SECOND + 1
        min_speech_tokens = [0 if free else limit for free in may_end]
        calls = self.call(slots, rows, min_speech_tokens=min_speech_tokens, max_speech_tokens=[limit] * len(slots))
        return [without_last(call) for call in calls]


class BatchedStream(SpeechStream):
    """A stream that draws the tokens of a text chunk and returns them in batches, across chunks."""

    speaker: WholeCallSpeaker

    def __init__(
        self, speaker: WholeCallSpeaker, *arguments: Any, batch: int = SPEECH_TOKENS_PER_SECOND, **settings: Any
    ):
        super().__init__(speaker, *arguments, **settings)
        check_number("batch", batch, at_least=1, whole=True)
        self.batch = batch
        self.buffer: list[int] = []

    def push(self, rows: Tensor, final: bool) -> list[list[int]]:
        """Speak one text chunk.

        Returns: full batches; with `final`, if the speech ended, also the rest, even if it is empty.
        Raises: NumericsError; as `make_room`.
        """
        fed = self.make_room(rows)
        (call,) = self.speaker.call(
            [self.slot], [fed], min_speech_tokens=[0], max_speech_tokens=[self.max_speech_tokens]
        )
        if call.bad:
            raise NumericsError(f"speech of slot {self.slot}", expected="finite logits", got="NaN or infinity")
        self.close(call.speech_tokens, call.ended)
        self.buffer += call.speech_tokens
        full = len(self.buffer) // self.batch * self.batch
        batches = [self.buffer[i : i + self.batch] for i in range(0, full, self.batch)]
        self.buffer = self.buffer[full:]
        return [*batches, self.flush()] if final and call.ended else batches

    def flush(self) -> list[int]:
        """The tokens of an incomplete batch."""
        rest, self.buffer = self.buffer, []
        return rest
