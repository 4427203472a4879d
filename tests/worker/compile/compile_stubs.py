"""Doubles for what `compile_engine` works on: a model as if on a GPU, compilers and captures that fail."""

from typing import Any

import pytest
import torch

from tests.models.graphs.fake_captures import Replayed, replay_on_cpu


class StubModel:
    """As if on a GPU. refused: why kernels cannot be used, None if they can."""

    device = torch.device("cuda")

    def __init__(self, refused: str | None = None):
        self.kernels, self.refused, self.switched = False, refused, []

    def use_kernels(self, on: bool) -> None:
        self.switched.append(on)
        if on and self.refused:
            raise RuntimeError(self.refused)
        self.kernels = on


def failing(at: int) -> Any:
    """A backend that fails from the graph numbered `at` on; and how many it was given."""
    given: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        given.append(len(given))
        if len(given) > at:
            raise RuntimeError(f"no code for graph {len(given)}\nand more of it")
        return module.forward

    return backend


def capture_without(monkeypatch: pytest.MonkeyPatch, region: str, error: Exception | None = None) -> None:
    """Let doubles be captured, but none of this region. error: that it meets; None = memory is short there."""
    error = error or torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2 GiB for {region}")

    class Failing(Replayed):
        def __init__(self, regions: Any, name: str, *given: Any, **more: Any):
            if name == region:
                raise error
            super().__init__(regions, name, *given, **more)

    replay_on_cpu(monkeypatch)
    monkeypatch.setattr("models.graphs.region_graphs.Captured", Failing)
