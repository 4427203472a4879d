"""What became of each compile target and region, as logs, health and metrics tell it. Torch-free."""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Self


class TargetPhase(StrEnum):
    OFF = "off"  # not asked for, or not in the checkpoint
    WAITING = "waiting"
    COMPILING = "compiling"
    COMPILED = "compiled"
    KERNELS = "kernels"  # it runs by the project's own kernels
    FELL_BACK = "eager"  # it failed, and runs as it is

    @property
    def is_as_asked(self) -> bool:
        """Whether it runs as it was asked to; a region of it may go without CUDA graphs (`TargetState.error`)."""
        return self in (TargetPhase.COMPILED, TargetPhase.KERNELS)


@dataclass
class TargetState:
    """One target. seconds: spent on it. n_graphs: graphs compiled. n_captured: CUDA graphs. hits, misses: of the
    kernel cache. error: why it fell back, what goes without CUDA graphs, or why it is off although it was asked for.
    """

    name: str
    phase: TargetPhase = TargetPhase.OFF
    seconds: float = 0.0
    n_graphs: int = 0
    n_captured: int = 0
    hits: int = 0
    misses: int = 0
    error: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it, or a region of it, runs otherwise than it was asked to."""
        return self.phase is TargetPhase.FELL_BACK or (self.phase.is_as_asked and self.error is not None)


@dataclass
class RegionState:
    """One region and its CUDA graphs.

    stage: of a unit, empty if no unit calls it. sizes: by axis, that it was captured at. seconds: of capturing.
    n_bytes: by which the device's reserved memory grew. n_retried: graphs that failed at first. reason: why there are
    no graphs.
    """

    name: str
    stage: str = ""
    n_graphs: int = 0
    sizes: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    n_bytes: int = 0
    n_retried: int = 0
    reason: str | None = None


@dataclass(frozen=True)
class CompileCounts:
    """What compiling has done in this process so far; none of it may grow while a worker serves.

    graph_breaks: places that torch.compile could not follow. graphs: compiled ones, and kernels of our own that were
    made, so that growth means recompiles. graph_skips: calls of captured regions at shapes without a CUDA graph,
    refused or not. cudagraph_skips: times that Inductor refused to capture by itself.
    """

    graph_breaks: int = 0
    graphs: int = 0
    graph_skips: int = 0
    cudagraph_skips: int = 0

    def since(self, before: Self) -> Self:
        """What was added after `before` was taken."""
        return type(self)(**{one.name: getattr(self, one.name) - getattr(before, one.name) for one in fields(self)})

    @property
    def is_clean(self) -> bool:
        return not any(getattr(self, one.name) for one in fields(self))

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, one.name)} {one.name.replace('_', ' ')}" for one in fields(self))


@dataclass
class Tuned:
    """What was done.

    targets, regions: by name. seconds: by region, warming up and capturing. n_graphs: CUDA graphs captured. counts:
    when it was over. toggles: the switches of speed that are in force. notes: what was asked for and makes no sense
    here, or did not work. lost_kernels: tables, `omni` or `vocoder`, whose kernels failed; notes say how. kernels_kept,
    kernels_made: of our own, read from the folder of kernels, and not.
    """

    targets: dict[str, TargetState] = field(default_factory=dict)
    regions: dict[str, RegionState] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    n_graphs: int = 0
    counts: CompileCounts = field(default_factory=CompileCounts)
    toggles: dict[str, str | bool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lost_kernels: list[str] = field(default_factory=list)
    kernels_kept: int = 0
    kernels_made: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether no target that was asked for has failed, not even a region of it, and no kernels have."""
        return not self.lost_kernels and not any(state.has_failed for state in self.targets.values())

    @property
    def hits(self) -> int:
        """Of the cache: compiled graphs, by all targets, and kernels of our own that were there."""
        return sum(state.hits for state in self.targets.values()) + self.kernels_kept

    @property
    def misses(self) -> int:
        """What had to be made, as `hits`."""
        return sum(state.misses for state in self.targets.values()) + self.kernels_made
