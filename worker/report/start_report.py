"""The compile report of a start: the state of each target and the events of its compilation, without measurements.

`region_report` measures the regions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, cast

import torch

from worker.assembly.hub import with_local_checkpoint
from worker.assembly.load_times import Loading
from worker.assembly.parts import build
from worker.compile.compile_engine import compile_engine
from worker.compile.state import CompileResult, Progress, RegionState, TargetPhase, TargetState
from worker.compile.targets import COMPILE_TARGETS
from worker.config.compile import Target
from worker.config.session import EngineConfig
from worker.report.compile_report import CompileReport, Memory, Row
from worker.report.compile_watch import CompileWatch, Happened
from worker.report.region_report import Buckets, header, region_report


@dataclass
class TargetWatch:
    """Assigns compile events to targets: a watch around `compile_engine` that receives its progress.

    Attributes:
        targets: the states that `compile_engine` updates.
        then: receives the progress too.
        happened: target -> its events.
    """

    targets: dict[str, TargetState]
    then: Progress | None = None
    happened: dict[str, Happened] = field(default_factory=dict)
    _watch: CompileWatch = field(default_factory=CompileWatch)
    _current: str | None = None

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.stop()
        self._assign(None)

    def progress(self, what: str, done: int, total: int) -> None:
        """The progress callback of `compile_engine`, called before each bucket."""
        compiling = (name for name, state in self.targets.items() if state.phase is TargetPhase.COMPILING)
        self._assign(next(compiling, None))
        if self.then is not None:
            self.then(what, done, total)

    def _assign(self, following: str | None) -> None:
        happened = self._watch.take()
        if self._current is not None:
            self.happened.setdefault(self._current, Happened()).add(happened)
        self._current = following


def start_report(
    config: EngineConfig,
    device: torch.device,
    result: CompileResult,
    happened: Mapping[str, Happened] | None = None,
    cache: str | None = None,
    loading: Loading | None = None,
) -> CompileReport:
    """A row for each target and, on a GPU, for the CUDA graphs of each region.

    Args:
        happened: events from a `TargetWatch`; None: breaks and recompiles are unknown.
        cache: description of the kernel cache; None: taken from its folder.
        loading: of weights that were read from files.
    """
    rows = []
    for name, state in result.targets.items():
        seen = None if happened is None else happened.get(name, Happened())
        was_tried = state.phase.is_active or state.phase is TargetPhase.FELL_BACK
        parts = COMPILE_TARGETS[cast(Target, name)].parts(device.type == "cuda", state.phase is TargetPhase.KERNELS)
        rows.append(
            Row(
                name=name,
                part=", ".join(parts) or None,
                graph_breaks=seen and seen.graph_breaks if was_tried else None,
                recompiles=seen and seen.recompiles if was_tried else None,
                skips=seen.skips if seen else [],
                cuda_graphs=_graphs(state, config, device) if was_tried else state.phase.value,
                n_graphs=state.n_graphs if was_tried else None,
                compile_s=state.seconds if was_tried else None,
                hits=state.hits if was_tried else None,
                misses=state.misses if was_tried else None,
                error=state.error if state.has_failed else None,
            )
        )
    if device.type == "cuda":
        rows += [_region_row(state) for state in result.regions.values()]
    head = header(config, device, cache).model_copy(update={"loading": loading})
    return CompileReport(header=head, rows=rows)


def _region_row(state: RegionState) -> Row:
    """The row of a region's CUDA graphs, or of the reason that it has none."""
    if not state.n_graphs:
        return Row(name=state.name, part=state.stage or None, cuda_graphs=f"no: {state.reason}")
    again = f", {state.n_retried} at second try" if state.n_retried else ""
    return Row(
        name=state.name,
        part=state.stage or None,
        bucket={axis: "/".join(map(str, sizes)) for axis, sizes in state.sizes.items()},
        cuda_graphs=f"{state.n_graphs} captured{again}",
        compile_s=state.seconds,
        memory=Memory(kind="graph pool", compiled_bytes=state.n_bytes),
    )


def _graphs(state: TargetState, config: EngineConfig, device: torch.device) -> str:
    if device.type != "cuda":
        return "not on this device"
    if state.n_captured:
        return f"{state.n_captured} captured"
    return "off" if config.compile.mode == "default" else "left to Inductor"


def compiled_report(
    config: EngineConfig,
    *,
    names: Sequence[str] | None = None,
    buckets: Buckets = "smallest+largest",
    runs: int = 20,
) -> CompileReport:
    """Load a checkpoint, compile it on this thread and measure it: rows of its targets, then of its regions.

    Raises: as `parts.build` and `region_report`.
    """
    config = with_local_checkpoint(config)
    parts = build(config)
    targets: dict[str, TargetState] = {}
    with TargetWatch(targets) as watch:
        result = compile_engine(parts, config, targets=targets, progress=watch.progress)
    start = start_report(config, parts.model.device, result, watch.happened, loading=parts.loading)
    measured = region_report(parts, config, result, names=names, buckets=buckets, runs=runs)
    return start.followed_by(measured)
