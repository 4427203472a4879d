"""Watches torch.compile at work: graph breaks with reasons, recompiles with guards, CUDA graphs skipped, seconds.

Knows where torch tells of its compiling, and leaves everybody's logging as it was. Does not know what is compiled. It
costs nothing while nothing compiles: all of it hangs on callbacks that only a compilation calls.
"""

import logging
import re
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from models.graphs.compiler import is_loaded
from worker.report.compile_report import GraphBreak, Live, Recompile

# torch's loggers by what they tell; named here so that nothing of the compiler need be imported to listen.
BREAKS = tuple(f"torch._dynamo.{name}.__graph_breaks" for name in ("symbolic_convert", "convert_frame", "exc"))
SKIPS = tuple(f"torch._inductor.{name}.__cudagraphs" for name in ("cudagraph_utils", "cudagraph_trees"))
SETTLE_S = 0.1  # torch writes its record just behind the callback at a compilation's end
MAX_LAST = 20

_PLACE = re.compile(r"in user code at (.+):(\d+)")
_FRAME = re.compile(r'File "(.+)", line (\d+)')
_SOURCE = re.compile(r"([^/\s]+\.py:\d+) in \S+$")


@dataclass
class Happened:
    """What compiling did in a stretch of time. failures: functions that stay eager, with the reason."""

    n_compiled: int = 0
    seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    graph_breaks: list[GraphBreak] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    skips: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, other: "Happened") -> None:
        """Take in what happened later."""
        self.n_compiled += other.n_compiled
        self.seconds += other.seconds
        self.hits += other.hits
        self.misses += other.misses
        self.graph_breaks = merged([*self.graph_breaks, *other.graph_breaks])
        self.recompiles += other.recompiles
        self.skips = list(dict.fromkeys([*self.skips, *other.skips]))
        self.failures = list(dict.fromkeys([*self.failures, *other.failures]))


def merged(breaks: Iterable[GraphBreak]) -> list[GraphBreak]:
    """The same break met several times as one with a count."""
    counts: dict[tuple[str, str], int] = {}
    for one in breaks:
        counts[one.where, one.reason] = counts.get((one.where, one.reason), 0) + one.count
    return [GraphBreak(where=where, reason=reason, count=n) for (where, reason), n in counts.items()]


class CompileWatch:
    """Counts what is compiled from `start` to `stop`; a context manager too. Any thread may ask.

    With a logger, each thing that happens is also a warning there: for a worker that serves, where nothing should.
    """

    def __init__(self, log: logging.Logger | None = None):
        self._log = log
        self._lock = threading.Lock()
        self._newest: Any = None  # record of torch's that was read last
        self._fresh = Happened()  # since `take`
        self._counts = Live()
        self._last: deque[str] = deque(maxlen=MAX_LAST)
        self._undo = ExitStack()
        self._is_on = False
        self._is_called = False  # at the end of each compilation

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """From now on."""
        self._newest = next(reversed(_records()), None)
        for name in BREAKS:
            self._listen(name, logging.DEBUG, _Listener(self._broke))
        for name in SKIPS:
            self._listen(name, logging.WARNING, _Listener(self._skipped))
        self._register()
        self._is_on = True

    def stop(self) -> None:
        """Until now; logging and callbacks are as they were."""
        self.poll()
        with self._lock:
            self._is_on = self._is_called = False
            self._undo.close()

    def take(self) -> Happened:
        """What happened since this was called last."""
        self.poll()
        with self._lock:
            taken, self._fresh = self._fresh, Happened()
        return taken

    def counts(self) -> Live:
        """What happened since `start`."""
        self.poll()
        with self._lock:
            return self._counts.model_copy(update={"last": list(self._last)})

    def poll(self) -> None:
        """Read what torch has recorded and count it; the others do this by themselves."""
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
        """Hear a logger of torch's. If it was silent, it stays so for everybody else."""
        logger = logging.getLogger(name)
        if not logger.isEnabledFor(level):
            self._undo.callback(setattr, logger, "propagate", logger.propagate)
            self._undo.callback(logger.setLevel, logger.level)
            logger.propagate = False
            logger.setLevel(level)
        logger.addHandler(listener)
        self._undo.callback(logger.removeHandler, listener)

    def _register(self) -> None:
        """There may be no compiler yet; what it does before anybody polls again is counted then, and told late."""
        if self._is_called or not is_loaded():
            return
        from torch._dynamo.callback import callback_handler  # importing it any earlier would load the compiler

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
        """Count and tell; the lock is held."""
        self._fresh.add(new)
        told = [f"graph break at {one.where}: {one.reason}" for one in new.graph_breaks]
        told += [f"recompiled {one.function} ({one.where}): {one.guard}" for one in new.recompiles]
        told += [f"CUDA graphs skipped: {reason}" for reason in new.skips]
        told += [f"stays eager: {reason}" for reason in new.failures]
        if new.n_compiled and not told:
            told = [f"compiled a graph in {new.seconds:.2f} s"]
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
        self._last.extend(told)
        if self._log is not None:
            for line in told:
                self._log.warning("compile: %s", line)


