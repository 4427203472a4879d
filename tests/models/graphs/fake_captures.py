"""Captured graphs without a GPU: a test double of `models.graphs.captured.Captured`.

It runs the region eagerly, writes to static outputs that the next replay overwrites, and refuses other shapes, so that
callers can rely on it exactly as on a graph.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from models.graphs import region_graphs as graphs
from models.graphs.captured import Bucket
from models.graphs.input_block import Input
from models.graphs.region_graphs import RegionTable


class Replayed:
    """One region at one bucket, with the interface of `Captured`. n_replays: number of calls."""

    def __init__(
        self,
        regions: RegionTable,
        name: str,
        bucket: Bucket,
        variant: dict[str, Any] | None = None,
        pool: Any = None,
        is_warm: bool = False,
    ):
        self.name, self.bucket, self.pool, self.n_replays = name, bucket, pool, 0
        self.is_warm, self.was_retried = is_warm, False
        self._regions, self._region = regions, regions.table[name]
        self.inputs, static = self._region.example(bucket)
        self.static = {**static, **(variant or {})}
        self.outputs = regions(name, *self.inputs, **self.static)

    def __call__(self, *inputs: Input) -> Any:
        for given, own in zip(map(torch.as_tensor, inputs), self.inputs, strict=True):
            assert given.shape == own.shape and given.dtype == own.dtype, (
                f"{self.name}: expected {own.shape} {own.dtype}, got {given.shape} {given.dtype}"
            )
            own.copy_(given)
        with self._regions.without_gradients():
            new = self._region.run(*self._region.bound, *self.inputs, **self.static)
            for old, tensor in zip(flat(self.outputs), flat(new), strict=True):
                old.copy_(tensor)
        self.n_replays += 1
        return self.outputs


def flat(value: object) -> list[Tensor]:
    """All tensors of nested outputs."""
    if isinstance(value, Tensor):
        return [value]
    return [] if value is None else [tensor for part in value for tensor in flat(part)]


def replay_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """Make `RegionTable.capture` create doubles. Returns: the list of them, which later captures extend."""
    made: list[Replayed] = []

    def captured(*given: Any) -> Replayed:
        made.append(Replayed(*given))
        return made[-1]

    pool: Callable[[], object] = object
    monkeypatch.setattr(graphs, "Captured", captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", pool)
    return made
