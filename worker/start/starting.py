"""Starts an engine: load, compile, warm up; for workers and for `precompile.py`.

Contains the order of the stages and the clean-up after a failed start; the stages are in modules of their own.
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

from models.errors import AudioError
from worker.assembly.backend_flags import resolve_compile
from worker.assembly.hub import with_local_checkpoint
from worker.assembly.parts import EngineParts, build, pick_device
from worker.assembly.sizes import runs_eager
from worker.assembly.solver_steps import with_solver_steps
from worker.assembly.talker_session import with_talker_session
from worker.compile.cache import REPORTS, CacheReport, CompileCache, cache_facts
from worker.compile.compile_engine import compile_engine, set_states
from worker.compile.prefetch import prefetch_compiler, prefetch_triton
from worker.compile.state import CompileResult, TargetPhase, TargetState
from worker.config.decode_copy import why_no_copy
from worker.config.session import EngineConfig
from worker.engine import Engine
from worker.engine_thread import EngineThread
from worker.loop.observer import Observer
from worker.report.compile_report import CompileReport, write_report
from worker.report.start_report import TargetWatch, start_report
from worker.start.file_check import FileCheck
from worker.start.memory import freeze_heap
from worker.start.voices import ReferenceSound, Voices
from worker.start.warmup import WarmUpError, WarmUpMedia, extract, warm_up
from worker.start.warmup_report import WarmUpReport
from worker.status import State, Status
from worker.trace.header import header_of
from worker.trace.recorder import TraceRecorder

Result = TypeVar("Result")
Other = TypeVar("Other")

LOG = logging.getLogger(__name__)
REPORT_FILE = Path(REPORTS, "start.json")  # in the cache folder; of the latest start
NO_COPY = "no weight has one: they are not of bfloat16 numbers, or the GPU had no room for it"
VOICES_FOLDER = "voices"  # in the cache folder: making a voice takes longer than reading one


@dataclass(frozen=True)
class Started:
    """A running engine without sessions, and the results of its start.

    Attributes:
        voices: None for an engine without a vocoder.
        compile_result: its `targets` is the dictionary given to `start_engine`.
        cache: of kernels; None if nothing was compiled.
        report: the compile report.
        seconds: of `load`, `compile`, `warm_up` and, beside the last two, `checksums`; a skipped stage is missing.
    """

    engine: Engine
    voices: Voices | None
    warm_up: WarmUpReport
    compile_result: CompileResult
    cache: CacheReport | None
    report: CompileReport
    seconds: dict[str, float]

    @property
    def targets(self) -> dict[str, TargetState]:
        return self.compile_result.targets


def start_engine(
    config: EngineConfig,
    *,
    video: Path,
    ref_audio: Path | None,
    max_units: int,
    cache_dir: Path,
    status: Status,
    targets: dict[str, TargetState],
    observer: Observer | None = None,
    thread: EngineThread | None = None,
    recorder: TraceRecorder | None = None,
    measures_cost: bool = False,
) -> Started:
    """Load, compile if `config.compile` is on for the device, and warm up.

    The files of a quantised checkpoint are compared with their checksums beside that.

    Args:
        video, max_units: of the warm-up.
        ref_audio: the voice of the warm-up; None: it has no speech.
        cache_dir: of prepared voices and compiled kernels; the folder set as torch's before torch was imported.
        status: in state LOADING; in state WARMING_UP afterwards.
        targets: receives the state of each target, updated as it changes.
        observer: of the engine; for measurements.
        thread: runs the engine; None: one of its own.
        recorder: of traces of sessions; it is off until the warm-up has ended.
        measures_cost: measure units that are forced to speak, if the model runs eagerly on a CPU.

    Raises: MediaError and AudioError for the files, before anything is loaded; the errors of `parts.build`;
        CheckpointError for files that differ from their checksums, also if the warm-up fails; WarmUpError;
        EngineError; StateError if the worker is stopped meanwhile. No thread of the engine runs then.
    """
    status.progress("files of the warm-up")
    extract(video, 1)
    if ref_audio is not None:
        _check_length(ReferenceSound.read(ref_audio), config)
    device = pick_device(config.device)
    config = with_talker_session(resolve_compile(config, device.type), device.type)
    seconds: dict[str, float] = {}
    set_states(targets, config.compile)
    name = config.model_path.name  # of a model id too, whose snapshot folder is named by its commit
    config = with_solver_steps(with_local_checkpoint(config, status.progress))
    status.progress(f"weights of {name}")
    with_seconds = partial(_timed, seconds)
    prefetch_triton(config.compile, device)
    prefetch_compiler(config.compile, device)
    parts = with_seconds("load", lambda: build(config))
    files = FileCheck(config.model_path)
    engine = Engine(parts, config, observer=observer, thread=thread, recorder=recorder)
    engine.start()
    try:
        compile_result, cache, watch, units = CompileResult(targets), None, TargetWatch(targets, status.progress), None
        if config.compile.enabled:
            status.move(State.COMPILING)
            compiling = partial(_compile, parts, config, cache_dir, watch)
            (compile_result, cache), units = with_seconds(
                "compile", lambda: _beside(engine.submit(compiling), lambda: extract(video, max_units))
            )
        status.move(State.WARMING_UP)
        voices = None
        if parts.vocoder is not None:
            voices = Voices(
                config.token2wav_folder,
                device=parts.model.device,
                cache=cache_dir / VOICES_FOLDER,
                compile=config.compile,
            )
        is_eager = runs_eager(parts.model, config)
        report = with_seconds(
            "warm_up",
            lambda: warm_up(
                engine,
                WarmUpMedia(video, ref_audio),
                voice=voices.of if voices is not None else None,
                progress=status.progress,
                max_units=max_units,
                briefly=is_eager,
                measures=is_eager and measures_cost,
                units=units,
            ),
        )
        _finish(files, seconds, status.progress)
    except Exception as error:
        with suppress(Exception):  # report the first error
            engine.close()
        if isinstance(error, WarmUpError):  # by damaged weights, perhaps
            _finish(files, seconds, status.progress)
        raise
    if voices is not None and voices.problem:
        LOG.warning("voices are not cached: %s", voices.problem)
    if report.compiled_graphs and config.compile.enabled:
        LOG.warning("%d graphs compiled in the warm-up that the compile stage had missed", report.compiled_graphs)
    if config.decode_copy is True and not parts.model.has_decode_copy:
        LOG.warning("setting model.decode_copy has no effect: %s", why_no_copy(config, device.type) or NO_COPY)
    if recorder is not None:
        recorder.header, recorder.is_on = header_of(parts, config), True
    cache_state = None if cache is None else f"{cache}; {cache.folder}"
    compiled = start_report(config, parts.model.device, compile_result, watch.happened, cache_state, parts.loading)
    _save(compiled, cache_dir / REPORT_FILE)
    return Started(engine, voices, report, compile_result, cache, compiled, seconds)


def _finish(files: FileCheck, seconds: dict[str, float], progress: Callable[[str], None]) -> None:
    """Wait for the comparison of files. Raises: CheckpointError for files that differ."""
    if (taken := files.finish(progress)) is not None:
        seconds["checksums"] = taken


def _save(report: CompileReport, path: Path) -> None:
    """Write the report beside the kernels; a failure is logged, and the worker serves."""
    try:
        write_report(report, path)
    except OSError as error:
        LOG.warning("the compile report was not written: %s", error)


def _compile(
    parts: EngineParts, config: EngineConfig, cache_dir: Path, watch: TargetWatch
) -> tuple[CompileResult, CacheReport]:
    """Compile with the kernel cache; runs on the engine's thread."""
    start = time.perf_counter()
    cache = CompileCache.open(cache_dir, cache_facts(parts, config.compile))
    frozen = ""

    def progress(what: str, done: int, total: int) -> None:
        nonlocal frozen
        watch.progress(what, done, total)
        compiling = next((name for name, state in watch.targets.items() if state.phase is TargetPhase.COMPILING), "")
        if compiling != frozen:
            freeze_heap()
            frozen = compiling

    with watch:
        compile_result = compile_engine(
            parts, config, targets=watch.targets, progress=progress, is_warm=cache.has_everything
        )
    freeze_heap()
    seconds = time.perf_counter() - start
    return compile_result, cache.record(
        compile_result.hits, compile_result.misses, seconds, is_whole=compile_result.is_whole
    )


def _beside(work: "Future[Result]", task: Callable[[], Other]) -> tuple[Result, Other]:
    """Run a task on this thread while another thread works. Returns: both results."""
    done = task()
    return work.result(), done


def _timed(seconds: dict[str, float], stage: str, run: Callable[[], Result]) -> Result:
    start = time.perf_counter()
    result = run()
    seconds[stage] = time.perf_counter() - start
    return result


def _check_length(sound: ReferenceSound, config: EngineConfig) -> None:
    """Raises: AudioError for a voice that is longer than all voices may be; sounds above 30 s were refused before."""
    seconds = sound.samples.shape[-1] / sound.rate
    if seconds > config.voices_s:
        expected = f"at most {config.voices_s:g} s, as duplex.voices_s allows"
        raise AudioError("sound of the default voice", expected=expected, got=f"{seconds:.1f} s")
