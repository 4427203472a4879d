"""What `truncation` means for the context of a slot: which units leave it, or when it is full."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from server.doors.live.sound.unit_buffer import MAX_PICTURES
from worker.config.session import IMAGE_ROWS, SessionConfig

MAX_SLICES = 4  # of a picture with the detail `high`, at least
MIN_KEPT_ROWS = 1000  # below which a limit of a client would leave no room for the prompt
Json = dict[str, Any]


@dataclass(frozen=True)
class Truncation:
    """The client's choice.

    Attributes:
        mode: `auto`: the oldest units leave a context that grows too long; `disabled`: none does.
        ratio: share of the limit that is kept then; None: the deployment's.
        limit: tokens, from which on units leave; None: the deployment's.
    """

    mode: Literal["auto", "disabled"] = "auto"
    ratio: float | None = None
    limit: int | None = None

    def described(self) -> str | Json:
        """As the session shows it."""
        if self.ratio is None:
            return self.mode
        shown: Json = {"type": "retention_ratio", "retention_ratio": self.ratio}
        return shown if self.limit is None else {**shown, "token_limits": {"post_instructions": self.limit}}


AUTO = Truncation()


@dataclass(frozen=True)
class SlotWindow:
    """The context of the deployment's slots. rows: its length. session: defaults of its sessions."""

    rows: int = 8192
    session: SessionConfig = field(default_factory=SessionConfig)

    @property
    def max_slices(self) -> int:
        """Most slices of a picture with the detail `high`."""
        return max(MAX_SLICES, self.session.max_slice_nums)

    def with_side_lane(self, n_tokens: int) -> "SlotWindow":
        """The same slots for units with a side lane, which are longer: less may be kept. n_tokens: of one unit."""
        window = self.session.window
        longer = self.session.model_copy(update={"max_side_tokens_per_chunk": n_tokens})
        high = min(window.high_tokens, max(1, self.rows - longer.unit_rows))
        kept = window.model_copy(update={"high_tokens": high, "low_tokens": min(window.low_tokens, high)})
        return replace(self, session=longer.model_copy(update={"window": kept}))

    @property
    def _max_high(self) -> int:
        return max(self.rows - self.session.unit_rows, self.session.window.high_tokens)

    def window_for(self, truncation: Truncation) -> Json:
        """Fields of the setting `window` of the engine."""
        window = self.session.window
        if truncation.mode == "disabled":
            return {"high_tokens": self._max_high, "low_tokens": self._max_high}
        high = window.high_tokens
        if truncation.limit is not None:
            high = min(max(truncation.limit, MIN_KEPT_ROWS), self._max_high)
        low = min(window.low_tokens, high) if truncation.ratio is None else int(high * truncation.ratio)
        return {"high_tokens": high, "low_tokens": low}

    def max_rows_for(self, truncation: Truncation) -> int | None:
        """Length from which on the longest unit would make others leave; None: they may."""
        if truncation.mode == "auto":
            return None
        longest = self.session.unit_rows + MAX_PICTURES * (1 + self.max_slices) * IMAGE_ROWS
        return max(self._max_high - longest, self._max_high // 2)
