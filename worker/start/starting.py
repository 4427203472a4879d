"""From settings to an engine that is ready to serve: load, compile, warm up; for workers and for `precompile.py`.

Knows the stages, their order and what becomes of a start that fails. Does not know sockets, nor what a stage does.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from worker.assembly.backend_flags import resolve_compile
from worker.assembly.hub import with_local_checkpoint
from worker.assembly.parts import EngineParts, build, pick_device
from worker.compile.cache import REPORTS, CacheReport, CompileCache, facts_of
from worker.compile.prefetch import start_compiler, start_triton
from worker.compile.state import TargetPhase, TargetState
from worker.compile.tuning import Tuned, set_states, tune
from worker.config.session import EngineConfig
from worker.engine import Engine
from worker.report.compile_report import CompileReport, write_report
from worker.report.start_report import TargetWatch, start_report
from worker.start.releasing import settle_heap
from worker.start.voices import ReferenceSound, Voices
from worker.start.warmup import WarmUpMedia, extract, warm_up
from worker.start.warmup_report import WarmUpReport
from worker.status import State, Status

Result, Other = TypeVar("Result"), TypeVar("Other")

LOG = logging.getLogger(__name__)
REPORT_FILE = Path(REPORTS, "start.json")  # in the cache's folder too: the newest start's
VOICES_FOLDER = "voices"  # in the cache's folder: making a voice takes longer than reading one


@dataclass(frozen=True)
class Started:
    """An engine whose thread runs, without sessions, and how it came to be.

    voices: None for an engine without a vocoder. tuned: what was compiled, its `targets` the dictionary that was given.
    cache: of its kernels, None if nothing was compiled. report: the same for people and programs. seconds:
    `load`, `compile` and `warm_up`; a stage left out is missing.
    """

    engine: Engine
    voices: Voices | None
    warm_up: WarmUpReport
    tuned: Tuned
    cache: CacheReport | None
    report: CompileReport
    seconds: dict[str, float]

    @property
    def targets(self) -> dict[str, TargetState]:
        return self.tuned.targets


def start_engine(
    config: EngineConfig,
    *,
    video: Path,
    ref_audio: Path | None,
    max_units: int,
    cache_dir: Path,
    status: Status,
    targets: dict[str, TargetState],
) -> Started:
    """Load, compile if the config says so, and warm up.

    Args:
        video, max_units: of the warm-up. ref_audio: the voice it speaks with; None: it does not speak.
        cache_dir: of prepared voices and of compiled kernels: where torch was pointed to before it was imported.
        status: LOADING; it is WARMING_UP afterwards, and the caller moves on.
        targets: filled with the state of each target, as it changes.
    Raises: MediaError and AudioError for the files, before anything is loaded; as `building.build`; WarmUpError;
        EngineError; StateError if the worker is told to end meanwhile. Nothing runs on then.
    """
    status.progress("files of the warm-up")
    extract(video, 1)
    if ref_audio is not None:
        ReferenceSound.read(ref_audio)
    device = pick_device(config.device)
    config = resolve_compile(config, device.type)
    seconds: dict[str, float] = {}
    set_states(targets, config.compile)
    name = config.model_path.name  # of a model id too, whose snapshot folder is named by its commit
    config = with_local_checkpoint(config, status.progress)
    status.progress(f"weights of {name}")
    with_seconds = partial(_timed, seconds)
    start_triton(config.compile, device)
    start_compiler(config.compile, device)
    parts = with_seconds("load", lambda: build(config))
    engine = Engine(parts, config)
    engine.start()
    try:
        tuned, cache, watch, units = Tuned(targets), None, TargetWatch(targets, status.progress), None
        if config.compile.enabled:
            status.move(State.COMPILING)
            compiling = partial(_compile, parts, config, cache_dir, watch)
            (tuned, cache), units = with_seconds(
                "compile", lambda: _beside(engine.submit(compiling), lambda: extract(video, max_units))
            )
        status.move(State.WARMING_UP)
        voices = None
        if parts.vocoder is not None:
            voices = Voices(config.token2wav_folder, device=parts.model.device, cache=cache_dir / VOICES_FOLDER)
        report = with_seconds(
            "warm_up",
            lambda: warm_up(
                engine,
                WarmUpMedia(video, ref_audio),
                voice=voices and voices.of,
                progress=status.progress,
                max_units=max_units,
                units=units,
            ),
        )
    except Exception:
        with suppress(Exception):  # why it failed is what counts
            engine.close()
        raise
    if voices is not None and voices.problem:
        LOG.warning("voices are not kept: %s", voices.problem)
    if report.compiled_graphs and config.compile.enabled:
        LOG.warning("%d graphs compiled in the warm-up that compiling before had missed", report.compiled_graphs)
    told = None if cache is None else f"{cache}; {cache.folder}"
    compiled = start_report(config, parts.model.device, tuned, watch.happened, told, parts.loading)
    _keep(compiled, cache_dir / REPORT_FILE)
    return Started(engine, voices, report, tuned, cache, compiled, seconds)


def _keep(report: CompileReport, path: Path) -> None:
    """Beside the kernels; a worker that cannot write there serves all the same."""
    try:
        write_report(report, path)
    except OSError as error:
        LOG.warning("the compile report is not kept: %s", error)


def _compile(
    parts: EngineParts, config: EngineConfig, cache_dir: Path, watch: TargetWatch
) -> tuple[Tuned, CacheReport]:
    """On the engine's thread: with whatever an earlier start left, and leaving something to the next."""
    start = time.perf_counter()
    cache = CompileCache.open(cache_dir, facts_of(parts, config.compile))
    settled = ""

    def progress(what: str, done: int, total: int) -> None:
        nonlocal settled
        watch.progress(what, done, total)
        compiling = next((name for name, state in watch.targets.items() if state.phase is TargetPhase.COMPILING), "")
        if compiling != settled:
            settle_heap()
            settled = compiling

    with watch:
        tuned = tune(parts, config, targets=watch.targets, progress=progress, is_warm=cache.has_everything)
    settle_heap()
    seconds = time.perf_counter() - start
    return tuned, cache.record(tuned.hits, tuned.misses, seconds, is_whole=tuned.is_whole)


def _beside(work: "Future[Result]", task: Callable[[], Other]) -> tuple[Result, Other]:
    """Do a task while another thread is at work. Returns: what came of both."""
    done = task()
    return work.result(), done


def _timed(seconds: dict[str, float], stage: str, run: Callable[[], Result]) -> Result:
    start = time.perf_counter()
    result = run()
    seconds[stage] = time.perf_counter() - start
    return result
