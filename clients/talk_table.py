"""The table of a conversation: one line per unit, the queue position, the summary. Formats text; does not print."""

from typing import Any

from clients.record import ClientUnitLog
from clients.turn_wait import TurnWait
from worker.protocol.gateway_messages import Queued, QueueUpdate
from worker.transcript.table import Columns, quoted

UNIT = Columns(("unit",))
# Times in ms. reply, first: from sending a unit to its result and to its first sound; server: the server's own time.
FACTS = Columns(("decision", "reply", "first", "server", "headroom", "backlog"), min_width=7)


def header() -> str:
    """The names of the columns."""
    return f"{UNIT.line(UNIT.names)} {FACTS.line(FACTS.names)} | text"


def row(unit: ClientUnitLog) -> str:
    """The line of a unit."""
    times = [_ms(one) for one in (unit.reply_ms, unit.first_sound_ms, unit.server_ms, unit.headroom_ms)]
    text = quoted(unit.text, ends_turn=unit.end_of_turn) if unit.error is None else repr(unit.error)
    line = f"{UNIT.line([str(unit.index)])} {FACTS.line([unit.decision, *times, str(unit.backlog)])} | {text}"
    return line if unit.wait is None else f"{line}\n{_wait(unit.wait)}"


def waiting(message: Queued | QueueUpdate) -> str:
    """The client's position in the queue."""
    place = f"place {message.position} of {message.queue_length}"
    return f"waiting: {place}, about {message.estimated_wait_s:.0f} s"


def closing(summary: dict[str, Any]) -> str:
    """The lines after the table, from `TalkLog.summary`."""
    lines = [
        f"{summary['units']} units, {summary['spoken']} spoken in {summary['turns']} turns, "
        f"{summary['sound_s']:.1f} s of sound, {summary['failed']} failed"
    ]
    for key, name in (("reply_ms", "reply"), ("first_sound_ms", "first sound")):
        if (ms := summary[key]) is not None:
            lines.append(f"{name}: p50 {ms['p50']:.1f}, p95 {ms['p95']:.1f}, max {ms['max']:.1f} ms")
    if (waits := summary["wait_ms"]) is not None:
        p50, p95 = (", ".join(f"{name} {ms[which]:.0f}" for name, ms in waits.items()) for which in ("p50", "p95"))
        lines += [f"end of speech to sound, p50: {p50} ms", f"end of speech to sound, p95: {p95} ms"]
    lines.append(f"deadline misses: {summary['deadline_misses']} results later than 1 s after their unit")
    return "\n".join(lines)


def _wait(wait: TurnWait) -> str:
    """The wait for the turn that begins with the unit above, by part."""
    saved = f" (saved {wait.saved:.0f})" if wait.saved else ""
    parts = f"model {wait.model:.0f}, vocoder {wait.vocoder:.0f}, transport {wait.transport:.0f}"
    whole = f"end of speech to sound {wait.total:.0f} ms: alignment {wait.alignment:.0f}{saved}"
    return f"     {whole}, {parts}, playback {wait.playback:.0f}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
