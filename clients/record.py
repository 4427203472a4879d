"""What became of each unit, as a client saw it: times, words, turns, and what they add up to.

Knows the protocol's results and the clock's readings that come with them. Does not know sockets, files nor sound.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from worker.protocol.messages import Error, Result

DEADLINE_MS = 1000.0  # a unit is a second: later results leave a listener waiting
SOUND_RATE = 24_000
DIGITS = 3


@dataclass
class ClientUnitLog:
    """One unit. index: the second that was heard, from 0. heard_s: when it was whole, in the conversation's time.

    decision: LISTEN, SPEAK or FAILED. reply_ms, first_sound_ms: from sending it to its result and its first sound.
    server_ms, headroom_ms, lag_ms, backlog: as the server told. sound_start: in samples at 24 kHz, None without sound.
    """

    index: int
    sent: float
    heard_s: float
    decision: str = ""
    text: str = ""
    end_of_turn: bool = False
    reply_ms: float | None = None
    first_sound_ms: float | None = None
    server_ms: float | None = None
    headroom_ms: float | None = None
    lag_ms: float | None = None
    backlog: int = 0
    context_rows: int = 0
    n_samples: int = 0
    sound_start: int | None = None
    error: str | None = None

    def arrived_s(self, now: float) -> float:
        """`now`, by the clock that `sent` was read from, in the conversation's time."""
        return self.heard_s + now - self.sent

    def as_json(self) -> dict[str, Any]:
        """Without the clock's own reading, and without what a unit does not have."""
        told = {key: value for key, value in asdict(self).items() if value is not None and key != "sent"}
        return {key: round(value, DIGITS) if isinstance(value, float) else value for key, value in told.items()}


@dataclass
class HeardTurn:
    """What was said in one go. start, end: its first and its last unit."""

    start: int
    end: int
    text: str


class TalkLog:
    """A conversation's units in the order they were sent; each is answered in the same order.

    units: all of them. turn_open: the last result speaks and does not end its turn.
    """

    def __init__(self) -> None:
        self.units: list[ClientUnitLog] = []
        self.turns: list[HeardTurn] = []
        self.turn_open = False
        self._open: deque[ClientUnitLog] = deque()

    @property
    def n_open(self) -> int:
        """Units that are sent and not answered."""
        return len(self._open)

    @property
    def n_failed(self) -> int:
        return sum(unit.decision == "FAILED" for unit in self.units)

    def sent(self, now: float, heard_s: float) -> ClientUnitLog:
        """A unit goes out."""
        unit = ClientUnitLog(len(self.units), now, heard_s)
        self.units.append(unit)
        self._open.append(unit)
        return unit

    def current(self) -> ClientUnitLog | None:
        """The unit that what comes next belongs to."""
        return self._open[0] if self._open else None

    def sounded(self, unit: ClientUnitLog, now: float, n_samples: int, begin: int) -> None:
        """Sound of a unit came and was laid down."""
        if unit.first_sound_ms is None:
            unit.first_sound_ms, unit.sound_start = 1000 * (now - unit.sent), begin
        unit.n_samples += n_samples

    def answered(self, message: Result, now: float) -> ClientUnitLog | None:
        """Returns: the unit, complete; None for a result that nobody asked for."""
        if not self._open:
            return None
        unit = self._open.popleft()
        unit.decision = "LISTEN" if message.is_listen else "SPEAK"
        unit.text, unit.end_of_turn = message.text, message.end_of_turn
        unit.reply_ms, unit.server_ms = 1000 * (now - unit.sent), message.wall_clock_ms
        unit.headroom_ms, unit.lag_ms = message.headroom_ms, message.lag_ms
        unit.backlog, unit.context_rows = message.backlog_units, message.kv_cache_length
        if not message.is_listen:
            if not self.turn_open:
                self.turns.append(HeardTurn(unit.index, unit.index, ""))
            self.turns[-1].text += message.text
        if self.turns and (self.turn_open or not message.is_listen):
            self.turns[-1].end = unit.index
        self.turn_open = not message.is_listen and not message.end_of_turn
        return unit

    def failed(self, message: Error, now: float) -> ClientUnitLog | None:
        """Returns: the unit that came to nothing; None for an error that belongs to none."""
        if not self._open:
            return None
        unit = self._open.popleft()
        unit.decision, unit.reply_ms = "FAILED", 1000 * (now - unit.sent)
        unit.error = f"{message.code}: {message.error}"
        return unit

    def summary(self) -> dict[str, Any]:
        """Counts, and percentiles in ms; None where there is nothing to take them of."""
        answered = [unit for unit in self.units if unit.decision]
        replies = [unit.reply_ms for unit in answered if unit.decision != "FAILED"]
        firsts = [unit.first_sound_ms for unit in answered if unit.first_sound_ms is not None]
        return {
            "units": len(self.units),
            "answered": len(answered),
            "spoken": sum(unit.decision == "SPEAK" for unit in answered),
            "failed": self.n_failed,
            "turns": len(self.turns),
            "sound_s": round(sum(unit.n_samples for unit in self.units) / SOUND_RATE, DIGITS),
            "reply_ms": percentiles(replies),
            "first_sound_ms": percentiles(firsts),
            "deadline_misses": sum(ms > DEADLINE_MS for ms in replies),
        }

    def as_json(self, head: dict[str, Any]) -> str:
        """The transcript: `head`, then summary, turns and units."""
        turns, units = [asdict(turn) for turn in self.turns], [unit.as_json() for unit in self.units]
        document = {**head, "summary": self.summary(), "turns": turns, "units": units}
        return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p95 and the largest."""
    if not values:
        return None
    p50, p95 = np.percentile(values, (50, 95))
    return {"p50": round(float(p50), DIGITS), "p95": round(float(p95), DIGITS), "max": round(max(values), DIGITS)}
