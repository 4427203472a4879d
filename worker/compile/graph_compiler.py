"""One run over all compile targets: wrap, warm up at every size that serving can meet, capture, fall back.

Knows targets, buckets and what failing costs. Does not know when a whole run has to be repeated (`tuning`).
"""

import gc
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from models.graphs.captured import Bucket
from models.graphs.compiler import cache_counts, counters, force_eager
from models.graphs.region_graphs import CaptureFacts, RegionTable, automatic_dynamic
from models.omni import OmniModel
from worker.compile.errors import first_line, is_misfit, reason_of
from worker.compile.prefetch import await_compiler, keep_kernels, rehearse
from worker.compile.state import RegionState, TargetPhase, TargetState, Tuned
from worker.compile.targets import (
    COMPILE_TARGETS,
    NEVER_CAPTURED,
    SAMPLERS,
    SERVING,
    UNTRIED,
    CompileTarget,
    Table,
    compiles,
)
from worker.config.compile import TARGETS, CompileConfig, Target

LOG = logging.getLogger(__name__)
# What takes the place of a mode whose graphs would be captured inside ours.
UNCAPTURED = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs", "default": "default"}

Progress = Callable[[str, int, int], None]
Calls = Callable[[RegionTable, str], list[tuple[Bucket, dict[str, Any]]]]


