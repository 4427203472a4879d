"""What became of each compile target, and what was compiled, as logs, health and metrics tell it. Torch-free."""

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Self


class TargetPhase(StrEnum):
    OFF = "off"  # not asked for, or not in the checkpoint
    WAITING = "waiting"
    COMPILING = "compiling"
    COMPILED = "compiled"
    FELL_BACK = "eager"  # it failed, and runs as it is


@dataclass
class TargetState:
    """One target. seconds: spent on it. n_graphs: graphs compiled. n_captured: CUDA graphs. hits, misses: of the
    kernel cache. error: why it fell back, or is off although it was asked for.
    """

    name: str
    phase: TargetPhase = TargetPhase.OFF
    seconds: float = 0.0
    n_graphs: int = 0
    n_captured: int = 0
    hits: int = 0
    misses: int = 0
    error: str | None = None


@dataclass(frozen=True)
class CompileCounts:
    """What compiling has done in this process so far; none of it may grow while a worker serves.

    graph_breaks: places that torch.compile could not follow. graphs: graphs compiled, so that growth means recompiles.
    graph_skips: calls of captured regions at shapes without a CUDA graph. cudagraph_skips: times that Inductor refused
    to capture by itself.
    """

    graph_breaks: int = 0
    graphs: int = 0
    graph_skips: int = 0
    cudagraph_skips: int = 0

    def since(self, before: Self) -> Self:
        """What was added after `before` was taken."""
        return type(self)(
            **{field.name: getattr(self, field.name) - getattr(before, field.name) for field in fields(self)}
        )

    @property
    def is_clean(self) -> bool:
        return not any(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, field.name)} {field.name.replace('_', ' ')}" for field in fields(self))
