"""Small modules, each with one construct that torch.compile handles badly, and their factories for `worker.report`."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Inputs = tuple[Tensor, ...]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.nn.functional.gelu(self.first(x)))


class ReadsBack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class Prints(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        print("printed by the module")
        return y + 1


class PicksByValue(nn.Module):
    """The shape of the output depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].sum()


class PrintsInLoop(nn.Module):
    """A graph break that cannot be resumed: the whole function stays eager."""

    def forward(self, x: Tensor) -> Tensor:
        for number in range(2):
            x = x + number
            print(number)
        return x


class ListCache(nn.Module):
    """A cache that counts its rows in a Python list, so that each length has a separate graph."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return x + len(self.rows)


class BufferCache(nn.Module):
    """A compilable cache in buffers, with named outputs of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n_rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> dict[str, Any]:
        self.n_rows += len(x)
        self.mean.lerp_(x.mean(0), 0.5)
        return {"y": (x + self.mean) * scale["by"], "parts": (self.n_rows.clone(), x > 0)}


class WritesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2


class Dropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=True)


class Unsteady(nn.Module):
    """Returns different values at each call with any seed: its state belongs to the class, which is not copied."""

    count: ClassVar[list[int]] = [0]

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        self.count[0] += 1
        return x + self.count[0]


class TellsWhenCompiled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 if torch.compiler.is_compiling() else x


class WrongShape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(x)


def rows(*counts: int, width: int = 4) -> list[Inputs]:
    """One set of inputs per number of rows."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, width, generator=generator),) for n in counts]


def build_plain() -> tuple[nn.Module, list[Inputs]]:
    torch.manual_seed(2)
    return Plain().eval(), rows(2, 3, width=8)


def build_breaking() -> tuple[nn.Module, Inputs]:
    return Prints(), rows(3)[0]


def build_failing() -> tuple[nn.Module, Inputs]:
    return WrongShape(), rows(3)[0]


def build_nothing() -> nn.Module:
    return Plain()


def build_badly() -> None:
    raise RuntimeError("no weights")