class GraphCompiler:
    """One run over all targets: `run`, once.

    was_misled: a graph came from the cache and could not run. kernels_error: the table whose kernels, the project's
    own, failed, and how; the run ends there. Either means that all of it has to be done again, otherwise.
    """

    def __init__(
        self,
        model: OmniModel,
        tables: dict[str, RegionTable],
        config: CompileConfig,
        tuned: Tuned,
        progress: Progress | None,
        backend: Any,
        by_kernels: Collection[Target],
        is_warm: bool = False,
    ):
        """
        Args:
            tables: the model's and, if there is one, the vocoder's: `omni`, `vocoder`. tuned: filled. backend: of
                torch.compile. by_kernels: whose layers the project's own kernels run, asked for or not; the model is
                changed over to its, the vocoder has them. is_warm: an earlier start has made all kernels.
        """
        self._config, self._tuned, self._model, self._by_kernels = config, tuned, model, frozenset(by_kernels)
        self._tell = progress or (lambda what, done, total: None)
        self._tables, self._device = tables, model.device
        self._is_gpu = self._device.type == "cuda"
        # What is done follows from the device's name alone, so that it can be gone through where there is no GPU.
        self._has_driver = self._is_gpu and torch.cuda.is_available()
        is_default = config.mode == "default"
        # What cuDNN has tried it knows by thread and by size, and in the middle of a capture it can try nothing; what
        # comes before captures is a rehearsal, on other threads, or at a few sizes alone.
        self._knows_sizes = not (self._has_driver and config.cudnn_benchmark)
        self._captures = self._is_gpu and (config.cuda_graphs == "on" or (config.cuda_graphs == "auto" and is_default))
        mode = UNCAPTURED[config.mode] if self._captures else config.mode
        self._options = {"mode": mode, "dynamic": config.dynamic, "backend": backend}
        for table in self._tables.values():
            table.marks_steps = not is_default and not self._captures
        self.was_misled = False
        self.kernels_error: tuple[Table, str] | None = None
        self._facts: dict[str, CaptureFacts] = {}  # by region
        self._uncaptured: dict[str, str] = {}  # why it could not be captured, by region that goes without alone
        self._done = self._total = 0
        self._asked = [name for name in TARGETS if name in config.targets]
        self._warmed: dict[Target, list[str]] = {name: [] for name in self._asked}
        for name in self._asked:
            self._warmed[name] = self._to_warm(name)
        self._is_warm, self._is_rehearsed = is_warm, False

    def run(self) -> None:
        """Fills `tuned`, but for its toggles and counts."""
        if self._config.cuda_graphs == "on" and not self._is_gpu:
            self._tuned.notes.append(f"compile.cuda_graphs: expected a GPU, got {self._device}; nothing is captured")
            LOG.warning("%s", self._tuned.notes[-1])
        if any(COMPILE_TARGETS[name].table == "omni" for name in self._by_kernels):
            self._use_kernels()
        if self._has_driver and not self.kernels_error:
            self._get_ready()
        self._total = len([0 for step in self._steps() for _ in step])
        for name in self._asked:
            if self.kernels_error:
                return
            self._compile(name)
        self._warm_rest()
        if self._captures and not self.kernels_error:
            self._capture_all()
        self._tuned.n_graphs = sum(table.n_captured for table in self._tables.values())
        self._tuned.regions = {
            name: self._region_state(table, name) for table in self._tables.values() for name in table.table
        }

    def _get_ready(self) -> None:
        """Before anything is wrapped: kernels of several stages can be made at once, a compiled graph cannot."""
        is_empty = keep_kernels(self._device)
        if self._is_warm and not is_empty:  # Triton's folder may lie elsewhere than what the cache has looked at
            return
        if self._by_kernels:
            start = time.perf_counter()
            self._tell("kernels of all stages", 0, 1)
            rehearse(self._device, self._stages())
            self._is_rehearsed = True
            self._tuned.seconds["kernels"] = time.perf_counter() - start
        if compiles(self._asked, is_gpu=self._is_gpu, by_kernels=self._by_kernels):
            await_compiler()

    def _stages(self) -> dict[str, list[Callable[[], None]]]:
        """Every call of the warm-up, by stage."""
        stages: dict[str, list[Callable[[], None]]] = {}
        for target, regions in self._warmed.items():
            table = self._tables.get(COMPILE_TARGETS[target].table)
            for region in regions:
                for bucket, variant in self._calls(table, region):
                    call = partial(table.call_example, region, bucket, variant)
                    stages.setdefault(COMPILE_TARGETS[target].stage, []).append(call)
        return stages

    # --- targets -------------------------------------------------------------------------------

    def _compile(self, name: Target) -> None:
        spec, state = COMPILE_TARGETS[name], self._tuned.targets[name]
        table, regions = self._tables.get(spec.table), self._regions(spec)
        if table is None or not regions:
            state.phase, state.error = TargetPhase.OFF, "the checkpoint does not have it"
            return
        state.phase, hits = TargetPhase.COMPILING, cache_counts()[0]
        with self._timed(state):
            try:
                try:
                    self._wrap(name, table, regions, self._options)
                    self._warm_up(name, table, self._warmed[name])
                except Exception as error:
                    if self._options["mode"] == "default" or isinstance(error, torch.cuda.OutOfMemoryError):
                        raise
                    self._tuned.notes.append(f"{name}: mode {self._options['mode']} failed, default taken instead")
                    LOG.warning("%s: %s", self._tuned.notes[-1], reason_of(error))
                    table.clear_scratch()
                    self._wrap(name, table, regions, {**self._options, "mode": "default"})
                    self._warm_up(name, table, self._warmed[name])
                state.phase = TargetPhase.KERNELS if name in self._by_kernels else TargetPhase.COMPILED
            except Exception as error:
                self.was_misled |= cache_counts()[0] > hits and is_misfit(error)
                if name in self._by_kernels:
                    self.kernels_error = spec.table, f"{name}: {reason_of(error)}"
                else:
                    self._fall_back(name, error)
        LOG.info(
            "compile target %s: %s in %.1f s, %d graphs, %d cache hits, %d misses",
            *(name, state.phase, state.seconds, state.n_graphs, state.hits, state.misses),
        )

    def _use_kernels(self) -> None:
        try:
            self._model.use_kernels(True)
        except Exception as error:
            self.kernels_error = "omni", reason_of(error)

    def _wrap(self, name: Target, table: RegionTable, regions: list[str], options: dict[str, Any]) -> None:
        parts, mode = self._parts(name), options["mode"]
        table.compile_parts([part for part in parts if part not in SAMPLERS], **options)
        if samplers := [part for part in parts if part in SAMPLERS]:
            table.compile_parts(samplers, **{**options, "mode": UNTRIED.get(mode, mode)})
        if whole := [region for region in self._whole(name) if region in regions]:
            table.compile(whole, **{**options, "dynamic": automatic_dynamic(options["dynamic"])})

    def _fall_back(self, name: Target, error: Exception) -> None:
        """From now on nothing of the target is compiled or captured; kernels that run it go on."""
        spec, state = COMPILE_TARGETS[name], self._tuned.targets[name]
        table, regions = self._tables[spec.table], self._regions(spec)
        table.uncompile([region for region in spec.whole if region in regions], self._parts(name))
        table.drop_graphs(regions)
        state.phase, state.n_captured = TargetPhase.FELL_BACK, 0
        state.error = f"{state.error}; {reason_of(error)}" if state.error else reason_of(error)
        LOG.warning("compile target %s stays eager: %s", name, state.error, exc_info=error)
        if self._has_driver:
            with suppress(Exception):
                torch.cuda.empty_cache()
        try:
            table.clear_scratch()
            self._warm_up(f"{name}, eager", table, regions, self._calls)
        except Exception as second:  # serving may still do: its sizes are smaller most of the time
            state.error += f"; eager warm-up: {first_line(second)}"
            LOG.warning("compile target %s: eager warm-up failed: %s", name, second)
            if name in self._by_kernels:
                self.kernels_error = spec.table, f"{name}: {reason_of(second)}"

    # --- regions -------------------------------------------------------------------------------

    def _parts(self, target: Target) -> tuple[str, ...]:
        """Stacks and pieces of it that compile."""
        return COMPILE_TARGETS[target].parts(self._is_gpu, target in self._by_kernels)

    def _whole(self, target: Target) -> tuple[str, ...]:
        """Regions of it that compile in one piece."""
        return COMPILE_TARGETS[target].whole_regions(self._is_gpu, target in self._by_kernels)

    def _regions(self, spec: CompileTarget) -> list[str]:
        table = self._tables.get(spec.table)
        return [] if table is None else [name for name in spec.all_regions if name in table.table]

    def _to_warm(self, target: Target) -> list[str]:
        """Regions to run once this target is wrapped: all of its own, unless nothing of it compiles and others ran."""
        spec = COMPILE_TARGETS[target]
        if self._parts(target) or self._whole(target):
            return self._regions(spec)
        before = {name for names in self._warmed.values() for name in names}
        return [name for name in self._regions(spec) if name not in before]

    def _calls(self, table: RegionTable, region: str) -> list[tuple[Bucket, dict[str, Any]]]:
        """What of a region serving can meet."""
        calls = table.calls(region)
        by_kernels = self._by_kernels.intersection(self._owners(region))
        if region in NEVER_CAPTURED and by_kernels:  # kernels are those of the regions beside it
            return [(bucket, variant) for bucket, variant in calls if bucket["batch"] == table.shapes.batch[0]]
        return calls

    def _to_call(self, table: RegionTable, region: str) -> list[tuple[Bucket, dict[str, Any]]]:
        """What to run of a region before it is captured. Of one that is all kernels, the smallest and largest sizes are
        enough: what is made on first use has been made in a rehearsal, or is read from disk, in a capture at worst.
        """
        calls = self._calls(table, region)
        owners = [name for name in self._owners(region) if name in self._asked]
        if not (self._captures and self._by_kernels.issuperset(owners) and calls) or region in NEVER_CAPTURED:
            return calls
        ends = {axis: {min(b[axis] for b, _ in calls), max(b[axis] for b, _ in calls)} for axis in calls[0][0]}
        edges = [(bucket, calls[0][1]) for bucket, _ in calls if all(bucket[axis] in ends[axis] for axis in bucket)]
        return [] if self._is_rehearsed else [edge for i, edge in enumerate(edges) if edge not in edges[:i]]

    def _rest(self) -> list[tuple[RegionTable, str]]:
        """Regions that no chosen target runs."""
        warm = {name for target in self._asked for name in COMPILE_TARGETS[target].all_regions}
        return [(table, name) for table in self._tables.values() for name in table.table if name not in warm]

    def _captured_regions(self) -> list[tuple[RegionTable, str]]:
        """auto: what chosen targets run. on: everything that serves."""
        found = []
        for name in SERVING:
            table = next((table for table in self._tables.values() if name in table.table), None)
            if table is not None and (self._config.cuda_graphs == "on" or set(self._owners(name)) & set(self._asked)):
                found.append((table, name))
        return found

    def _owners(self, region: str) -> list[Target]:
        return [target for target, spec in COMPILE_TARGETS.items() if region in spec.all_regions]

    def _warm_up(self, what: str, table: RegionTable, regions: list[str], calls: Calls | None = None) -> None:
        """calls: which of a region; None = those that have to come before it is captured."""
        for region in regions:
            start = time.perf_counter()
            for bucket, variant in (calls or self._to_call)(table, region):
                sizes = " ".join(f"{axis} {size}" for axis, size in bucket.items())
                self._step(f"{what}: {region} {sizes}")
                table.call_example(region, bucket, variant)
            self._spent(region, start)

    def _warm_rest(self) -> None:
        """What stays eager allocates on first use too. At the largest size if it is none of what a unit calls."""
        for table, region in self._rest():
            start = time.perf_counter()
            calls = table.calls(region)
            for bucket, variant in calls if region in SERVING else calls[-1:]:
                self._step(f"warm up: {region}")
                try:
                    with force_eager():  # its lengths vary from call to call, so it never runs compiled
                        table.call_example(region, bucket, variant)
                except Exception as error:
                    LOG.warning("warm-up of %s: %s", region, first_line(error))
                    if owners := self._by_kernels.intersection(self._owners(region)):
                        self.kernels_error = COMPILE_TARGETS[next(iter(owners))].table, f"{region}: {reason_of(error)}"
                        return
                    break
            if region in SERVING:
                self._spent(region, start)

    # --- graphs --------------------------------------------------------------------------------

    def _capture_all(self) -> None:
        gc.collect()
        if self._has_driver:
            torch.cuda.empty_cache()  # graphs have memory of their own
        for table, region in self._captured_regions():
            if self.kernels_error:
                return
            self._capture(table, region)
        for table in self._tables.values():
            if table.n_captured:
                table.seal()

    def _capture(self, table: RegionTable, region: str) -> None:
        owners = [name for name in self._owners(region) if name in self._asked]
        states = [self._tuned.targets[name] for name in owners]
        self._step(f"capture: {region}")
        if any(state.phase is TargetPhase.FELL_BACK for state in states):
            return
        start = time.perf_counter()
        try:
            self._facts[region] = table.capture_region(region, stage=self._stage(region), is_warm=self._knows_sizes)
            self._spent(region, start)
            for state in states[:1]:
                state.n_captured += self._facts[region].n_graphs
        except Exception as error:
            table.drop_graphs([region])
            self._go_without(table, region, owners, error)
        for state in states[:1]:
            state.seconds += time.perf_counter() - start

    def _go_without(self, table: RegionTable, region: str, owners: list[Target], error: Exception) -> None:
        """The region alone; out of memory, or if it does not run like that either, its targets with all of theirs."""
        try:
            if owners and isinstance(error, torch.cuda.OutOfMemoryError):
                raise error
            table.clear_scratch()
            if owners:  # it may have run at its smallest and largest sizes alone
                self._warm_up(f"{region}, without graphs", table, [region], self._calls)
        except Exception as worse:
            for name in owners:
                self._fall_back(name, worse)
            if owners:
                return
        self._uncaptured[region] = f"capturing it failed: {reason_of(error)}"
        self._tuned.notes.append(reason := f"{region}: {self._uncaptured[region]}")
        for state in (self._tuned.targets[name] for name in owners):
            state.error = f"{state.error}; {reason}" if state.error else reason
        LOG.warning("%s", reason, exc_info=error)

    def _stage(self, region: str) -> str:
        return next((COMPILE_TARGETS[name].stage for name in self._owners(region)), "")

    def _region_state(self, table: RegionTable, name: str) -> RegionState:
        stage = self._stage(name)
        if name in table.captured:
            return RegionState(name, stage, sizes=table.captured_sizes(name), **asdict(self._facts[name]))
        return RegionState(name, stage, reason=self._why_not_captured(name))

    def _why_not_captured(self, region: str) -> str:
        states = [self._tuned.targets[name] for name in self._owners(region)]
        fallen = [state for state in states if state.phase is TargetPhase.FELL_BACK]
        if not self._is_gpu:
            return "there is no GPU"
        if not self._captures:
            return "cuda_graphs is off" if self._config.cuda_graphs == "off" else f"left to mode {self._config.mode}"
        if fallen:
            return f"{fallen[0].name} fell back"
        if region in self._uncaptured:
            return self._uncaptured[region]
        return "no target of it is chosen" if region in SERVING else "no unit calls it"

    def _steps(self) -> Iterator[list[Any]]:
        for target in self._asked:
            for region in self._warmed[target]:
                yield self._to_call(self._tables[COMPILE_TARGETS[target].table], region)
        for table, region in self._rest():
            calls = table.calls(region)
            yield calls if region in SERVING else calls[-1:]
        if self._captures:
            yield self._captured_regions()

    def _step(self, what: str) -> None:
        self._tell(what, min(self._done, self._total), self._total)
        self._done += 1

    def _spent(self, region: str, start: float) -> None:
        if self._has_driver:
            torch.cuda.synchronize(self._device)
        self._tuned.seconds[region] = self._tuned.seconds.get(region, 0.0) + time.perf_counter() - start

    @contextmanager
    def _timed(self, state: TargetState) -> Iterator[None]:
        start, before = time.perf_counter(), cache_counts()
        graphs = counters()["stats"]["unique_graphs"]
        try:
            yield
        finally:
            hits, misses = cache_counts()
            state.seconds += time.perf_counter() - start
            state.n_graphs += counters()["stats"]["unique_graphs"] - graphs
            state.hits, state.misses = state.hits + hits - before[0], state.misses + misses - before[1]
