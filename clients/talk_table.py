"""A line for each unit, in columns, and the lines around them. Knows records and widths; does not print."""

from collections.abc import Sequence
from typing import Any

from clients.record import ClientUnitLog
from worker.protocol.messages import Queued, QueueUpdate

# Times in ms. reply, first: from sending a unit to its result and its first sound; server: what it took there.
COLUMNS = ("unit", "decision", "reply", "first", "server", "headroom", "backlog")
MIN_WIDTH = 7
END_OF_TURN = " (end of turn)"


def header() -> str:
    return _line(COLUMNS, "text")


def row(unit: ClientUnitLog) -> str:
    """A unit's line. Its text is written as Python would, so that nothing in it moves the cursor."""
    times = [_ms(one) for one in (unit.reply_ms, unit.first_sound_ms, unit.server_ms, unit.headroom_ms)]
    text = repr(unit.text) + END_OF_TURN * unit.end_of_turn if unit.error is None else repr(unit.error)
    return _line([str(unit.index), unit.decision, *times, str(unit.backlog)], text)


def waiting(message: Queued | QueueUpdate) -> str:
    """Where a client stands in the queue."""
    place = f"place {message.position} of {message.queue_length}"
    return f"waiting: {place}, about {message.estimated_wait_s:.0f} s"


def closing(summary: dict[str, Any]) -> str:
    """What a conversation adds up to."""
    lines = [
        f"{summary['units']} units, {summary['spoken']} spoken in {summary['turns']} turns, "
        f"{summary['sound_s']:.1f} s of sound, {summary['failed']} failed"
    ]
    for key, name in (("reply_ms", "reply"), ("first_sound_ms", "first sound")):
        if (ms := summary[key]) is not None:
            lines.append(f"{name}: p50 {ms['p50']:.1f}, p95 {ms['p95']:.1f}, max {ms['max']:.1f} ms")
    lines.append(f"deadline misses: {summary['deadline_misses']} results later than 1 s after their unit")
    return "\n".join(lines)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _line(cells: Sequence[str], text: str) -> str:
    left = " ".join(
        cell.rjust(max(len(name), 0 if name == "unit" else MIN_WIDTH))
        for cell, name in zip(cells, COLUMNS, strict=True)
    )
    return f"{left} | {text}"
