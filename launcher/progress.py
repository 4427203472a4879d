"""The launcher's output: /health of a worker as one line of text, and a display for permanent and live lines.

Does not query processes; the supervisor passes in every text.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

STAGES = {"LOADING": "loading", "COMPILING": "compiling", "WARMING_UP": "warming up"}
STAGE_WIDTH = max(map(len, STAGES.values()))
SECONDS_WIDTH = len("99.9 s")
BAR_WIDTH = 12  # characters
MIN_INTERVAL_S = 1.0  # between two printed lines of one name, where the output is no terminal


@dataclass(frozen=True)
class LiveLine:
    """A line that is replaced in place.

    key: where the output is no terminal, the line is printed again only after its key changed.
    """

    key: object
    text: str


# --- health as text -------------------------------------------------------------------------------


def starting_line(name: str, body: Mapping[str, Any] | None, seconds: float) -> LiveLine:
    """The progress of a worker that starts.

    Args:
        name: label of the worker.
        body: JSON body of /health; None if the worker does not answer yet.
        seconds: time since the process started.
    """
    if body is None:
        return LiveLine("starting", f"{name}  {'starting':<{STAGE_WIDTH}}  {_seconds(seconds)}")
    state = str(body.get("state"))
    stage = STAGES.get(state, state.lower())
    progress = body.get("progress") or {}
    what, done, total = progress.get("what") or "", progress.get("done") or 0, progress.get("total") or 0
    # A narrow terminal cuts off the end of the line, so the least important part comes last.
    cells = [name, f"{stage:<{STAGE_WIDTH}}", f"{_seconds(seconds):<{SECONDS_WIDTH}}"]
    if total:
        n = round(BAR_WIDTH * min(done, total) / total)
        cells += [f"[{'=' * n}{' ' * (BAR_WIDTH - n)}]", f"{done}/{total} {what}".rstrip()]
    elif what:
        cells.append(what)
    return LiveLine((state, what, done, total), "  ".join(cells).rstrip())


def ready_text(name: str, body: Mapping[str, Any], seconds: float) -> str:
    """A worker's start time, slots, device and compile cache hits, from the body of /health, after it became ready."""
    stages = body.get("start_seconds") or {}
    took = ", ".join(f"{STAGES.get(stage, stage.lower())} {_seconds(s)}" for stage, s in stages.items())
    parts = [*_served(body), _device(body)]
    if body.get("model", {}).get("speaks") is False:
        parts.append("without a vocoder: text only")
    compiling = body.get("compile") or {}
    if cache := compiling.get("cache"):
        parts.append(f"compile cache: {cache.get('hits', 0)} hits, {cache.get('misses', 0)} misses")
    fell_back = [name for name, one in (compiling.get("targets") or {}).items() if one.get("error")]
    if fell_back:
        parts.append(f"not compiled: {', '.join(fell_back)} (see /compile_report)")
    return f"{name}  ready in {_seconds(seconds)}{f' ({took})' if took else ''}: {', '.join(parts)}"


def _served(body: Mapping[str, Any]) -> list[str]:
    """The models of a worker with their slots; slots of sessions if nothing names a model."""
    models = body.get("models") or {}
    served = [] if models.get("omni") is False else [_counted(n_slots(body), "slot")]
    if speech := models.get("speech"):
        served.append(f"speech model with {_counted(int(speech['slots']['total']), 'slot')}")
    return served


def n_slots(body: Mapping[str, Any]) -> int:
    """Number of slots in the body of /health."""
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


class StatusDisplay:
    """Permanent lines, and below them live lines.

    On a terminal, live lines are replaced in place and removed when the display closes. Elsewhere, a live line is
    printed when its key changes. A closed terminal or pipe is ignored: the launcher runs on without output.
    """

    def __init__(self, stream: TextIO, *, is_terminal: bool | None = None, clock: Callable[[], float] = time.monotonic):
        """is_terminal: None detects it from the stream and the environment."""
        self._stream, self._clock = cast("TextIO", _LossyStream(stream)), clock  # has the methods that are used
        if is_terminal is None:
            is_terminal = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._lines: dict[str, LiveLine] = {}
        self._printed: dict[str, tuple[object, float]] = {}  # name -> key and time of the last printed line
        self._console: Console | None = None
        if is_terminal:
            self._console = Console(file=self._stream, force_terminal=True, color_system=None, highlight=False)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.clear()
        self._refresh()

    def print_line(self, text: str) -> None:
        """Print a permanent line, above the live lines."""
        if self._console is None:
            self._stream.write(f"{text}\n")
            self._stream.flush()
        else:
            self._console.print(Text(text), soft_wrap=True)

    def update(self, name: str, line: LiveLine) -> None:
        """Set the live line of `name`. Lines keep the order in which their names were first set."""
        is_new = self._lines.get(name) != line
        self._lines[name] = line
        if self._console is not None:
            if is_new:
                self._refresh()
            return
        key, printed_at = self._printed.get(name, (None, float("-inf")))
        if key != line.key and self._clock() - printed_at >= MIN_INTERVAL_S:
            self._printed[name] = line.key, self._clock()
            self.print_line(line.text)

    def remove(self, name: str) -> None:
        """Remove the live line of `name`, if there is one."""
        self._printed.pop(name, None)
        if self._lines.pop(name, None) is not None:
            self._refresh()

    def _refresh(self) -> None:
        """Draw the live lines on a terminal; end the live region if there are none."""
        if self._console is None:
            return
        if self._lines:
            if self._live is None:
                self._live = Live(
                    console=self._console,
                    auto_refresh=False,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()
            lines = [Text(line.text, no_wrap=True, overflow="crop") for line in self._lines.values()]
            self._live.update(Group(*lines), refresh=True)
        elif self._live is not None:
            self._live.stop()
            self._live = None


class _LossyStream:
    """A text stream that discards what cannot be written because the terminal or the pipe's reader is gone."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"  # read by rich

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()
