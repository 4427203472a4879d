"""The watch counts and logs compile events, and has no cost while nothing compiles."""

import logging
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.callback import callback_handler

from tests.worker.report import compilable
from tests.worker.report.compilable import rows
from worker.report import compile_watch
from worker.report.compile_watch import BREAKS, CompileWatch


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def compiled(module: torch.nn.Module, **options: Any) -> Any:
    return torch.compile(module, backend="eager", **options)


def test_counts_events_between_start_and_stop():
    module, [first, second] = compilable.build_plain()
    run = compiled(module, dynamic=False)
    run(*first)
    with CompileWatch() as watch:
        run(*first)
        assert watch.counts().problems() == []
        run(*second)
    counted = watch.counts()
    assert (counted.compiles, counted.recompiles, counted.graph_breaks) == (1, 1, 0)
    assert counted.seconds > 0 and "expected 2, actual 3" in counted.last[-1]
    run(*rows(7, width=8)[0])
    assert watch.counts() == counted, "expected nothing more after the end"


def test_take_returns_events_since_the_last_call():
    module, [first, second] = compilable.build_plain()
    run = compiled(module, dynamic=False)
    with CompileWatch() as watch:
        run(*first)
        assert [(got.n_compiled, len(got.recompiles)) for got in (watch.take(), watch.take())] == [(1, 0), (0, 0)]
        run(*second)
        got = watch.take()
        assert (got.n_compiled, len(got.recompiles)) == (1, 1)
        assert watch.counts().compiles == 2


def test_counts_more_compiles_than_torch_keeps():
    limit = torch._dynamo.utils.DEFAULT_COMPILATION_METRICS_LIMIT
    torch._dynamo.utils.set_compilation_metrics_limit(2)
    try:
        with CompileWatch() as watch:
            run = compiled(lambda x: x + 1, dynamic=False)
            for n in range(6):
                run(torch.ones(n + 2))
        assert watch.counts().compiles == 6
    finally:
        torch._dynamo.utils.set_compilation_metrics_limit(limit)


def test_merges_equal_breaks():
    with CompileWatch() as watch:
        run = compiled(compilable.Prints(), dynamic=False)
        for inputs in rows(2, 3, 4):
            run(*inputs)
    [found] = watch.take().graph_breaks
    assert found.count == 3 and watch.counts().graph_breaks == 3, f"expected 3 times, got {found}"


def test_logs_events_without_a_poll(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compile_watch, "SETTLE_S", 0.01)
    log, warned = logging.getLogger("a worker"), threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: warned.set() if "recompiled" in record.getMessage() else None
    log.addHandler(handler)
    module, [first, second] = compilable.build_plain()
    run = compiled(module, dynamic=False)
    run(*first)
    with CompileWatch(log), caplog.at_level(logging.WARNING, "a worker"):
        run(*second)
        assert warned.wait(10), "expected a warning, got none"
    log.removeHandler(handler)
    [warning] = [record for record in caplog.records if record.name == "a worker"]
    assert warning.levelno == logging.WARNING and "expected 2, actual 3" in warning.getMessage()


def test_cuda_graphs_that_are_skipped():
    logger = logging.getLogger("torch._inductor.cudagraph_utils.__cudagraphs")
    with CompileWatch() as watch:
        logger.warning("skipping cudagraphs due to mutated inputs (1 instances)")
        logger.warning("something else")
    assert watch.take().skips == ["skipping cudagraphs due to mutated inputs (1 instances)"]
    assert watch.counts().graph_skips == 1


def test_restores_logging(capsys: pytest.CaptureFixture[str]):
    logger = logging.getLogger(BREAKS[0])
    logger.setLevel(logging.NOTSET)
    before = logger.level, logger.propagate, list(logger.handlers)
    with CompileWatch():
        compiled(compilable.Prints())(*rows(3)[0])
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    assert "Graph break" not in capsys.readouterr().err, "expected a watch that is not received"
    received: list[str] = []
    mine = logging.Handler()
    mine.emit = lambda record: received.append(record.getMessage())
    logger.addHandler(mine)
    logger.setLevel(logging.DEBUG)
    try:
        with CompileWatch() as watch:
            compiled(compilable.ReadsBack())(*rows(3)[0])
        assert (logger.level, logger.handlers) == (logging.DEBUG, [*before[2], mine])
        assert len(received) == 1 and watch.counts().graph_breaks == 1, f"expected both to receive it, got {received}"
    finally:
        logger.removeHandler(mine)
        logger.setLevel(before[0])


def test_stops_after_a_reset_of_dynamo():
    registered = list(callback_handler.end_callbacks)
    watch = CompileWatch()
    watch.start()
    callback_handler.end_callbacks.clear()  # as torch._dynamo.reset() does
    compiled(compilable.Plain())(*rows(3, width=8)[0])
    watch.stop()
    callback_handler.end_callbacks.extend(registered)
    assert watch.counts().compiles == 1


def test_nothing_runs_while_nothing_compiles(monkeypatch: pytest.MonkeyPatch):
    module, [first, _] = compilable.build_plain()
    run = compiled(module)
    run(*first)
    polled: list[None] = []
    with CompileWatch(logging.getLogger("a worker")) as watch:
        monkeypatch.setattr(watch, "poll", lambda: polled.append(None))
        for _ in range(10):
            run(*first)
        assert not polled, "expected nothing to be read"


def test_watches_a_compiler_that_is_loaded_later(monkeypatch: pytest.MonkeyPatch):
    module, [first, second] = compilable.build_plain()
    run, registered = compiled(module, dynamic=False), list(callback_handler.end_callbacks)
    monkeypatch.setattr(compile_watch, "is_loaded", lambda: False)
    monkeypatch.setattr(torch._dynamo.utils, "_compilation_metrics", deque())
    watch = CompileWatch()
    watch.start()
    assert watch.counts().compiles == 0 and callback_handler.end_callbacks == registered
    monkeypatch.setattr(compile_watch, "is_loaded", lambda: True)
    run(*first)
    assert watch.counts().compiles == 1 and len(callback_handler.end_callbacks) == len(registered) + 1
    run(*second)
    watch.stop()
    assert watch.counts().recompiles == 1 and callback_handler.end_callbacks == registered
