"""From settings to an engine that is ready to serve: load, compile, warm up; for workers and for `precompile.py`.

Knows the stages, their order and what becomes of a start that fails. Does not know sockets, nor what a stage does.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from worker.building import build
from worker.compile_config import TARGETS
from worker.compile_state import TargetPhase, TargetState
from worker.config import EngineConfig
from worker.engine import Engine
from worker.status import State, Status
from worker.tuning import Tuned, tune
from worker.voices import ReferenceSound, Voices
from worker.warmup import WarmUpMedia, extract, warm_up
from worker.warmup_report import WarmUpReport

Result = TypeVar("Result")

LOG = logging.getLogger(__name__)
VOICES_FOLDER = "voices"  # in the cache's folder: making a voice takes longer than reading one


@dataclass(frozen=True)
class Started:
    """An engine whose thread runs, without sessions, and how it came to be.

    voices: None for an engine without a vocoder. targets: the dictionary that was given. seconds: `load`, `compile` and
    `warm_up`; a stage that was left out is missing.
    """

    engine: Engine
    voices: Voices | None
    warm_up: WarmUpReport
    tuned: Tuned
    targets: dict[str, TargetState]
    seconds: dict[str, float]


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
        cache_dir: of compiled kernels and of prepared voices.
        status: LOADING; it is WARMING_UP afterwards, and the caller moves on.
        targets: filled with the state of each target, as it changes.
    Raises: MediaError and AudioError for the files, before anything is loaded; as `building.build`; WarmUpError;
        EngineError; StateError if the worker is told to end meanwhile. Nothing runs on then.
    """
    status.progress("files of the warm-up")
    extract(video, 1)
    if ref_audio is not None:
        ReferenceSound.read(ref_audio)
    seconds: dict[str, float] = {}
    set_targets(targets, config)
    status.progress(f"weights of {config.model_path.name}")
    with_seconds = partial(_timed, seconds)
    parts = with_seconds("load", lambda: build(config))
    engine = Engine(parts, config)
    engine.start()
    try:
        tuned = Tuned()
        if config.compile.enabled:
            status.move(State.COMPILING)
            tuned = with_seconds("compile", lambda: engine.submit(tune, parts, config).result())
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
            ),
        )
    except BaseException:
        with suppress(Exception):  # why it failed is what counts
            engine.close()
        raise
    if voices is not None and voices.problem:
        LOG.warning("voices are not kept: %s", voices.problem)
    return Started(engine, voices, report, tuned, targets, seconds)


def set_targets(targets: dict[str, TargetState], config: EngineConfig) -> None:
    """What is going to be compiled waits, the rest is off."""
    asked = config.compile.targets if config.compile.enabled else ()
    targets.clear()
    for name in TARGETS:
        targets[name] = TargetState(name, TargetPhase.WAITING if name in asked else TargetPhase.OFF)


def _timed(seconds: dict[str, float], stage: str, run: Callable[[], Result]) -> Result:
    start = time.perf_counter()
    result = run()
    seconds[stage] = time.perf_counter() - start
    return result
