"""Observes torch.compile: graph breaks with reasons, recompiles with guards, skipped CUDA graphs, seconds.

It reads torch's compile records and log messages, and restores the logging configuration at the end. It has no cost
while nothing compiles, because compilations call it through callbacks.
"""

import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from models.graphs.compiler import is_loaded
from worker.report.compile_report import GraphBreak, Live, Recompile

# Names of torch's loggers, so that listening does not import the compiler.
BREAKS = tuple(f"torch._dynamo.{name}.__graph_breaks" for name in ("symbolic_convert", "convert_frame", "exc"))
SKIPS = tuple(f"torch._inductor.{name}.__cudagraphs" for name in ("cudagraph_utils", "cudagraph_trees"))
SETTLE_S = 0.1  # torch writes its record shortly after the end callback of a compilation
MAX_LAST = 20

_PLACE = re.compile(r"in user code at (.+):(\d+)")
_FRAME = re.compile(r'File "(.+)", line (\d+)')
_SOURCE = re.compile(r"([^/\s]+\.py:\d+) in \S+$")


@dataclass
class Happened:
    """Compile events within a span of time. failures: functions that stay eager, with the reason."""

    n_compiled: int = 0
    seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    graph_breaks: list[GraphBreak] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    skips: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, other: "Happened") -> None:
        """Add later events to these."""
        self.n_compiled += other.n_compiled
        self.seconds += other.seconds
        self.hits += other.hits
        self.misses += other.misses
        self.graph_breaks = merged([*self.graph_breaks, *other.graph_breaks])
        self.recompiles += other.recompiles
        self.skips = list(dict.fromkeys([*self.skips, *other.skips]))
        self.failures = list(dict.fromkeys([*self.failures, *other.failures]))


def merged(breaks: Iterable[GraphBreak]) -> list[GraphBreak]:
    """Graph breaks with equal ones merged into one, with their count."""
    counts: dict[tuple[str, str], int] = {}
    for one in breaks:
        counts[one.where, one.reason] = counts.get((one.where, one.reason), 0) + one.count
    return [GraphBreak(where=where, reason=reason, count=n) for (where, reason), n in counts.items()]


