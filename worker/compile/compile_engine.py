"""Compiles and captures everything that serving calls, before the first session; nothing compiles afterwards.

Each target is wrapped, warmed up at every size that serving uses, and captured. A target that fails runs eagerly and
reports the reason. Targets follow each other, so that each failure has one name (`graph_compiler`). If the project's
own kernels fail, in the model or in the vocoder, or the cache returns graphs that do not run, everything is compiled
again without them, at sizes that suit compiled layers.

`compile_engine` must run on the thread that serves. The graphs that `reduce-overhead` captures belong to a thread, and
so does part of a compiled graph's guards (number of threads, default dtypes): another thread would compile again at its
first unit.

Contains when a run is repeated and the detection of late compilation; sessions and the kernel cache are elsewhere.
"""

import logging
from dataclasses import replace
from typing import Any

import torch.fx.experimental._config as symbol_config

from models.graphs.compiler import counters, reset_compiler
from models.graphs.kernel_support import LoadedKernels
from models.graphs.region_graphs import RegionTable, compile_counters
from worker.assembly.backend_flags import apply_backend_flags, resolve_compile, uses_kernels
from worker.assembly.parts import EngineParts
from worker.compile.graph_compiler import GraphCompiler
from worker.compile.state import CompileCounts, CompileJob, CompileResult, Progress, TargetPhase, TargetState
from worker.compile.targets import COMPILE_TARGETS, Table
from worker.config.compile import TARGETS, CompileConfig, Target
from worker.config.session import EngineConfig

LOG = logging.getLogger(__name__)
WORDS: dict[Table, str] = {"omni": "the model", "vocoder": "the vocoder"}


def compile_engine(
    parts: EngineParts,
    config: EngineConfig,
    *,
    targets: dict[str, TargetState] | None = None,
    progress: Progress | None = None,
    backend: Any = "inductor",
    is_warm: bool = False,
) -> CompileResult:
    """Apply `config.compile`. Call it on the thread that serves, before any session is open.

    Args:
        targets: receives the state of every target, updated while it compiles.
        progress: called with (what, done, total) before each bucket.
        backend: of torch.compile.
        is_warm: the kernel cache is complete (`CompileCache.has_everything`), so that no kernels are built ahead.

    Returns: the outcome. A failed target is in it, with the reason; nothing is raised for it.
    """
    config = resolve_compile(config, parts.model.device.type)
    result = CompileResult({} if targets is None else targets)
    set_states(result.targets, config.compile)
    built, cached = LoadedKernels.n, LoadedKernels.n_cached
    if config.compile.enabled:
        result.backend_flags = apply_backend_flags(config.compile, parts.model.device)
        # Two sizes that are equal in the first example are still two symbols.
        with symbol_config.patch(use_duck_shape=False):
            _run(parts, CompileJob(config.compile, result, progress, backend, is_warm))
    result.kernels_cached = LoadedKernels.n_cached - cached
    result.kernels_built = LoadedKernels.n - built - result.kernels_cached
    result.counts = count(parts)
    return result


def _run(parts: EngineParts, job: CompileJob) -> None:
    """Compile all targets; repeat it without what failed, until a run ends normally."""
    result = job.result
    by_kernels, was_emptied = uses_kernels(job.config, parts.model.device), False
    while True:
        failed = None
        compiler = GraphCompiler(parts.model, _tables(parts), job, _kernel_targets(parts, by_kernels))
        compiler.run()
        if compiler.kernels_error:
            failed, error = compiler.kernels_error
            by_kernels &= failed != "omni"
            result.failed_kernels.append(failed)
            result.notes.append(f"kernels: {error}; those of {WORDS[failed]} are off, and its layers are compiled")
        elif compiler.had_bad_graph and not was_emptied:
            was_emptied = True
            result.notes.append("compile cache: its graphs did not run; the cache was emptied, all compiled again")
        else:
            break
        LOG.warning("%s", result.notes[-1])
        _prepare_retry(parts, failed)
        if was_emptied:
            _empty_cache()
        set_states(result.targets, job.config)
        result.seconds.clear()
        job = replace(job, is_warm=True)  # the first run has built the kernels
    if by_kernels:
        parts.unit_steps.context.load_kernel()
    result.backend_flags["kernels"] = by_kernels
    if parts.vocoder is not None:
        result.backend_flags["vocoder_kernels"] = bool(parts.vocoder.regions.kernels)


def _prepare_retry(parts: EngineParts, failed: Table | None) -> None:
    """Back to eager, at sizes that suit compiled layers. failed: the table whose kernels failed, if any did."""
    uncompile_engine(parts)
    if failed == "vocoder" and parts.vocoder is not None:
        parts.vocoder.use_plain(parts.compiled_vocoder_shapes)
    elif failed == "omni":
        parts.unit_steps.state.split_scratch()
        if parts.compiled_shapes is not None:
            parts.unit_steps.use_shapes(parts.compiled_shapes)
    reset_compiler()


def _kernel_targets(parts: EngineParts, by_kernels: bool) -> list[Target]:
    """Targets whose layers kernels run: all or none of the model's (`by_kernels`); those the vocoder was built with."""
    vocoder_regions = parts.vocoder.regions.kernels if parts.vocoder is not None else frozenset()
    return [
        name
        for name, target in COMPILE_TARGETS.items()
        if (by_kernels if target.table == "omni" else vocoder_regions.issuperset(target.regions))
    ]


def set_states(targets: dict[str, TargetState], config: CompileConfig) -> None:
    """Set all targets to their initial states."""
    chosen = config.targets if config.enabled else ()
    targets.clear()
    for name in TARGETS:
        targets[name] = TargetState(name, TargetPhase.WAITING if name in chosen else TargetPhase.OFF)


def uncompile_engine(parts: EngineParts) -> None:
    """Return to eager execution: drop compiled code, the model's kernels and CUDA graphs.

    They hold references to the engine, which could not be freed otherwise.
    """
    for table in _tables(parts).values():
        table.uncompile()
        table.drop_graphs()
        table.marks_steps = False
    if parts.model.kernels:
        parts.model.use_kernels(False)


def count(parts: EngineParts) -> CompileCounts:
    """The compiler's counters so far; cheap, from any thread."""
    now = compile_counters()
    return CompileCounts(
        graph_breaks=now["graph_breaks"],
        graphs=now["graphs"],
        graph_skips=sum(table.n_skipped for table in _tables(parts).values()),
        cudagraph_skips=counters()["inductor"]["cudagraph_skips"],
    )


class RecompileWatch:
    """Detects compilation after warm-up, which delays a unit by a second or more."""

    def __init__(self, parts: EngineParts):
        """Count from now on."""
        self._parts, self._before, self._logged = parts, count(parts), CompileCounts()

    def check(self) -> CompileCounts:
        """The growth since construction; each increase is logged once."""
        late = count(self._parts).since(self._before)
        if late != self._logged:
            LOG.warning("compiled after warm-up: %s", late)
            self._logged = late
        return late


def _tables(parts: EngineParts) -> dict[str, RegionTable]:
    tables: dict[str, RegionTable] = {"omni": parts.unit_steps.regions}
    if parts.vocoder is not None:
        tables["vocoder"] = parts.vocoder.regions
    return tables


def _empty_cache() -> None:
    """Delete compiled graphs on disk. Kernels stay: they are found by their source text."""
    # Imported here, because most starts do not need the compiler.
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._inductor.codecache import FxGraphCache

    FxGraphCache.clear()
    AOTAutogradCache.clear()
