"""How long somebody will wait, from how long sessions take. Plain classes: no I/O, no clock.

A guess for each kind of session counts until some have been measured, then their moving average.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from server.dispatch.queue import RequestType

UNKNOWN_S = 30.0  # of a kind that has no guess
# What is left of a session, at least: nobody knows when one that takes longer than most will end, and an estimate that
# falls to nothing and jumps up again makes a countdown that does.
LAST_S = 15.0
KINDS: dict[RequestType, str] = {
    "chat": "eta_chat_s",
    "half_duplex_audio": "eta_half_duplex_s",
    "audio_duplex": "eta_audio_duplex_s",
    "omni_duplex": "eta_omni_duplex_s",
}


@dataclass(frozen=True)
class EtaConfig:
    """Seconds that sessions take, until some are measured. ema_alpha: weight of the newest. min_samples: how many."""

    eta_chat_s: float = 15.0
    eta_half_duplex_s: float = 180.0
    eta_audio_duplex_s: float = 120.0
    eta_omni_duplex_s: float = 90.0
    ema_alpha: float = 0.3
    min_samples: int = 3


@dataclass(frozen=True)
class Measured:
    """average_s: None before the first."""

    average_s: float | None = None
    n: int = 0


class Eta:
    """Durations by kind, measured or guessed."""

    def __init__(self, config: EtaConfig):
        self.config = config
        self.measured: dict[RequestType, Measured] = {kind: Measured() for kind in KINDS}

    def adjust(self, **given: float) -> None:
        """Change some settings; what was measured stays."""
        self.config = replace(self.config, **given)

    def record(self, kind: RequestType, duration_s: float) -> None:
        """A session has ended."""
        if duration_s <= 0:
            return
        before, weight = self.measured[kind], self.config.ema_alpha
        average = duration_s if before.average_s is None else before.average_s * (1 - weight) + duration_s * weight
        self.measured[kind] = Measured(average, before.n + 1)

    def duration(self, kind: RequestType) -> float:
        """s: how long one takes from its start."""
        measured = self.measured.get(kind, Measured())
        if measured.average_s is not None and measured.n >= self.config.min_samples:
            return measured.average_s
        return getattr(self.config, KINDS[kind]) if kind in KINDS else UNKNOWN_S

    def remaining(self, kind: RequestType, elapsed_s: float) -> float:
        """s: what is left of one that has run for so long; at least 15, or all of a shorter one."""
        duration = self.duration(kind)
        return max(duration - elapsed_s, min(LAST_S, duration))

    def waits(self, running: Sequence[float], n_free: int, queued: Sequence[RequestType]) -> list[float]:
        """Seconds that each of the queue will wait, in its order.

        running: what is left of each session, s. n_free: places that nobody has. Without any place at all: 0.
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
