"""Estimates of waiting times, from the durations of sessions.

Contains no I/O and no clock. A configured duration is used for each request type until enough sessions have been
measured; then their exponential moving average is used.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from server.dispatch.queue import RequestType

DEFAULT_DURATION_S = 10.0  # of a request type without a configured duration
# Lower bound of the remaining time of a session. An estimate that reaches zero for a long session, and jumps up when
# the next one is considered, would make the countdown of waiting clients jump.
MIN_REMAINING_S = 15.0
CONFIG_FIELDS: dict[RequestType, str] = {
    "chat": "eta_chat_s",
    "half_duplex_audio": "eta_half_duplex_s",
    "audio_duplex": "eta_audio_duplex_s",
    "omni_duplex": "eta_omni_duplex_s",
}


@dataclass(frozen=True)
class EtaConfig:
    """Expected durations in seconds, and when measured durations replace them.

    ema_alpha: weight of the newest duration in the moving average. min_samples: measured sessions of a request type
    from which on their average is used.
    """

    eta_chat_s: float = 15.0
    eta_half_duplex_s: float = 180.0
    eta_audio_duplex_s: float = 120.0
    eta_omni_duplex_s: float = 90.0
    ema_alpha: float = 0.3
    min_samples: int = 3


@dataclass(frozen=True)
class MeasuredDuration:
    """Moving average of `n` durations. average_s: None before the first."""

    average_s: float | None = None
    n: int = 0


class Eta:
    """Configured and measured durations of each request type, and the waiting times that follow."""

    def __init__(self, config: EtaConfig):
        self.config = config
        self.measured: dict[RequestType, MeasuredDuration] = {kind: MeasuredDuration() for kind in CONFIG_FIELDS}

    def configure(self, changes: Mapping[str, float]) -> None:
        """Change fields of the configuration. Measured durations are kept.

        Args:
            changes: values by field name of `EtaConfig`, without `min_samples`.
        """
        self.config = replace(self.config, **changes)  # type: ignore[arg-type]  # min_samples alone is an int

    def record(self, kind: RequestType, duration_s: float) -> None:
        """Add the duration of a session that has ended to the moving average."""
        if duration_s <= 0:
            return
        before, weight = self.measured.get(kind, MeasuredDuration()), self.config.ema_alpha
        average = duration_s if before.average_s is None else before.average_s * (1 - weight) + duration_s * weight
        self.measured[kind] = MeasuredDuration(average, before.n + 1)

    def duration(self, kind: RequestType) -> float:
        """Expected duration of a session, in seconds."""
        measured = self.measured.get(kind, MeasuredDuration())
        if measured.average_s is not None and measured.n >= self.config.min_samples:
            return measured.average_s
        return float(getattr(self.config, CONFIG_FIELDS[kind])) if kind in CONFIG_FIELDS else DEFAULT_DURATION_S

    def remaining(self, kind: RequestType, elapsed_s: float) -> float:
        """Expected remaining seconds of a session that has run for `elapsed_s`; at least 15, or a shorter duration."""
        duration = self.duration(kind)
        return max(duration - elapsed_s, min(MIN_REMAINING_S, duration))

    def waits(self, running: Sequence[float], n_free: int, queued: Sequence[RequestType]) -> list[float]:
        """Expected waiting times in seconds, one for each queued request in its order. All are 0 without any slot.

        Args:
            running: remaining seconds of each running session.
            n_free: number of free slots.
            queued: request types in the order of the queue.
        """
        ends = [0.0] * n_free + list(running)
        heapq.heapify(ends)
        found = []
        for kind in queued:
            first = heapq.heappop(ends) if ends else 0.0
            found.append(round(first, 1))
            if running or n_free:
                heapq.heappush(ends, first + self.duration(kind))
        return found
