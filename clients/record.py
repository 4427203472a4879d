"""The log of a conversation on the client's side: times, text and turns of each unit, and a summary.

Contains no sockets, files or sound; the caller passes messages and clock readings.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from clients.turn_wait import TurnWait
from worker.protocol.messages import Error, Result
from worker.protocol.wire import SOUND_RATE
from worker.transcript.turns import Turn, TurnBuilder

DEADLINE_MS = 1000.0  # the length of a unit; sound of a later result arrives after playback needs it
DIGITS = 3
WAIT_PARTS = tuple(field.name for field in fields(TurnWait))


@dataclass
class ClientUnitLog:
    """One unit.

    Attributes:
        index: its number, from 0.
        sent: the time of sending, on the caller's clock, in s.
        heard_s: the time its sound was complete, in s since the start of the conversation.
        speech_end_s: the end of the newest speech in the sound up to here, in s since the start of the conversation.
        decision: LISTEN, SPEAK or FAILED; "" without an answer.
        text: its text.
        end_of_turn: whether a turn ends with it.
        reply_ms: time from sending to the result.
        first_sound_ms: time from sending to the first sound; None without sound.
        server_ms, headroom_ms, lag_ms, backlog, context_rows: as in the server's result.
        early, shift_ms: as in the server's result, of a unit that ran before its second was full.
        wait: for the first sound of a turn that begins with it, in ms by part; None where it is not known.
        n_samples: length of its sound.
        sound_start: start of its sound on the time line, in samples at 24 kHz; None without sound.
        error: code and text of its error.
    """

    index: int
    sent: float
    heard_s: float
    speech_end_s: float | None = None
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
    early: bool | None = None
    shift_ms: float | None = None
    wait: TurnWait | None = None
    n_samples: int = 0
    sound_start: int | None = None
    error: str | None = None

    def arrived_s(self, now: float) -> float:
        """`now` on the clock of `sent`, converted to s since the start of the conversation."""
        return self.heard_s + now - self.sent

    def as_json(self) -> dict[str, Any]:
        """The fields that are not None, except `sent`, rounded."""
        given = {key: value for key, value in asdict(self).items() if value is not None and key != "sent"}
        if self.wait is not None:
            given["wait"] = {**_rounded(given["wait"]), "total": round(self.wait.total, DIGITS)}
        return _rounded(given)


class TalkLog:
    """The units of a conversation in the order they were sent, which is the order of their answers.

    Attributes:
        units: all units.
    """

    def __init__(self) -> None:
        self.units: list[ClientUnitLog] = []
        self._turns = TurnBuilder()
        self._open: deque[ClientUnitLog] = deque()
        self._answered_s = 0.0  # end of the speech that the last turn has answered

    @property
    def turns(self) -> list[Turn]:
        """All turns, including an open one."""
        return self._turns.turns

    @property
    def turn_open(self) -> bool:
        """Whether the last result speaks and does not end its turn."""
        return self._turns.is_open

    @property
    def n_open(self) -> int:
        """Units without an answer."""
        return len(self._open)

    @property
    def n_failed(self) -> int:
        """Units that were answered with an error."""
        return sum(unit.decision == "FAILED" for unit in self.units)

    def sent(self, now: float, heard_s: float, speech_end_s: float | None = None) -> ClientUnitLog:
        """Add a unit, or a piece of one, that is being sent.

        now: on the caller's clock, in s. heard_s, speech_end_s: as in `ClientUnitLog`.
        """
        unit = ClientUnitLog(len(self.units), now, heard_s, speech_end_s)
        self.units.append(unit)
        self._open.append(unit)
        return unit

    def current(self) -> ClientUnitLog | None:
        """The unit that the next message belongs to."""
        return self._open[0] if self._open else None

    def sounded(self, unit: ClientUnitLog, now: float, n_samples: int, begin: int) -> None:
        """Add sound of a unit. now: its arrival. begin: its start on the time line, in samples."""
        if unit.first_sound_ms is None:
            unit.first_sound_ms, unit.sound_start = 1000 * (now - unit.sent), begin
        unit.n_samples += n_samples

    def answered(self, message: Result, now: float) -> ClientUnitLog | None:
        """Complete the current unit with its result.

        Returns: the unit; None for an unexpected result, and for one of a piece that does not complete its unit: the
            unit is logged with the piece that does.
        """
        if not self._open:
            return None
        unit = self._open.popleft()
        if message.incomplete:
            self._leave_out(unit)
            return None
        unit.decision = "LISTEN" if message.is_listen else "SPEAK"
        unit.text, unit.end_of_turn = message.text, message.end_of_turn
        unit.reply_ms, unit.server_ms = 1000 * (now - unit.sent), message.wall_clock_ms
        unit.headroom_ms, unit.lag_ms = message.headroom_ms, message.lag_ms
        unit.backlog, unit.context_rows = message.backlog_units, message.kv_cache_length
        unit.early, unit.shift_ms = message.early, message.shift_ms
        speaks = not message.is_listen
        if speaks and not self.turn_open:
            unit.wait = self._wait(unit, message)
        self._turns.add(
            unit.index,
            message.text if speaks else "",
            belongs=speaks or self.turn_open,
            goes_on=speaks and not message.end_of_turn,
        )
        return unit

    def failed(self, message: Error, now: float) -> ClientUnitLog | None:
        """Complete the current unit with an error. Returns: the unit; None for an error without one."""
        if not self._open:
            return None
        unit = self._open.popleft()
        unit.decision, unit.reply_ms = "FAILED", 1000 * (now - unit.sent)
        unit.error = f"{message.code}: {message.error}"
        return unit

    def _wait(self, unit: ClientUnitLog, result: Result) -> TurnWait | None:
        """The wait for a turn that begins with this unit; None without sound or without speech that it answers."""
        spoken_s, first_ms, start = unit.speech_end_s, unit.first_sound_ms, unit.sound_start
        if spoken_s is None or spoken_s <= self._answered_s or first_ms is None or start is None:
            return None
        self._answered_s = spoken_s
        arrived_s = unit.heard_s + first_ms / 1000
        return TurnWait.of(
            result,
            alignment=1000 * (unit.heard_s - spoken_s),
            first_sound=first_ms,
            playback=1000 * (start / SOUND_RATE - arrived_s),
        )

    def _leave_out(self, piece: ClientUnitLog) -> None:
        del self.units[piece.index]
        for later in self._open:
            later.index -= 1

    def summary(self) -> dict[str, Any]:
        """Counts, and percentiles in ms; None for percentiles without values."""
        answered = [unit for unit in self.units if unit.decision]
        replies = [unit.reply_ms for unit in answered if unit.decision != "FAILED" and unit.reply_ms is not None]
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
            "early": sum(bool(unit.early) for unit in answered),
            "wait_ms": self._waits(),
        }

    def _waits(self) -> dict[str, dict[str, float]] | None:
        """Percentiles of the waits for turns, whole and by part; None without any."""
        waits = [unit.wait for unit in self.units if unit.wait is not None]
        parts = {name: percentiles([getattr(wait, name) for wait in waits]) for name in ("total", *WAIT_PARTS)}
        return {name: found for name, found in parts.items() if found is not None} or None

    def as_json(self, head: dict[str, Any]) -> str:
        """The transcript as JSON: `head`, then summary, turns and units."""
        turns, units = [asdict(turn) for turn in self.turns], [unit.as_json() for unit in self.units]
        document = {**head, "summary": self.summary(), "turns": turns, "units": units}
        return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, DIGITS) if isinstance(value, float) else value for key, value in values.items()}


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p95 and the maximum; None without values."""
    if not values:
        return None
    p50, p95 = np.percentile(values, (50, 95))
    return {"p50": round(float(p50), DIGITS), "p95": round(float(p95), DIGITS), "max": round(max(values), DIGITS)}
