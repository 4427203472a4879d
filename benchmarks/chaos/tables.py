"""The tables as lines of text and as Markdown, and their place between markers in a page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEAD = ("fault", "noticed by, after", "next result", "lost sound", "lost text", "neighbours")
BEGIN, END = "<!-- chaos: {name} -->", "<!-- end of {name} -->"
Rows = Sequence[Sequence[str]]


def on_screen(rows: Rows) -> str:
    """Columns padded to their widest cell."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def markdown(rows: Rows) -> str:
    """A table of Markdown; the first row is its head."""
    head, *others = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join((head, "|" + "---|" * len(rows[0]), *others))


def fault_table(result: dict[str, Any]) -> str:
    """The faults of a run with its conditions, as Markdown."""
    return f"{_conditions(result)}\n\n{markdown((HEAD, *result['table']))}"


def kill_table(kill: dict[str, Any], result: dict[str, Any] | None = None) -> Any:
    """The kills of a run: rows, or Markdown with the conditions of `result`."""
    times, back, sound = kill["next_result_s"], kill["worker_back_s"], kill["lost_sound_s"]
    n, shorter = kill["sessions"], kill["shorter_sound_s"]
    rows = [
        ("figure", "measured"),
        ("kills after which all sessions went on", f"{kill['kills_all_resumed']} of {kill['kills']}"),
        ("sessions of killed workers that went on", f"{kill['resumed']} of {n}"),
        ("time to the next result, p50 / p95 / maximum", _three(times)),
        ("transcripts identical up to the gap", f"{kill['same_before']} of {n}"),
        ("transcripts identical after the gap as well", f"{kill['same_after']} of {n}"),
        ("sessions with a unit without a result", f"{kill['lost_units']} of {n}"),
        ("sound that a session lost in all its kills, p50 / p95 / maximum", _three(sound)),
        ("sessions whose speech model ended a turn sooner", f"{kill['shorter']} of {n}, by at most {shorter:.2f} s"),
        ("time until the worker is back, p50 / p95 / maximum", _three(back)),
    ]
    return rows if result is None else f"{_conditions(result)}\n\n{markdown(rows)}"


def _three(values: dict[str, float]) -> str:
    return " / ".join(f"{values[key]:.2f}" for key in ("p50", "p95", "max")) + " s" if values else "-"


def _conditions(result: dict[str, Any]) -> str:
    facts = result["environment"]
    texts = [
        f"`{' '.join(result['command'])}`, {facts['date'][:10]}",
        f"{facts['cpu']}, load average {facts['load_average']:.1f} before the run",
        f"Python {facts['python']}, torch {facts['torch']}.",
    ]
    return f"{', '.join(texts)} {result['condition']}".strip()


def replace_part(path: Path, name: str, text: str) -> None:
    """Replace what is between two markers of a file. Raises: ValueError if they are missing."""
    begin, end = BEGIN.format(name=name), END.format(name=name)
    page = path.read_text(encoding="utf-8")
    if begin not in page or end not in page:
        raise ValueError(f"{path}: expected the lines {begin} and {end}, got a page without them")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
