"""Token counts of a response, in the form of the API."""

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass
class TokenUsage:
    """Rows that the model consumed, by kind, and tokens that it produced."""

    text_in: int = 0
    audio_in: int = 0
    image_in: int = 0
    text_out: int = 0
    audio_out: int = 0

    def add(self, other: "TokenUsage") -> None:
        self.text_in += other.text_in
        self.audio_in += other.audio_in
        self.image_in += other.image_in
        self.text_out += other.text_out
        self.audio_out += other.audio_out

    def described(self) -> Json:
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
