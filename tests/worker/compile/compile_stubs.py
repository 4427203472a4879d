"""Stubs for tests of `compile_engine`: a model that reports a GPU, failing compilers, failing captures."""

from typing import Any

import pytest
import torch

from tests.models.graphs.fake_captures import Replayed, replay_on_cpu


class StubModel:
    """A model that reports a GPU. refused: error of switching to kernels; None: the switch succeeds."""

    device = torch.device("cuda")

    def __init__(self, refused: str | None = None):
        self.kernels, self.refused, self.switched = False, refused, []

    def use_kernels(self, on: bool) -> None:
        self.switched.append(on)
        if on and self.refused:
            raise RuntimeError(self.refused)
        self.kernels = on


def failing(at: int) -> Any:
    """A backend that raises from graph number `at` on (counted from 0)."""
    given: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        given.append(len(given))
        if len(given) > at:
            raise RuntimeError(f"no code for graph {len(given)}\nsecond line")
        return module.forward

    return backend


def capture_without(monkeypatch: pytest.MonkeyPatch, region: str, error: Exception | None = None) -> None:
    """Replace captures by fake graphs and make those of `region` raise. error: the exception; None: out of memory."""
    error = error or torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2 GiB for {region}")

    class Failing(Replayed):
        def __init__(self, regions: Any, name: str, *given: Any, **more: Any):
            if name == region:
                raise error
            super().__init__(regions, name, *given, **more)

    replay_on_cpu(monkeypatch)
    monkeypatch.setattr("models.graphs.region_graphs.Captured", Failing)
