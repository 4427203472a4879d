"""When an answer that does not end by itself is ended: a cap on its frames, and silence after its text. Torch-free."""

import enum
import math
from dataclasses import dataclass

from models.qwen3_tts.config import FRAMES_PER_SECOND
from models.sampling.settings import check_number

SILENT_PEAK = 10 ** (-50 / 20)  # of a frame of near-silence, full scale 1


class CodesEnd(enum.Enum):
    """Why an answer has no more frames."""

    STOP = "stop"  # the model drew the end of speech
    LENGTH = "length"  # the cap was reached
    SILENCE = "silence"  # nothing was spoken any more
    FAILED = "failed"  # the logits were not finite


@dataclass(frozen=True)
class RunawayLimits:
    """Limits of one answer.

    Attributes:
        base_frames, frames_per_token: the cap is their sum for the tokens of the text.
        max_frames: the request's own cap, if it is lower.
        silent_seconds: of near-silence after the text has been read, that end an answer.
    Raises: SettingsError for a value outside its range.
    """

    base_frames: int = 24
    frames_per_token: int = 6
    max_frames: int | None = None
    silent_seconds: float = 3.0

    def __post_init__(self) -> None:
        check_number("base_frames", self.base_frames, at_least=1, whole=True)
        check_number("frames_per_token", self.frames_per_token, at_least=0, whole=True)
        if self.max_frames is not None:
            check_number("max_frames", self.max_frames, at_least=1, whole=True)
        check_number("silent_seconds", self.silent_seconds, above=0)

    def frame_cap(self, n_text_tokens: int) -> int:
        """Most frames of an answer that speaks this many text tokens."""
        cap = self.base_frames + self.frames_per_token * n_text_tokens
        return cap if self.max_frames is None else min(cap, self.max_frames)


class SilenceWatch:
    """Counts near-silent frames of one answer after its text has been read."""

    def __init__(self, limits: RunawayLimits):
        self._allowed = math.ceil(limits.silent_seconds * FRAMES_PER_SECOND)
        self._silent = 0

    def push(self, peak: float, *, text_is_read: bool) -> bool:
        """Take the next decoded frame.

        Args:
            peak: largest magnitude of its samples.
            text_is_read: the whole text was fed before the frame.
        Returns: whether the answer should end here.
        """
        self._silent = self._silent + 1 if text_is_read and peak < SILENT_PEAK else 0
        return self._silent >= self._allowed