class CompileWatch:
    """Counts compile events from `start` to `stop`, also as a context manager. Thread-safe.

    log: if given, each event is logged there as a warning, for a worker that serves and should not compile.
    """

    def __init__(self, log: logging.Logger | None = None):
        self._log = log
        self._lock = threading.Lock()
        self._newest: Any = None  # latest torch record that was read
        self._fresh = Happened()  # since `take`
        self._counts = Live()
        self._last: deque[str] = deque(maxlen=MAX_LAST)
        self._undo = ExitStack()
        self._is_on = False
        self._is_called = False  # the end callback is registered

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start counting."""
        self._newest = next(reversed(_records()), None)
        for name in BREAKS:
            self._listen(name, logging.DEBUG, _Listener(self._broke))
        for name in SKIPS:
            self._listen(name, logging.WARNING, _Listener(self._skipped))
        self._register()
        self._is_on = True

    def stop(self) -> None:
        """Stop counting, and restore logging and callbacks."""
        self.poll()
        with self._lock:
            self._is_on = self._is_called = False
            self._undo.close()

    def take(self) -> Happened:
        """The events since the previous call."""
        self.poll()
        with self._lock:
            taken, self._fresh = self._fresh, Happened()
        return taken

    def counts(self) -> Live:
        """The counters since `start`."""
        self.poll()
        with self._lock:
            return self._counts.model_copy(update={"last": list(self._last)})

    def poll(self) -> None:
        """Read and count torch's new records; the other methods call it."""
        with self._lock:
            if not self._is_on:
                return
            self._register()
            records = _records()
            known = next((at for at, one in enumerate(records) if one is self._newest), -1)
            fresh = records[known + 1 :]
            if fresh:
                self._newest = fresh[-1]
            for record in fresh:
                self._note(_read(record))

    def _listen(self, name: str, level: int, listener: logging.Handler) -> None:
        """Add a handler to a torch logger. A logger that was disabled does not reach other handlers."""
        logger = logging.getLogger(name)
        if not logger.isEnabledFor(level):
            self._undo.callback(setattr, logger, "propagate", logger.propagate)
            self._undo.callback(logger.setLevel, logger.level)
            logger.propagate = False
            logger.setLevel(level)
        logger.addHandler(listener)
        self._undo.callback(logger.removeHandler, listener)

    def _register(self) -> None:
        """Register the end callback, once the compiler is loaded; earlier events are counted at the next poll."""
        if self._is_called or not is_loaded():
            return
        from torch._dynamo.callback import callback_handler  # an earlier import would load the compiler

        callback_handler.register_end_callback(self._ended)
        self._undo.callback(self._unregister)
        self._is_called = True

    def _unregister(self) -> None:
        from torch._dynamo.callback import callback_handler

        if self._ended in callback_handler.end_callbacks:  # torch._dynamo.reset() drops all callbacks
            callback_handler.remove_end_callback(self._ended)

    def _ended(self, _: Any) -> None:
        self.poll()
        if self._log is not None:
            timer = threading.Timer(SETTLE_S, self.poll)
            timer.daemon = True
            timer.start()

    def _broke(self, record: logging.LogRecord) -> None:
        with self._lock:
            self._note(Happened(graph_breaks=[graph_break(record)]))

    def _skipped(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "skip" in text or "disabling" in text:
            with self._lock:
                self._note(Happened(skips=[text.strip()]))

    def _note(self, new: Happened) -> None:
        """Count events and log them; the caller holds the lock."""
        self._fresh.add(new)
        lines = [f"graph break at {one.where}: {one.reason}" for one in new.graph_breaks]
        lines += [f"recompiled {one.function} ({one.where}): {one.guard}" for one in new.recompiles]
        lines += [f"CUDA graphs skipped: {reason}" for reason in new.skips]
        lines += [f"stays eager: {reason}" for reason in new.failures]
        if new.n_compiled and not lines:
            lines = [f"compiled a graph in {new.seconds:.2f} s"]
        before = self._counts
        self._counts = Live(
            compiles=before.compiles + new.n_compiled,
            recompiles=before.recompiles + len(new.recompiles),
            graph_breaks=before.graph_breaks + len(new.graph_breaks),
            graph_skips=before.graph_skips + len(new.skips),
            failures=before.failures + len(new.failures),
            seconds=before.seconds + new.seconds,
            hits=before.hits + new.hits,
            misses=before.misses + new.misses,
        )
        self._last.extend(lines)
        if self._log is not None:
            for line in lines:
                self._log.warning("compile: %s", line)


def _records() -> list[Any]:
    """torch's records of compilations, oldest first."""
    if not is_loaded():
        return []
    from torch._dynamo.utils import get_compilation_metrics

    return list(get_compilation_metrics())


class _Listener(logging.Handler):
    def __init__(self, handle_record: Callable[[logging.LogRecord], None]):
        super().__init__()
        self._handle_record = handle_record

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._handle_record(record)
        except Exception:  # an error here must not end the compilation
            self.handleError(record)


def graph_break(record: logging.LogRecord) -> GraphBreak:
    """The graph break in a torch log record: its place, and its reason with the explanation."""
    text = record.getMessage()
    head, _, _ = text.partition("\nUser code traceback")
    places, reason = _PLACE.findall(head), head.partition("Graph Break Reason: ")[2]
    if not places:  # a whole function stays eager; the reason is the error
        places = _FRAME.findall(text)
        error = record.exc_info[1] if record.exc_info else None
        reason = str(error or head)
    where = ":".join(places[-1]) if places else "unknown place"
    return GraphBreak(where=where, reason=_reason(reason))


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    # A line that ends with a colon introduces the reason.
    first = next((line for line in lines if line and not line.endswith(":")), "no reason given")
    explained = next((line for line in lines if line.startswith("Explanation:")), None)
    return f"{first}: {explained.removeprefix('Explanation:').strip()}" if explained else first


def _read(record: Any) -> Happened:
    """The events of one torch record. Fields differ between torch versions."""

    def value(name: str) -> Any:
        return getattr(record, name, None)

    new = Happened(seconds=value("entire_frame_compile_time_s") or 0.0)
    if value("is_runtime"):  # autotuning or capturing at run time, of a graph that was counted
        return new
    where = f"{value('co_filename')}:{value('co_firstlineno')}"
    if value("fail_type"):
        whose = f"{value('co_name')} ({where})" if value("co_name") else "a function"
        new.failures.append(f"{whose}: {value('fail_type')}: {_reason(str(value('fail_reason') or ''))}")
        return new
    new.n_compiled = int(bool(value("has_guarded_code")) or value("is_forward") is False)
    new.hits = value("inductor_fx_local_cache_hit_count") or 0
    new.misses = value("inductor_fx_local_cache_miss_count") or 0
    if guard := value("recompile_reason"):
        new.recompiles.append(
            Recompile(function=str(value("co_name")), where=where, guard=_guard(guard), seconds=new.seconds)
        )
    return new


def _guard(text: str) -> str:
    """The failed check and its source line, without the number of the graph."""
    text = re.sub(r"^\d+/\d+: ", "", text.partition("\nUser stack trace")[0].strip())
    check, _, comment = text.partition("  # ")
    source = _SOURCE.search(comment)
    return " ".join(check.split()) + (f" ({source[1]})" if source else "")