def _records() -> list[Any]:
    """What torch has kept of compilations, oldest first."""
    if not is_loaded():
        return []
    from torch._dynamo.utils import get_compilation_metrics

    return get_compilation_metrics()


class _Listener(logging.Handler):
    def __init__(self, tell: Any):
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._tell(record)
        except Exception:  # what is told about compiling must not end it
            self.handleError(record)


def graph_break(record: logging.LogRecord) -> GraphBreak:
    """What a log record of torch's tells of a graph break: place, and reason with its explanation."""
    text = record.getMessage()
    head, _, _ = text.partition("\nUser code traceback")
    places, reason = _PLACE.findall(head), head.partition("Graph Break Reason: ")[2]
    if not places:  # a whole function is left eager; the reason is the error behind it
        places = _FRAME.findall(text)
        error = record.exc_info[1] if record.exc_info else None
        reason = str(error or head)
    where = ":".join(places[-1]) if places else "unknown place"
    return GraphBreak(where=where, reason=_reason(reason))


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    # A line that ends in a colon leads to the reason behind it.
    first = next((line for line in lines if line and not line.endswith(":")), "no reason given")
    explained = next((line for line in lines if line.startswith("Explanation:")), None)
    return f"{first}: {explained.removeprefix('Explanation:').strip()}" if explained else first


def _read(record: Any) -> Happened:
    """One record of torch's. Not all versions have all fields."""

    def told(name: str) -> Any:
        return getattr(record, name, None)

    new = Happened(seconds=told("entire_frame_compile_time_s") or 0.0)
    if told("is_runtime"):  # tuning or recording while it runs, of a graph that was counted
        return new
    where = f"{told('co_filename')}:{told('co_firstlineno')}"
    if told("fail_type"):
        whose = f"{told('co_name')} ({where})" if told("co_name") else "a function"
        new.failures.append(f"{whose}: {told('fail_type')}: {_reason(str(told('fail_reason') or ''))}")
        return new
    new.n_compiled = int(bool(told("has_guarded_code")) or told("is_forward") is False)
    new.hits = told("inductor_fx_local_cache_hit_count") or 0
    new.misses = told("inductor_fx_local_cache_miss_count") or 0
    if guard := told("recompile_reason"):
        new.recompiles.append(
            Recompile(function=str(told("co_name")), where=where, guard=_guard(guard), seconds=new.seconds)
        )
    return new


def _guard(text: str) -> str:
    """The check that failed and the line that it comes from, without the number of the graph that it belongs to."""
    text = re.sub(r"^\d+/\d+: ", "", text.partition("\nUser stack trace")[0].strip())
    check, _, comment = text.partition("  # ")
    source = _SOURCE.search(comment)
    return " ".join(check.split()) + (f" ({source[1]})" if source else "")
