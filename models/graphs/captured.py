"""A region as a CUDA graph: captured once at one size, replayed at every call.

Knows streams, memory pools and what disturbs a capture. Does not know which sizes there are (`graphs`).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from models.graphs.input_block import Input, StaticInputs

Bucket = dict[str, int]


class StagePool:
    """Where the graphs of one stage are captured: they share memory, and so must never run at the same time.

    A stage has a stream of its own too: libraries keep workspaces by stream, and stages may overlap. is_broken: CUDA
    has invalidated a capture here; graphs that were captured before are as good as ever, but there can be no more.
    """

    def __init__(self) -> None:
        self.handle, self.is_broken = torch.cuda.graph_pool_handle(), False

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()


class Captured:
    """One region at one bucket as a CUDA graph: static inputs, replay, static outputs."""

    def __init__(
        self,
        regions: Any,
        name: str,
        bucket: Bucket,
        variant: dict[str, Any] | None = None,
        pool: StagePool | None = None,
        is_warm: bool = False,
    ):
        """
        Args:
            regions: the table that has the region. variant: settings that differ from the example's.
            pool: to share with graphs that never run at the same time as this one; None = one of its own.
            is_warm: it has run at these sizes before; if it cannot be captured, it is tried again after one more run.
        `pool` is the one it was captured in: another, if that capture broke the one that was given.
        """
        self.name, self.bucket, self.was_retried = name, bucket, False
        example, static = regions.table[name].example(bucket)
        self._inputs, self.static = StaticInputs(name, example), {**static, **(variant or {})}
        self.pool = pool or StagePool()
        run = partial(regions, name, *self.inputs, **self.static)
        try:
            self._record(run, 0 if is_warm else 2)  # compile, then settle lazily created handles before the capture
        except Exception:
            if not is_warm:
                raise
            self.was_retried = True
            if self.pool.is_broken:
                self.pool = StagePool()
            self._record(run, 1)

    def _record(self, run: Callable[[], Any], n_runs: int) -> None:
        self.pool.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.pool.stream):
            for _ in range(n_runs):
                run()
            self.graph, self.outputs = _recorded(run, self.pool)
        torch.cuda.current_stream().wait_stream(self.pool.stream)

    @property
    def inputs(self) -> list[Tensor]:
        """What the graph reads."""
        return self._inputs.tensors

    def __call__(self, *given: Input) -> Any:
        """Copy inputs in, arrays from the host and tensors from the device, and replay; the host waits for nothing.

        Returns: the static outputs, overwritten by the next call. Raises: ShapeError for other shapes or types.
        """
        self._inputs.put(given)
        self.graph.replay()
        return self.outputs


def _recorded(run: Callable[[], Any], pool: StagePool) -> tuple[torch.cuda.CUDAGraph, Any]:
    """One run as a graph, on the current stream, and its outputs. `torch.cuda.graph` would wait for the device and give
    all cached memory back before each: seconds, over a few hundred graphs.
    """
    graph = torch.cuda.CUDAGraph()
    with _no_collection(), _capture(graph, pool):
        outputs = run()
    return graph, outputs


@contextmanager
def _capture(graph: torch.cuda.CUDAGraph, pool: StagePool) -> Iterator[None]:
    """What is called inside becomes the graph. Raises: what came first, of what is called and the capture itself."""
    has_ended = False
    try:
        # What other threads do to the device meanwhile is no business of this capture.
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the stream must not go on capturing; why it failed is what counts
                graph.capture_end()
                has_ended = True
            raise
        graph.capture_end()
        has_ended = True
    except BaseException as error:
        if not has_ended:
            pool.is_broken = True
            try:
                _abandon(graph, pool)
            except Exception as second:
                error.add_note(f"What the capture left behind could not be cleared away: {second}")
        raise


_ABANDONED: list[torch.cuda.CUDAGraph] = []


def _abandon(graph: torch.cuda.CUDAGraph, pool: StagePool) -> None:
    """Do what `capture_end` leaves undone if it fails, as it does where CUDA has invalidated the capture.

    In torch 2.11 the pool goes on recording, and the generator takes itself to be capturing: each capture in the one
    and each number drawn from the other would fail. A second pool by that name, for memory of the host, cannot be
    reached and goes on; it asks the graph whether a stream is its own, so the graph has to stay, and the pool is used
    no more. Its memory stays too: to give it back twice, where torch does so itself, would take it from live graphs.
    """
    with suppress(RuntimeError):  # it has not begun to record, or torch has ended it: nobody asks the graph then
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool.handle)
        _ABANDONED.append(graph)
    # A capture that ends well sets the generator right. Of one operation, since torch warns of an empty graph; kept,
    # since versions of torch free a stream's workspaces with any graph that was captured on it.
    number, mender = torch.zeros((), device="cuda"), torch.cuda.CUDAGraph()
    _ABANDONED.append(mender)
    mender.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
    try:
        number.zero_()
    finally:
        mender.capture_end()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Graphs and events of the device that are collected in the middle of a capture would end it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
