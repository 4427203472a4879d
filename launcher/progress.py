"""What people see: a worker's /health as one line, and lines that live on a terminal or are printed one by one.

Knows words and the terminal. Does not know processes, nor when to ask.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

STAGES = {"LOADING": "loading", "COMPILING": "compiling", "WARMING_UP": "warming up"}
STAGE_WIDTH = max(map(len, STAGES.values()))
SECONDS_WIDTH = len("99.9 s")
BAR = 12  # characters
MIN_S = 1.0  # between two printed lines of one worker
UP_AND_CLEAR = "\x1b[{n}F\x1b[J"


@dataclass(frozen=True)
class LiveLine:
    """A line that lives. key: what has to change before it is printed again where lines cannot be rewritten."""

    key: object
    text: str


# --- health as text -------------------------------------------------------------------------------


def starting_line(name: str, body: Mapping[str, Any] | None, seconds: float) -> LiveLine:
    """How far a worker is. body: of /health, None if it does not answer yet. seconds: since it was started."""
    if body is None:
        return LiveLine("starting", f"{name}  {'starting':<{STAGE_WIDTH}}  {_seconds(seconds)}")
    state = str(body.get("state"))
    stage = STAGES.get(state, state.lower())
    progress = body.get("progress") or {}
    what, done, total = progress.get("what") or "", progress.get("done") or 0, progress.get("total") or 0
    # What may be cut off on a narrow terminal comes last.
    cells = [name, f"{stage:<{STAGE_WIDTH}}", f"{_seconds(seconds):<{SECONDS_WIDTH}}"]
    if total:
        n = round(BAR * min(done, total) / total)
        cells += [f"[{'=' * n}{' ' * (BAR - n)}]", f"{done}/{total} {what}".rstrip()]
    elif what:
        cells.append(what)
    return LiveLine((state, what, done, total), "  ".join(cells).rstrip())


def ready_text(name: str, body: Mapping[str, Any], seconds: float) -> str:
    """What a worker that got ready is: how long it took, slots, device, what compiling found in its cache."""
    stages = body.get("start_seconds") or {}
    took = ", ".join(f"{STAGES.get(stage, stage.lower())} {_seconds(s)}" for stage, s in stages.items())
    parts = [_counted(n_slots(body), "slot"), _device(body)]
    if body.get("model", {}).get("speaks") is False:
        parts.append("without a vocoder: text only")
    compiling = body.get("compile") or {}
    if cache := compiling.get("cache"):
        parts.append(f"compile cache: {cache.get('hits', 0)} hits, {cache.get('misses', 0)} misses")
    fell_back = [name for name, one in (compiling.get("targets") or {}).items() if one.get("error")]
    if fell_back:
        parts.append(f"not compiled: {', '.join(fell_back)} (/compile_report tells why)")
    return f"{name}  ready in {_seconds(seconds)}{f' ({took})' if took else ''}: {', '.join(parts)}"


def n_slots(body: Mapping[str, Any]) -> int:
    return int((body.get("slots") or {}).get("total") or 0)


def totals_text(n_ready: int, n_workers: int, n_slots: int) -> str:
    """`2 workers, 8 slots`, or `1 of 2 workers, 4 slots`."""
    workers = _counted(n_workers, "worker") if n_ready == n_workers else f"{n_ready} of {_counted(n_workers, 'worker')}"
    return f"{workers}, {_counted(n_slots, 'slot')}"


def _device(body: Mapping[str, Any]) -> str:
    device = body.get("device") or {}
    kind, name = device.get("type") or "unknown device", device.get("name")
    return str(name) if name and kind != "cpu" else str(kind)


def _counted(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


def _seconds(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02} s"


# --- printing -------------------------------------------------------------------------------------


class Board:
    """Lines that stay, and below them lines that live: rewritten in place on a terminal, else printed as they change.

    Whoever reads may go away at any time; nothing is printed then, and nothing else happens.
    """

    def __init__(self, stream: TextIO, *, is_terminal: bool | None = None, clock: Callable[[], float] = time.monotonic):
        """is_terminal: None: found out."""
        self._stream, self._clock = stream, clock
        if is_terminal is None:
            is_terminal = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._is_terminal = is_terminal
        self._living: dict[str, LiveLine] = {}
        self._n_drawn = 0
        self._printed: dict[str, tuple[object, float]] = {}  # name -> key and time of the last printed line

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._is_terminal:
            self._draw([text])
        else:
            self._write(f"{text}\n")

    def show(self, name: str, line: LiveLine) -> None:
        """Set a living line; names keep the order in which they came."""
        is_new = self._living.get(name) != line
        self._living[name] = line
        if self._is_terminal:
            if is_new:
                self._draw([])
            return
        key, printed_at = self._printed.get(name, (None, float("-inf")))
        if key != line.key and self._clock() - printed_at >= MIN_S:
            self._printed[name] = line.key, self._clock()
            self._write(f"{line.text}\n")

    def drop(self, name: str) -> None:
        """A living line that is over."""
        self._printed.pop(name, None)
        if self._living.pop(name, None) is not None and self._is_terminal:
            self._draw([])

    def _draw(self, above: list[str]) -> None:
        width = self._width()
        # A living line that wraps could not be found again; one that stays may.
        living = [line.text[: width - 1] for line in self._living.values()]
        erase = UP_AND_CLEAR.format(n=self._n_drawn) if self._n_drawn else ""
        self._n_drawn = len(living)
        self._write(erase + "".join(f"{text}\n" for text in above + living))

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal or the pipe's other end is gone
            pass
