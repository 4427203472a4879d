"""Token counts of a response, in the form of the API."""

from dataclasses import dataclass, fields, replace
from typing import Any

from server.doors.core.chat_turn import TurnEvent, TurnFinished, TurnSound, TurnStarted, TurnText
from worker.protocol.chat_messages import ReplyUsage
from worker.protocol.messages import Result

Json = dict[str, Any]
AUDIO_ROWS = 10  # of a unit; of workers that send no counters
SAMPLES_PER_CODE = 960  # of speech at 24 kHz: 25 tokens a second


@dataclass
class TokenUsage:
    """Rows that the model consumed, by kind, and tokens that it produced."""

    text_in: int = 0
    audio_in: int = 0
    image_in: int = 0
    text_out: int = 0
    audio_out: int = 0

    def add(self, other: "TokenUsage") -> None:
        """Add the counts of another part of the response."""
        self.text_in += other.text_in
        self.audio_in += other.audio_in
        self.image_in += other.image_in
        self.text_out += other.text_out
        self.audio_out += other.audio_out

    def described(self) -> Json:
        """The object `usage` of a response."""
        inputs, outputs = self.text_in + self.audio_in + self.image_in, self.text_out + self.audio_out
        return {
            "total_tokens": inputs + outputs,
            "input_tokens": inputs,
            "output_tokens": outputs,
            "input_token_details": {
                "text_tokens": self.text_in,
                "audio_tokens": self.audio_in,
                "image_tokens": self.image_in,
                "cached_tokens": 0,
                "cached_tokens_details": {"text_tokens": 0, "audio_tokens": 0, "image_tokens": 0},
            },
            "output_token_details": {"text_tokens": self.text_out, "audio_tokens": self.audio_out},
        }


class AnswerUsage:
    """The usage of a chat's answer: a count of what has come, until the worker's own at the end replaces it.

    A cancelled answer keeps the count. Its input is text as far as it is known, and a part of text is one token.

    Args:
        total: gets the counts.
        counts_input: false for a text that is voiced: only its speech counts.
    """

    def __init__(self, total: TokenUsage, *, counts_input: bool = True):
        self._total, self._counts_input = total, counts_input
        self._before = replace(total)
        self._n_samples = 0

    def record(self, event: TurnEvent) -> None:
        """The next event of the chat."""
        total, before = self._total, self._before
        if isinstance(event, TurnStarted) and self._counts_input:
            total.text_in = before.text_in + event.input_tokens
        elif isinstance(event, TurnText) and self._counts_input:
            total.text_out += 1
        elif isinstance(event, TurnSound):
            self._n_samples += len(event.pcm)
            total.audio_out = before.audio_out + self._n_samples // SAMPLES_PER_CODE
        elif isinstance(event, TurnFinished):
            used = _of_reply(event.usage) if self._counts_input else TokenUsage(audio_out=event.usage.speech_tokens)
            for field in fields(TokenUsage):
                setattr(total, field.name, getattr(before, field.name) + getattr(used, field.name))


def _of_reply(usage: ReplyUsage) -> TokenUsage:
    media = usage.input_audio_tokens + usage.input_image_tokens
    return TokenUsage(
        text_in=usage.input_tokens - media,
        audio_in=usage.input_audio_tokens,
        image_in=usage.input_image_tokens,
        text_out=usage.text_tokens,
        audio_out=usage.speech_tokens,
    )


def usage_of(result: Result) -> TokenUsage:
    """What a unit has cost."""
    given = result.usage
    if given is None:
        return TokenUsage(
            audio_in=AUDIO_ROWS,
            image_in=result.vision_tokens,
            text_out=result.n_tokens,
            audio_out=result.n_tts_tokens,
        )
    return TokenUsage(
        text_in=given.text_rows,
        audio_in=given.audio_rows,
        image_in=given.image_rows,
        text_out=given.text_tokens + given.side_tokens,
        audio_out=given.speech_tokens,
    )
