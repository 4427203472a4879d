"""Compiles and captures what serving calls, before the first session. Afterwards nothing compiles.

Each target is wrapped, warmed up at every size that serving can meet, and captured; one that fails anywhere runs as it
is from then on, and says why. Targets come one after the other, so that a failure has one name.

`tune` must run on the thread that will serve. The graphs that `reduce-overhead` captures belong to a thread, and so
does part of what a compiled graph is bound to (number of threads, default types): on another thread all of it would be
compiled again, at the first unit.

Knows targets, buckets and what failing costs. Does not know sessions, nor where kernels are kept.
"""

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.experimental._config as symbol_config
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor.codecache import FxGraphCache

from models.graphs import RegionTable, compile_counters
from worker.building import Parts
from worker.compile_config import TARGETS, CompileConfig, Target
from worker.compile_state import CompileCounts, TargetPhase, TargetState
from worker.compile_targets import AIMS, SERVING, Aim
from worker.config import EngineConfig
from worker.toggles import apply_toggles

LOG = logging.getLogger(__name__)
MAX_REASON = 400  # characters of an error's text
# What takes the place of a mode whose graphs would be captured inside ours.
UNCAPTURED = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs", "default": "default"}

Progress = Callable[[str, int, int], None]


@dataclass
class Tuned:
    """What was done. targets: by name. seconds: by region. n_graphs: CUDA graphs captured. counts: when it was over.
    toggles: the switches of speed that are in force. notes: what was asked for and makes no sense here.
    """

    targets: dict[str, TargetState] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    n_graphs: int = 0
    counts: CompileCounts = field(default_factory=CompileCounts)
    toggles: dict[str, str | bool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def hits(self) -> int:
        """Of the cache of compiled graphs, by all targets."""
        return sum(state.hits for state in self.targets.values())

    @property
    def misses(self) -> int:
        return sum(state.misses for state in self.targets.values())


def tune(
    parts: Parts,
    config: EngineConfig,
    *,
    targets: dict[str, TargetState] | None = None,
    progress: Progress | None = None,
    backend: Any = "inductor",
) -> Tuned:
    """Do what `config.compile` says; on the thread that will serve, before any session is open.

    Args:
        targets: filled with the state of every target, and kept up to date while it works.
        progress: told (what, done, total) before each bucket. backend: of torch.compile.
    Returns: what was done; a target that failed is in it, with the reason, and nothing is raised for it.
    """
    tuned = Tuned({} if targets is None else targets)
    set_states(tuned.targets, config.compile)
    if config.compile.enabled:
        tuned.toggles = apply_toggles(config.compile, parts.model.device)
        # Two sizes that happen to be equal in the first example are still two sizes.
        with symbol_config.patch(use_duck_shape=False):
            tuner = _Tuner(parts, config.compile, tuned, progress, backend)
            tuner.run()
            if tuner.was_misled:
                tuned.notes.append("compile cache: it held graphs that do not run; it was emptied, all compiled again")
                LOG.warning("%s", tuned.notes[-1])
                untune(parts)
                torch._dynamo.reset()
                _empty_cache()
                set_states(tuned.targets, config.compile)
                _Tuner(parts, config.compile, tuned, progress, backend).run()
    tuned.counts = count(parts)
    return tuned


def set_states(targets: dict[str, TargetState], config: CompileConfig) -> None:
    """All targets as they are before anything is done."""
    asked = config.targets if config.enabled else ()
    targets.clear()
    for name in TARGETS:
        targets[name] = TargetState(name, TargetPhase.WAITING if name in asked else TargetPhase.OFF)


def untune(parts: Parts) -> None:
    """Back to eager, CUDA graphs gone: what holds on to an engine that is to be let go."""
    for table in _tables(parts).values():
        table.uncompile()
        table.drop_graphs()
        table.marks_steps = False


def count(parts: Parts) -> CompileCounts:
    """What compiling has done so far; cheap, and for any thread."""
    now = compile_counters()
    return CompileCounts(
        graph_breaks=now["graph_breaks"],
        graphs=now["graphs"],
        graph_skips=sum(table.n_skipped for table in _tables(parts).values()),
        cudagraph_skips=counters["inductor"]["cudagraph_skips"],
    )


class LateWatch:
    """Notices what compiles after warm-up: a second or more in the middle of somebody's sentence."""

    def __init__(self, parts: Parts):
        """From now on nothing may be added."""
        self._parts, self._before, self._told = parts, count(parts), CompileCounts()

    def check(self) -> CompileCounts:
        """What was added since the beginning; each growth is logged once."""
        late = count(self._parts).since(self._before)
        if late != self._told:
            LOG.warning("compiled after warm-up: %s", late)
            self._told = late
        return late


def _tables(parts: Parts) -> dict[str, RegionTable]:
    tables: dict[str, RegionTable] = {"omni": parts.duplex.runner.regions}
    if parts.vocoder is not None:
        tables["vocoder"] = parts.vocoder.regions
    return tables


class _Tuner:
    """One run of `tune`."""

    def __init__(self, parts: Parts, config: CompileConfig, tuned: Tuned, progress: Progress | None, backend: Any):
        self._config, self._tuned = config, tuned
        self._tell = progress or (lambda what, done, total: None)
        self._tables, self._device = _tables(parts), parts.model.device
        self._is_gpu = self._device.type == "cuda"
        is_default = config.mode == "default"
        self._captures = self._is_gpu and (config.cuda_graphs == "on" or (config.cuda_graphs == "auto" and is_default))
        mode = UNCAPTURED[config.mode] if self._captures else config.mode
        self._options = {"mode": mode, "dynamic": config.dynamic, "backend": backend}
        for table in self._tables.values():
            table.marks_steps = not is_default and not self._captures
        self.was_misled = False  # a graph came from the cache and could not run
        self._done = 0
        self._asked = [name for name in TARGETS if name in config.targets]
        self._total = len([0 for step in self._steps() for _ in step])

    def run(self) -> None:
        if self._config.cuda_graphs == "on" and not self._is_gpu:
            self._tuned.notes.append(f"compile.cuda_graphs: expected a GPU, got {self._device}; nothing is captured")
            LOG.warning("%s", self._tuned.notes[-1])
        for name in self._asked:
            self._compile(name)
        self._warm_rest()
        if self._captures:
            for table, region in self._captured_regions():
                self._capture(table, region)
        self._tuned.n_graphs = sum(table.n_captured for table in self._tables.values())

    # --- targets -------------------------------------------------------------------------------

    def _compile(self, name: Target) -> None:
        aim, state = AIMS[name], self._tuned.targets[name]
        table, regions = self._tables.get(aim.table), self._regions(aim)
        if table is None or not regions:
            state.phase, state.error = TargetPhase.OFF, "the checkpoint does not have it"
            return
        state.phase, hits = TargetPhase.COMPILING, _cache_counts()[0]
        with self._timed(state):
            try:
                try:
                    self._wrap(aim, table, regions, self._options)
                    self._warm_up(name, table, regions)
                except Exception as error:
                    if self._options["mode"] == "default" or isinstance(error, torch.cuda.OutOfMemoryError):
                        raise
                    self._tuned.notes.append(f"{name}: mode {self._options['mode']} failed, default taken instead")
                    LOG.warning("%s: %s", self._tuned.notes[-1], self._reason(error))
                    table.clear_scratch()
                    self._wrap(aim, table, regions, {**self._options, "mode": "default"})
                    self._warm_up(name, table, regions)
                state.phase = TargetPhase.COMPILED
            except Exception as error:
                self.was_misled |= _cache_counts()[0] > hits and _is_misfit(error)
                self._fall_back(name, error)
        LOG.info(
            "compile target %s: %s in %.1f s, %d graphs, %d cache hits, %d misses",
            *(name, state.phase, state.seconds, state.n_graphs, state.hits, state.misses),
        )

    def _wrap(self, aim: Aim, table: RegionTable, regions: list[str], options: dict[str, Any]) -> None:
        table.compile_parts(aim.parts(self._is_gpu), **options)
        if whole := [region for region in aim.whole_regions(self._is_gpu) if region in regions]:
            table.compile(whole, **options)

    def _fall_back(self, name: Target, error: Exception) -> None:
        """The target is eager from now on, graphs of its regions included."""
        aim, state = AIMS[name], self._tuned.targets[name]
        table, regions = self._tables[aim.table], self._regions(aim)
        table.uncompile([region for region in aim.whole if region in regions], aim.parts(self._is_gpu))
        table.drop_graphs(regions)
        state.phase, state.n_captured, state.error = TargetPhase.FELL_BACK, 0, self._reason(error)
        LOG.warning("compile target %s stays eager: %s", name, state.error, exc_info=error)
        if self._is_gpu:
            with suppress(Exception):
                torch.cuda.empty_cache()
        try:
            table.clear_scratch()
            self._warm_up(f"{name}, eager", table, regions)
        except Exception as second:  # serving may still do: its sizes are smaller most of the time
            state.error += f"; eager warm-up: {_first_line(second)}"
            LOG.warning("compile target %s: eager warm-up failed: %s", name, second)

    def _reason(self, error: BaseException) -> str:
        error = getattr(error, "inner_exception", error)  # what a backend raised, without what Dynamo says of it
        text = f"{type(error).__name__}: {_first_line(error)}"
        if isinstance(error, torch.cuda.OutOfMemoryError):
            text += (
                "; turn off one of: the target (compile.targets), CUDA graphs (compile.cuda_graphs: off), autotuning"
            )
            text += " (compile.mode: default), or lower max_sessions"
        return text

    # --- regions -------------------------------------------------------------------------------

    def _regions(self, aim: Aim) -> list[str]:
        table = self._tables.get(aim.table)
        return [] if table is None else [name for name in aim.all_regions if name in table.table]

    def _rest(self) -> list[tuple[RegionTable, str]]:
        """Regions that no chosen target runs."""
        warm = {name for target in self._asked for name in AIMS[target].all_regions}
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
        return [target for target, aim in AIMS.items() if region in aim.all_regions]

    def _warm_up(self, what: str, table: RegionTable, regions: list[str]) -> None:
        for region in regions:
            start = time.perf_counter()
            for bucket, variant in table.calls(region):
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
                    # What runs with a length of its own each time never runs compiled.
                    with torch.compiler.set_stance("force_eager"):
                        table.call_example(region, bucket, variant)
                except Exception as error:
                    LOG.warning("warm-up of %s: %s", region, _first_line(error))
                    break
            if region in SERVING:
                self._spent(region, start)

    def _capture(self, table: RegionTable, region: str) -> None:
        owners = self._owners(region)
        states = [self._tuned.targets[name] for name in owners]
        self._step(f"capture: {region}")
        if any(state.phase is TargetPhase.FELL_BACK for state in states):
            return
        start = time.perf_counter()
        try:
            before = table.n_captured
            table.capture([region])
            states[0].n_captured += table.n_captured - before
            self._spent(region, start)
        except Exception as error:
            table.drop_graphs([region])
            for name in owners:
                self._fall_back(name, error)
        states[0].seconds += time.perf_counter() - start

    # --- counting ------------------------------------------------------------------------------

    def _steps(self) -> Iterator[list[Any]]:
        for target in self._asked:
            for region in self._regions(AIMS[target]):
                yield self._tables[AIMS[target].table].calls(region)
        for table, region in self._rest():
            calls = table.calls(region)
            yield calls if region in SERVING else calls[-1:]
        if self._captures:
            yield self._captured_regions()

    def _step(self, what: str) -> None:
        self._tell(what, min(self._done, self._total), self._total)
        self._done += 1

    def _spent(self, region: str, start: float) -> None:
        if self._is_gpu and torch.cuda.is_available():
            torch.cuda.synchronize(self._device)
        self._tuned.seconds[region] = self._tuned.seconds.get(region, 0.0) + time.perf_counter() - start

    @contextmanager
    def _timed(self, state: TargetState) -> Iterator[None]:
        start, before = time.perf_counter(), _cache_counts()
        graphs = counters["stats"]["unique_graphs"]
        try:
            yield
        finally:
            hits, misses = _cache_counts()
            state.seconds += time.perf_counter() - start
            state.n_graphs += counters["stats"]["unique_graphs"] - graphs
            state.hits, state.misses = state.hits + hits - before[0], state.misses + misses - before[1]


def _cache_counts() -> tuple[int, int]:
    """Hits and misses of the cache of compiled graphs; what may not be cached is a miss."""
    inductor = counters["inductor"]
    return inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]


def _empty_cache() -> None:
    """Forget compiled graphs on disk; kernels stay, they are found by their text."""
    FxGraphCache.clear()
    AOTAutogradCache.clear()


def _is_misfit(error: BaseException) -> bool:
    """Whether a graph was run on sizes that it was not made for."""
    return isinstance(getattr(error, "inner_exception", error), AssertionError) and "stride" in str(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else _place(error)
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."


def _place(error: BaseException) -> str:
    """Where an error without words came from."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
