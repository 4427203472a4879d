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

from models.input_block import Input, StaticInputs

Bucket = dict[str, int]


class StagePool:
    """Where the graphs of one stage are captured: they share memory, and so must never run at the same time.

    A stage has a stream of its own too: libraries keep workspaces by stream, and stages may overlap.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()

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
            is_warm: it has run at these sizes before.
        """
        self.name, self.bucket, self.was_retried = name, bucket, False
        example, static = regions.table[name].example(bucket)
        self._inputs, self.static = StaticInputs(name, example), {**static, **(variant or {})}
        self.pool = pool = pool or StagePool()
        run = partial(regions, name, *self.inputs, **self.static)
        pool.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(pool.stream):
            for _ in range(0 if is_warm else 2):  # compile, then settle lazily created handles before the capture
                run()
            try:
                self.graph, self.outputs = _recorded(run, pool)
            except Exception:
                if not is_warm:
                    raise
                self.was_retried = True
                run()
                self.graph, self.outputs = _recorded(run, pool)
        torch.cuda.current_stream().wait_stream(pool.stream)

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
    with _no_collection():
        # What other threads do to the device meanwhile is no business of this capture.
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            outputs = run()
        except BaseException:
            with suppress(RuntimeError):  # the stream must not go on capturing; why it failed is what counts
                graph.capture_end()
            raise
        graph.capture_end()
    return graph, outputs


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
