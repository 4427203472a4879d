"""The state of each compile target and region, as logs, health and metrics report it. Torch-free."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from worker.config.compile import CompileConfig

Progress = Callable[[str, int, int], None]  # what, done, total


class TargetPhase(StrEnum):
    OFF = "off"  # not configured, or not in the checkpoint
    WAITING = "waiting"
    COMPILING = "compiling"
    COMPILED = "compiled"
    KERNELS = "kernels"  # runs on the project's own kernels
    FELL_BACK = "eager"  # failed, and runs eagerly

    @property
    def is_active(self) -> bool:
        """Whether it runs as configured; one of its regions may run without CUDA graphs (see `TargetState.error`)."""
        return self in (TargetPhase.COMPILED, TargetPhase.KERNELS)


@dataclass
class TargetState:
    """One target.

    Attributes:
        seconds: compiling, warming up and capturing.
        n_graphs: graphs that torch.compile made.
        n_captured: CUDA graphs.
        hits, misses: of the kernel cache.
        error: why it fell back, which region runs without CUDA graphs, or why a configured target is off.
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
        """Whether it, or a region of it, does not run as configured."""
        return self.phase is TargetPhase.FELL_BACK or (self.phase.is_active and self.error is not None)


@dataclass
class RegionState:
    """One region and its CUDA graphs.

    Attributes:
        stage: the stage of a unit that calls it; empty if none does.
        sizes: axis -> captured sizes.
        seconds: of capturing.
        n_bytes: growth of the device's reserved memory.
        n_retried: graphs that were captured at the second attempt.
        reason: why it has no graphs, or why its graphs have eager layers.
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
    """Counters of the compiler in this process; none may grow while a worker serves.

    Attributes:
        graph_breaks: places that torch.compile cannot trace.
        graphs: compiled graphs, and built kernels of the project; growth means recompiles.
        graph_skips: calls of captured regions at shapes without a CUDA graph.
        cudagraph_skips: graphs that Inductor did not capture in a mode of its own.
    """

    graph_breaks: int = 0
    graphs: int = 0
    graph_skips: int = 0
    cudagraph_skips: int = 0

    def since(self, before: Self) -> Self:
        """The growth since `before`."""
        return type(self)(**{one.name: getattr(self, one.name) - getattr(before, one.name) for one in fields(self)})

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, one.name)} {one.name.replace('_', ' ')}" for one in fields(self))


@dataclass
class CompileResult:
    """The outcome of one `compile_engine`.

    Attributes:
        targets: name -> state.
        regions: name -> state.
        seconds: region -> seconds of warming up and capturing.
        n_graphs: CUDA graphs captured.
        counts: the compiler's counters at the end.
        backend_flags: setting -> value in force.
        notes: settings without effect on this device, and failures.
        failed_kernels: tables, `omni` or `vocoder`, whose kernels failed; a note has the reason.
        kernels_cached, kernels_built: of the project, read from the kernel folder or built.
    """

    targets: dict[str, TargetState] = field(default_factory=dict)
    regions: dict[str, RegionState] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    n_graphs: int = 0
    counts: CompileCounts = field(default_factory=CompileCounts)
    backend_flags: dict[str, str | bool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failed_kernels: list[str] = field(default_factory=list)
    kernels_cached: int = 0
    kernels_built: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether no configured target, no region of one and no kernels have failed."""
        return not self.failed_kernels and not any(state.has_failed for state in self.targets.values())

    @property
    def hits(self) -> int:
        """Compiled graphs of all targets and the project's kernels that came from the cache."""
        return sum(state.hits for state in self.targets.values()) + self.kernels_cached

    @property
    def misses(self) -> int:
        """Compiled graphs of all targets and the project's kernels that had to be built."""
        return sum(state.misses for state in self.targets.values()) + self.kernels_built


@dataclass(frozen=True)
class CompileJob:
    """The settings of one run over all targets, and where it reports.

    Attributes:
        result: filled in by the run.
        progress: called before each bucket.
        backend: of torch.compile, a name or a function.
        is_warm: an earlier start has built all kernels.
    """

    config: CompileConfig
    result: CompileResult
    progress: Progress | None = None
    backend: Any = "inductor"
    is_warm: bool = False
