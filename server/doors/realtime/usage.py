"""Token counts of a response, in the form of the API."""

from dataclasses import dataclass
from typing import Any

from worker.protocol.messages import Result

Json = dict[str, Any]
AUDIO_ROWS = 10  # of a unit; of workers that send no counters


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
