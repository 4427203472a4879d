"""A region as a CUDA graph: captured once at one bucket, replayed in every call.

Contains streams, memory pools and the recovery from failed captures. Does not contain the table of buckets
(`region_graphs`).
"""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from models.graphs.input_block import Input, StaticInputs

Bucket = dict[str, int]
StaticSettings = dict[str, Hashable]  # settings of a region; each combination of values is a graph of its own
Example = tuple[tuple[Tensor, ...], StaticSettings]
Outputs = Tensor | tuple[Tensor, ...] | None  # of any region; `RegionTable.run` has the type of one region


class StagePool:
    """Memory pool and stream in which the graphs of one stage are captured.

    Graphs of one pool share memory, so they must never run at the same time. The stream belongs to the stage because
    libraries keep workspaces by stream, and stages may overlap.

    is_broken: CUDA has invalidated a capture in this pool. Earlier graphs stay valid; no more can be captured.
    """

    def __init__(self) -> None:
        self.handle, self.is_broken = torch.cuda.graph_pool_handle(), False

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()


class _Table(Protocol):
    """The part of `RegionTable` that a capture uses."""

    def example(self, name: str, bucket: Bucket) -> Example: ...

    def __call__(self, name: str, *given: Input, **static: Hashable) -> Outputs: ...


class Captured:
    """One region at one bucket as a CUDA graph: static inputs, replay, static outputs."""

    def __init__(
        self,
        regions: _Table,
        name: str,
        bucket: Bucket,
        variant: StaticSettings | None = None,
        pool: StagePool | None = None,
        is_warm: bool = False,
    ):
        """
        Args:
            regions: the table that contains the region.
            variant: settings that differ from the example's.
            pool: shared with graphs that never run at the same time as this one; None = a new one.
            is_warm: the region has run at these sizes. If its capture fails, it is repeated after one more run.

        The attribute `pool` is the pool of the graph: a new one if a failed capture broke the given one.
        """
        self.name, self.bucket, self.was_retried = name, bucket, False
        example, static = regions.example(name, bucket)
        self._inputs, self.static = StaticInputs(name, example), {**static, **(variant or {})}
        self.pool = pool or StagePool()
        run = partial(regions, name, *self.inputs, **self.static)
        try:
            self._record(run, 0 if is_warm else 2)  # one run compiles, the second creates library handles
        except Exception:
            if not is_warm:
                raise
            self.was_retried = True
            if self.pool.is_broken:
                self.pool = StagePool()
            self._record(run, 1)

    def _record(self, run: Callable[[], Outputs], n_runs: int) -> None:
        self.pool.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.pool.stream):
            for _ in range(n_runs):
                run()
            self.graph, self.outputs = _recorded(run, self.pool)
        torch.cuda.current_stream().wait_stream(self.pool.stream)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that the graph reads."""
        return self._inputs.tensors

    def __call__(self, *given: Input) -> Outputs:
        """Copy inputs, host arrays or device tensors, and replay, without blocking the host.

        Returns: the static outputs, which the next call overwrites.
        Raises: ShapeError for other shapes or types.
        """
        self._inputs.copy_in(given)
        self.graph.replay()
        return self.outputs


def _recorded(run: Callable[[], Outputs], pool: StagePool) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """One run captured on the current stream, and its outputs.

    Unlike `torch.cuda.graph` this neither synchronizes nor empties the memory cache before a capture: over a few
    hundred graphs that takes seconds.
    """
    graph = torch.cuda.CUDAGraph()
    with _no_collection(), _capture(graph, pool):
        outputs = run()
    return graph, outputs


@contextmanager
def _capture(graph: torch.cuda.CUDAGraph, pool: StagePool) -> Iterator[None]:
    """Capture the calls inside as the graph. Raises: the first error of the calls and of the capture itself."""
    has_ended = False
    try:
        # Calls of other threads to the device do not invalidate this capture.
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the stream must stop capturing; the original error is raised
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
                error.add_note(f"Cleaning up after the failed capture failed too: {second}")
        raise


_ABANDONED: list[torch.cuda.CUDAGraph] = []


def _abandon(graph: torch.cuda.CUDAGraph, pool: StagePool) -> None:
    """Clean up after a `capture_end` that failed because CUDA had invalidated the capture.

    In torch 2.11 the device pool stays in recording mode and the random generator in capture mode: every later capture
    in the pool and every draw from the generator would fail. The host memory pool of the same name stays in recording
    mode too and cannot be reached; it calls the graph to identify its streams. So the graph is kept alive, and the pool
    is not used again. The pool's memory is not released: where torch releases it itself, a second release would take
    memory from live graphs.
    """
    with suppress(RuntimeError):  # recording had not begun, or torch has ended it: the graph is not called then
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool.handle)
        _ABANDONED.append(graph)
    # A successful capture resets the generator. It captures one operation, since torch warns about an empty graph. The
    # graph is kept, since some versions of torch free a stream's workspaces with any graph captured on it.
    number, successful = torch.zeros((), device="cuda"), torch.cuda.CUDAGraph()
    _ABANDONED.append(successful)
    successful.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
    try:
        number.zero_()
    finally:
        successful.capture_end()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: freeing a graph or event during a capture invalidates the capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
