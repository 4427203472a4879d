"""Compiles and captures what serving calls, before the first session. Afterwards nothing compiles.

Each target is wrapped, warmed up at every size that serving can meet, and captured; one that fails anywhere runs as it
is from then on, and says why. Targets come one after the other, so that a failure has one name (`tuner`). If the
project's own kernels fail, in the model or in the vocoder, or the cache hands out graphs that do not run, all of it is
done again, without those, at sizes that suit compiled layers.

`tune` must run on the thread that will serve. The graphs that `reduce-overhead` captures belong to a thread, and so
does part of what a compiled graph is bound to (number of threads, default types): on another thread all of it would be
compiled again, at the first unit.

Knows when all of it is done again, and what compiles later. Does not know sessions, nor where kernels are kept.
"""

import logging
from typing import Any

import torch.fx.experimental._config as symbol_config

from models.graphs.compiler import counters, reset_compiler
from models.graphs.kernel_support import LoadedKernels
from models.graphs.region_graphs import RegionTable, compile_counters
from worker.assembly.backend_flags import apply_backend_flags, resolve_compile, wants_kernels
from worker.assembly.parts import EngineParts
from worker.compile.graph_compiler import GraphCompiler, Progress
from worker.compile.state import CompileCounts, TargetPhase, TargetState, Tuned
from worker.compile.targets import COMPILE_TARGETS, Table
from worker.config.compile import TARGETS, CompileConfig, Target
from worker.config.session import EngineConfig

LOG = logging.getLogger(__name__)
WORDS: dict[Table, str] = {"omni": "the model", "vocoder": "the vocoder"}


def tune(
    parts: EngineParts,
    config: EngineConfig,
    *,
    targets: dict[str, TargetState] | None = None,
    progress: Progress | None = None,
    backend: Any = "inductor",
    is_warm: bool = False,
) -> Tuned:
    """Do what `config.compile` says; on the thread that will serve, before any session is open.

    Args:
        targets: filled with the state of every target, and kept up to date while it works.
        progress: told (what, done, total) before each bucket. backend: of torch.compile.
        is_warm: as `CompileCache.has_everything`: no kernels have to be made ahead of their turn.
    Returns: what was done; a target that failed is in it, with the reason, and nothing is raised for it.
    """
    config = resolve_compile(config, parts.model.device.type)
    tuned = Tuned({} if targets is None else targets)
    set_states(tuned.targets, config.compile)
    made, kept = LoadedKernels.n, LoadedKernels.n_cached
    if config.compile.enabled:
        tuned.toggles = apply_backend_flags(config.compile, parts.model.device)
        # Two sizes that happen to be equal in the first example are still two sizes.
        with symbol_config.patch(use_duck_shape=False):
            _run(parts, config.compile, tuned, progress, backend, is_warm)
    tuned.kernels_kept = LoadedKernels.n_cached - kept
    tuned.kernels_made = LoadedKernels.n - made - tuned.kernels_kept
    tuned.counts = count(parts)
    return tuned


def _run(
    parts: EngineParts, config: CompileConfig, tuned: Tuned, progress: Progress | None, backend: Any, is_warm: bool
) -> None:
    by_kernels, was_emptied = wants_kernels(config, parts.model.device), False
    while True:
        failed = None
        ours = _targets_of(parts, by_kernels)
        tuner = GraphCompiler(parts.model, _tables(parts), config, tuned, progress, backend, ours, is_warm)
        tuner.run()
        if tuner.kernels_error:
            failed, error = tuner.kernels_error
            by_kernels &= failed != "omni"
            tuned.lost_kernels.append(failed)
            tuned.notes.append(f"kernels: {error}; those of {WORDS[failed]} are off, and its layers are compiled")
        elif tuner.was_misled and not was_emptied:
            was_emptied = True
            tuned.notes.append("compile cache: it held graphs that do not run; it was emptied, all compiled again")
        else:
            break
        LOG.warning("%s", tuned.notes[-1])
        untune(parts)
        if failed == "vocoder":
            parts.vocoder.use_plain(parts.compiled_vocoder_shapes)
        elif failed == "omni":
            parts.duplex.state.split_scratch()
            if parts.compiled_shapes is not None:
                parts.duplex.runner.use_shapes(parts.compiled_shapes)
        reset_compiler()
        if was_emptied:
            _empty_cache()
        set_states(tuned.targets, config)
        tuned.seconds.clear()
        is_warm = True  # what kernels there are to be made were made just now
    tuned.toggles["kernels"] = by_kernels
    if parts.vocoder is not None:
        tuned.toggles["vocoder_kernels"] = bool(parts.vocoder.regions.kernels)


def _targets_of(parts: EngineParts, by_kernels: bool) -> list[Target]:
    """Targets whose layers kernels run: the model's all or none, by_kernels; the vocoder's as it was built."""
    ours = parts.vocoder.regions.kernels if parts.vocoder is not None else frozenset()
    return [
        name
        for name, aim in COMPILE_TARGETS.items()
        if (by_kernels if aim.table == "omni" else ours.issuperset(aim.regions))
    ]


def set_states(targets: dict[str, TargetState], config: CompileConfig) -> None:
    """All targets as they are before anything is done."""
    asked = config.targets if config.enabled else ()
    targets.clear()
    for name in TARGETS:
        targets[name] = TargetState(name, TargetPhase.WAITING if name in asked else TargetPhase.OFF)


def untune(parts: EngineParts) -> None:
    """Back to eager, the model's kernels off, CUDA graphs gone: what holds on to an engine that is to be let go."""
    for table in _tables(parts).values():
        table.uncompile()
        table.drop_graphs()
        table.marks_steps = False
    if parts.model.kernels:
        parts.model.use_kernels(False)


def count(parts: EngineParts) -> CompileCounts:
    """What compiling has done so far; cheap, and for any thread."""
    now = compile_counters()
    return CompileCounts(
        graph_breaks=now["graph_breaks"],
        graphs=now["graphs"],
        graph_skips=sum(table.n_skipped for table in _tables(parts).values()),
        cudagraph_skips=counters()["inductor"]["cudagraph_skips"],
    )


class LateWatch:
    """Notices what compiles after warm-up: a second or more in the middle of somebody's sentence."""

    def __init__(self, parts: EngineParts):
        """From now on nothing may be added."""
        self._parts, self._before, self._told = parts, count(parts), CompileCounts()

    def check(self) -> CompileCounts:
        """What was added since the beginning; each growth is logged once."""
        late = count(self._parts).since(self._before)
        if late != self._told:
            LOG.warning("compiled after warm-up: %s", late)
            self._told = late
        return late


def _tables(parts: EngineParts) -> dict[str, RegionTable]:
    tables: dict[str, RegionTable] = {"omni": parts.duplex.runner.regions}
    if parts.vocoder is not None:
        tables["vocoder"] = parts.vocoder.regions
    return tables


def _empty_cache() -> None:
    """Forget compiled graphs on disk; kernels stay, they are found by their text."""
    # The compiler is loaded where it has something to do, and not before.
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._inductor.codecache import FxGraphCache

    FxGraphCache.clear()
    AOTAutogradCache.clear()
