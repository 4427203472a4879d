"""One run over all compile targets: wrap, warm up at every size that serving uses, capture, fall back.

Contains targets, buckets and fallbacks; `compile_engine` decides whether a run is repeated.
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
from worker.compile.errors import is_size_mismatch, reason_of
from worker.compile.prefetch import build_kernels, set_triton_folder, wait_for_compiler
from worker.compile.state import CompileJob, RegionState, TargetPhase, TargetState
from worker.compile.targets import (
    COMPILE_TARGETS,
    NO_AUTOTUNE,
    SAMPLERS,
    SERVING,
    CompileTarget,
    Table,
    compiles,
)
from worker.config.compile import TARGETS, Target

LOG = logging.getLogger(__name__)
# Mode -> the same mode without Inductor's own CUDA graphs, for regions that are captured as a whole.
UNCAPTURED = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs", "default": "default"}

Calls = Callable[[RegionTable, str], list[tuple[Bucket, dict[str, Any]]]]


class GraphCompiler:
    """One run over all targets; call `run` once.

    had_bad_graph: a graph from the cache did not run. kernels_error: the table whose kernels failed, and the reason;
    the run stops there. In either case the caller repeats it with other settings.
    """

    def __init__(
        self, model: OmniModel, tables: dict[str, RegionTable], job: CompileJob, by_kernels: Collection[Target]
    ):
        """
        Args:
            tables: `omni` of the model and, if there is one, `vocoder`.
            by_kernels: targets whose layers the project's own kernels run, configured or not. The model switches to its
                kernels in `run`; the vocoder already has its own.
        """
        config = job.config
        self._config, self._result, self._model, self._by_kernels = config, job.result, model, frozenset(by_kernels)
        self._progress = job.progress or (lambda what, done, total: None)
        self._tables, self._device = tables, model.device
        self._is_gpu = self._device.type == "cuda"
        # Decisions follow from the device's type alone, so that tests run them without a GPU.
        self._has_driver = self._is_gpu and torch.cuda.is_available()
        is_default = config.mode == "default"
        # cuDNN's benchmark results belong to a thread and a size, and it cannot benchmark during a capture. The calls
        # before captures run on other threads or at a few sizes only, so that each capture warms up by itself.
        self._has_tried_sizes = not (self._has_driver and config.cudnn_benchmark)
        self._captures = self._is_gpu and config.captures
        mode = UNCAPTURED[config.mode] if self._captures else config.mode
        self._options = {"mode": mode, "dynamic": config.dynamic, "backend": job.backend}
        for table in self._tables.values():
            table.marks_steps = not is_default and not self._captures
        self.had_bad_graph = False
        self.kernels_error: tuple[Table, str] | None = None
        self._facts: dict[str, CaptureFacts] = {}  # by region
        self._uncaptured: dict[str, str] = {}  # region that alone is not captured -> reason
        self._done = self._total = 0
        self._targets = [name for name in TARGETS if name in config.targets]
        self._warmed: dict[Target, list[str]] = {name: [] for name in self._targets}
        for name in self._targets:
            self._warmed[name] = self._regions_to_warm(name)
        self._is_warm, self._kernels_built = job.is_warm, False

    def run(self) -> None:
        """Compile and capture; fills the result, except its backend flags and counts."""
        if self._config.cuda_graphs == "on" and not self._is_gpu:
            self._result.notes.append(f"compile.cuda_graphs: expected a GPU, got {self._device}; nothing is captured")
            LOG.warning("%s", self._result.notes[-1])
        if any(COMPILE_TARGETS[name].table == "omni" for name in self._by_kernels):
            self._use_kernels()
        if self._has_driver and not self.kernels_error:
            self._prebuild_kernels()
        self._total = len([0 for step in self._steps() for _ in step])
        for name in self._targets:
            if self.kernels_error:
                return
            self._compile(name)
        self._warm_untargeted()
        if self._captures and not self.kernels_error:
            self._capture_all()
        self._result.n_graphs = sum(table.n_captured for table in self._tables.values())
        self._result.regions = {
            name: self._region_state(table, name) for table in self._tables.values() for name in table.table
        }

    def _prebuild_kernels(self) -> None:
        """Build kernels of several targets at once, before anything is wrapped: graphs compile one after the other."""
        is_empty = set_triton_folder(self._device)
        if self._is_warm and not is_empty:  # Triton's folder may be another one than the checked cache folder
            return
        if self._by_kernels:
            start = time.perf_counter()
            self._progress("kernels of all targets", 0, 1)
            build_kernels(self._device, self._calls_by_target())
            self._kernels_built = True
            self._result.seconds["kernels"] = time.perf_counter() - start
        if compiles(self._targets, is_gpu=self._is_gpu, by_kernels=self._by_kernels):
            wait_for_compiler()

    def _calls_by_target(self) -> dict[Target, list[Callable[[], None]]]:
        """Target -> every call of its warm-up that no earlier target makes.

        Targets may run at the same time: each has tensors of its own in the scratch slot. A call of flow or HiFT may
        empty the scratch slot of the other's, which then computes other values from valid rows.
        """
        found: dict[Target, list[Callable[[], None]]] = {}
        seen: set[str] = set()
        for target, regions in self._warmed.items():
            for region in [name for name in regions if name not in seen]:
                seen.add(region)
                table = self._tables[COMPILE_TARGETS[target].table]
                for bucket, variant in table.calls(region):
                    found.setdefault(target, []).append(partial(table.call_example, region, bucket, variant))
        return found

    # --- targets -------------------------------------------------------------------------------

    def _compile(self, name: Target) -> None:
        spec, state = COMPILE_TARGETS[name], self._result.targets[name]
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
                    self._result.notes.append(f"{name}: mode {self._options['mode']} failed, default taken instead")
                    LOG.warning("%s: %s", self._result.notes[-1], reason_of(error))
                    table.clear_scratch()
                    self._wrap(name, table, regions, {**self._options, "mode": "default"})
                    self._warm_up(name, table, self._warmed[name])
                state.phase = TargetPhase.KERNELS if name in self._by_kernels else TargetPhase.COMPILED
            except Exception as error:
                self.had_bad_graph |= cache_counts()[0] > hits and is_size_mismatch(error)
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
            table.compile_parts(samplers, **{**options, "mode": NO_AUTOTUNE.get(mode, mode)})
        if whole := [region for region in self._whole(name) if region in regions]:
            table.compile(whole, **{**options, "dynamic": automatic_dynamic(options["dynamic"])})

    def _fall_back(self, name: Target, error: Exception) -> None:
        """Run the target eagerly, without graphs; kernels that run its layers stay."""
        spec, state = COMPILE_TARGETS[name], self._result.targets[name]
        table, regions = self._tables[spec.table], self._regions(spec)
        table.uncompile([region for region in spec.whole if region in regions], self._parts(name))
        table.drop_graphs(regions)
        state.phase, state.n_captured = TargetPhase.FELL_BACK, 0
        state.error = f"{state.error}; {reason_of(error)}" if state.error else reason_of(error)
        LOG.warning("compile target %s stays eager: %s", name, state.error, exc_info=error)
        with suppress(Exception):
            self._free_cached()
        try:
            table.clear_scratch()
            self._warm_up(f"{name}, eager", table, regions, RegionTable.calls)
        except Exception as second:  # serving may still succeed: its sizes are mostly smaller
            state.error += f"; eager warm-up: {reason_of(second)}"
            LOG.warning("compile target %s: eager warm-up failed: %s", name, second)
            if name in self._by_kernels:
                self.kernels_error = spec.table, f"{name}: {reason_of(second)}"

    # --- regions -------------------------------------------------------------------------------

    def _parts(self, target: Target) -> tuple[str, ...]:
        """Stacks and functions of the target that compile."""
        return COMPILE_TARGETS[target].parts(self._is_gpu, target in self._by_kernels)

    def _whole(self, target: Target) -> tuple[str, ...]:
        """Regions of the target that compile as a whole."""
        return COMPILE_TARGETS[target].whole_regions(self._is_gpu, target in self._by_kernels)

    def _regions(self, spec: CompileTarget) -> list[str]:
        table = self._tables.get(spec.table)
        return [] if table is None else [name for name in spec.all_regions if name in table.table]

    def _regions_to_warm(self, target: Target) -> list[str]:
        """Regions to run after this target is wrapped.

        Returns: all regions of the target; if the target has nothing to compile, those that no earlier target has run.
        """
        spec = COMPILE_TARGETS[target]
        if self._parts(target) or self._whole(target):
            return self._regions(spec)
        before = {name for names in self._warmed.values() for name in names}
        return [name for name in self._regions(spec) if name not in before]

    def _calls_before_capture(self, table: RegionTable, region: str) -> list[tuple[Bucket, dict[str, Any]]]:
        """The calls of a region before it is captured.

        A region whose layers all run on kernels needs none if they have just been built, and else one, which creates
        library handles: kernels are read from disk, or at worst built, during a capture too.
        """
        calls = table.calls(region)
        owners = [name for name in self._owners(region) if name in self._targets]
        if not (self._captures and self._by_kernels.issuperset(owners) and calls):
            return calls
        return [] if self._kernels_built else calls[:1]

    def _untargeted(self) -> list[tuple[RegionTable, str]]:
        """Regions that no configured target runs."""
        warm = {name for target in self._targets for name in COMPILE_TARGETS[target].all_regions}
        return [(table, name) for table in self._tables.values() for name in table.table if name not in warm]

    def _captured_regions(self) -> list[tuple[RegionTable, str]]:
        """The regions to capture: of configured targets with `auto`, of all that serve with `on`."""
        found = []
        for name in SERVING:
            table = next((table for table in self._tables.values() if name in table.table), None)
            if table is not None and (self._config.cuda_graphs == "on" or set(self._owners(name)) & set(self._targets)):
                found.append((table, name))
        return found

    def _owners(self, region: str) -> list[Target]:
        return [target for target, spec in COMPILE_TARGETS.items() if region in spec.all_regions]

    def _warm_up(self, what: str, table: RegionTable, regions: list[str], calls: Calls | None = None) -> None:
        """Run regions. calls: gives a region's calls; None: those before it is captured."""
        for region in regions:
            start = time.perf_counter()
            for bucket, variant in (calls or self._calls_before_capture)(table, region):
                sizes = " ".join(f"{axis} {size}" for axis, size in bucket.items())
                self._step(f"{what}: {region} {sizes}")
                table.call_example(region, bucket, variant)
            self._add_seconds(region, start)

    def _warm_untargeted(self) -> None:
        """Run regions that stay eager, because they allocate at first use; outside of units at the largest size."""
        for table, region in self._untargeted():
            start = time.perf_counter()
            calls = table.calls(region)
            for bucket, variant in calls if region in SERVING else calls[-1:]:
                self._step(f"warm up: {region}")
                try:
                    with force_eager():  # its lengths vary from call to call, so it never runs compiled
                        table.call_example(region, bucket, variant)
                except Exception as error:
                    LOG.warning("warm-up of %s: %s", region, reason_of(error))
                    if owners := self._by_kernels.intersection(self._owners(region)):
                        self.kernels_error = COMPILE_TARGETS[next(iter(owners))].table, f"{region}: {reason_of(error)}"
                        return
                    break
            if region in SERVING:
                self._add_seconds(region, start)

    # --- graphs --------------------------------------------------------------------------------

    def _capture_all(self) -> None:
        gc.collect()
        self._free_cached()  # graphs allocate from pools of their own
        for table, region in self._captured_regions():
            if self.kernels_error:
                return
            self._capture(table, region)
        self._free_cached()  # example inputs, and what calls before a capture have left on the stages' streams
        for table in self._tables.values():
            if table.n_captured:
                table.seal()

    def _capture(self, table: RegionTable, region: str) -> None:
        owners = [name for name in self._owners(region) if name in self._targets]
        states = [self._result.targets[name] for name in owners]
        self._step(f"capture: {region}")
        if any(state.phase is TargetPhase.FELL_BACK for state in states):
            return
        start = time.perf_counter()
        try:
            self._facts[region] = table.capture_region(region, stage=self._stage(region), is_warm=self._has_tried_sizes)
            self._add_seconds(region, start)
            for state in states[:1]:
                state.n_captured += self._facts[region].n_graphs
        except Exception as error:
            table.drop_graphs([region])
            self._run_uncaptured(table, region, owners, error)
        for state in states[:1]:
            state.seconds += time.perf_counter() - start

    def _run_uncaptured(self, table: RegionTable, region: str, owners: list[Target], error: Exception) -> None:
        """Serve the region without a graph; its targets fall back if memory is exhausted or it does not run."""
        try:
            if owners and isinstance(error, torch.cuda.OutOfMemoryError):
                raise error
            table.clear_scratch()
            if owners:  # so far it may have run at its smallest and largest sizes only
                self._warm_up(f"{region}, without graphs", table, [region], RegionTable.calls)
        except Exception as worse:
            for name in owners:
                self._fall_back(name, worse)
            if owners:
                return
        self._uncaptured[region] = f"capturing it failed: {reason_of(error)}"
        self._result.notes.append(reason := f"{region}: {self._uncaptured[region]}")
        for state in (self._result.targets[name] for name in owners):
            state.error = f"{state.error}; {reason}" if state.error else reason
        LOG.warning("%s", reason, exc_info=error)

    def _free_cached(self) -> None:
        if self._has_driver:
            torch.cuda.empty_cache()

    def _stage(self, region: str) -> str:
        return next((COMPILE_TARGETS[name].stage for name in self._owners(region)), "")

    def _region_state(self, table: RegionTable, name: str) -> RegionState:
        stage = self._stage(name)
        if name in table.captured:
            return RegionState(name, stage, sizes=table.captured_sizes(name), **asdict(self._facts[name]))
        return RegionState(name, stage, reason=self._why_not_captured(name))

    def _why_not_captured(self, region: str) -> str:
        states = [self._result.targets[name] for name in self._owners(region)]
        fallen = [state for state in states if state.phase is TargetPhase.FELL_BACK]
        if not self._is_gpu:
            return "there is no GPU"
        if not self._captures:
            return "cuda_graphs is off" if self._config.cuda_graphs == "off" else f"left to mode {self._config.mode}"
        if fallen:
            return f"{fallen[0].name} fell back"
        if region in self._uncaptured:
            return self._uncaptured[region]
        return "no target of it is configured" if region in SERVING else "no unit calls it"

    def _steps(self) -> Iterator[list[Any]]:
        for target in self._targets:
            for region in self._warmed[target]:
                yield self._calls_before_capture(self._tables[COMPILE_TARGETS[target].table], region)
        for table, region in self._untargeted():
            calls = table.calls(region)
            yield calls if region in SERVING else calls[-1:]
        if self._captures:
            yield self._captured_regions()

    def _step(self, what: str) -> None:
        self._progress(what, min(self._done, self._total), self._total)
        self._done += 1

    def _add_seconds(self, region: str, start: float) -> None:
        if self._has_driver:
            torch.cuda.synchronize(self._device)
        self._result.seconds[region] = self._result.seconds.get(region, 0.0) + time.perf_counter() - start

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
