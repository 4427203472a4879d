"""Doubles for what `tune` works on: a model as if on a GPU, compilers that fail."""

from typing import Any

import torch


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
