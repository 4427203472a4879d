"""Warm-up: a duplex session over a video file, unit by unit, before the worker accepts connections.

It uses the engine in the same order as a client's session, so that first-use costs occur here: library handles,
allocations, host code paths. Compiling happens before. Afterwards the engine is in its former state: its sessions are
closed, and later sessions draw the same random numbers as without a warm-up.
"""

import gc
import io
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.errors import ModelError
from models.graphs.region_graphs import RegionTable, compile_counters
from models.inputs.audio_sizes import UNIT_SAMPLES
from worker.admission.session_capacity import TARGET_S
from worker.admission.unit_cost import Burst, UnitCost
from worker.assembly.parts import EngineParts
from worker.config.session import SessionConfig
from worker.engine import Engine
from worker.loop.audio_buffer import checked
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.results import UnitResult
from worker.loop.sessions import SessionsMark
from worker.media import MediaError, read_units
from worker.start.voices import ReferenceSound
from worker.start.warmup_report import UnitTimes, WarmUpReport, burst_of
from worker.start.warmup_session import WarmUpSession, WarmUpUnit

LOG = logging.getLogger(__name__)
SYSTEM = "Streaming Omni Conversation."
SEED = 0
JPEG_QUALITY = 90
N_LONE = 2  # units alone that are forced to speak; the first includes what a first use costs
REMEDY = (
    "build it with `python assets/build_warmup.py`, or name another one: service.warmup_video in config.json, "
    "or --warmup-video"
)
SPEECH_REGIONS = ("spoken_rows", "speech_begin", "speech_step")
SOUND_REGIONS = ("begin", "flow", "hift")

Log = Callable[[str], None]
Progress = Callable[[str, int, int], None]  # what, done, total


class WarmUpError(ModelError, RuntimeError):
    """A step of the warm-up, or one of its units, failed."""


@dataclass(frozen=True)
class WarmUpMedia:
    """Input files. video: at least one second of sound and frames. ref_audio: the session's voice; None: no voice."""

    video: Path
    ref_audio: Path | None = None


def warm_up(
    engine: Engine,
    media: WarmUpMedia,
    *,
    voice: Callable[[ReferenceSound], Any] | None = None,
    log: Log = LOG.info,
    progress: Progress | None = None,
    max_units: int = 10,
    briefly: bool = False,
    measures: bool = False,
    units: list[WarmUpUnit] | None = None,
) -> WarmUpReport:
    """Run the warm-up session on a running engine without sessions.

    Args:
        voice: makes a voice from a reference sound, such as `Voices.of`; None for an engine without a vocoder. The
            voice stays prepared in the vocoder until others need its place, because most sessions will use it.
        log: receives the log lines.
        progress: called with (what, done, total).
        max_units: at most so many seconds of the file.
        briefly: end the units once the model has spoken, and run all sessions at once only once. Enough where nothing
            is compiled or captured: only the first unit of a kind costs more than later ones.
        measures: also measure units that are forced to speak, for an engine in which units that start at different
            times share no call; not with a single slot.
        units: of the file, from `extract`; None: read the file.

    Raises: MediaError, with a remedy, for a file that is missing or has no sound or frames; AudioError for the
        reference sound; WarmUpError naming the failed unit or step. The engine is in its former state then.
    """
    start, n_graphs = time.perf_counter(), compile_counters()["graphs"]
    run = _Run(engine, log, progress or (lambda what, done, total: None), briefly=briefly, measures=measures)
    run.step(1, f"extract sound and pictures of {media.video}")
    units = units or extract(media.video, max_units)
    if engine.n_free() != engine.n_slots:
        n_open = engine.n_slots - engine.n_free()
        raise WarmUpError("warm-up: engine", expected="one without sessions", got=f"{n_open} open")
    with named("engine"):
        before = engine.mark_sessions().result()
    try:
        report = run.converse(units, media.ref_audio, voice)
    except BaseException:
        with suppress(Exception):  # report the first error
            run.clear(before)
        raise
    run.step(6, "close the session and give memory back")
    with named("close"):
        run.clear(before)
    report.total_s = time.perf_counter() - start
    report.compiled_graphs = compile_counters()["graphs"] - n_graphs
    triggered = report.tts_triggered
    log(f"[warmup] ✓ omni duplex warmup complete (total={report.total_s:.1f}s, tts_triggered={triggered})")
    return report


def extract(video: Path, max_units: int) -> list[WarmUpUnit]:
    """The leading whole seconds of a file that have sound and a frame. Raises: MediaError."""
    units = []
    try:
        for unit in read_units(video, max_units=max_units):
            if unit.n_samples < UNIT_SAMPLES or not unit.frames:
                break
            jpeg = io.BytesIO()
            unit.frames[0].save(jpeg, "JPEG", quality=JPEG_QUALITY)
            units.append(WarmUpUnit(unit.sound, jpeg.getvalue()))
    except MediaError as error:
        if error.what != str(video):
            raise
        raise MediaError(f"warm-up video {video}", expected=f"{error.expected}; {REMEDY}", got=error.got) from error
    if not units:
        expected = f"a second of sound and pictures; {REMEDY}"
        raise MediaError(f"warm-up video {video}", expected=expected, got="less")
    return units


@contextmanager
def named(what: str) -> Iterator[None]:
    """Raise errors of the block as a `WarmUpError` of this name."""
    try:
        yield
    except WarmUpError:
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise WarmUpError(f"warm-up: {what}", expected="success", got=got) from error


class _Run:
    """The steps of one warm-up."""

    def __init__(self, engine: Engine, log: Log, progress: Progress, *, briefly: bool, measures: bool):
        self._engine, self._log, self._progress = engine, log, progress
        self._sessions: list[WarmUpSession] = []
        self._has_sound = False
        self._briefly, self._measures = briefly, measures

    def step(self, number: int, what: str) -> None:
        self._log(f"[warmup] ({number}/6) {what}")
        self._progress(what, 0, 0)

    def converse(
        self, units: list[WarmUpUnit], ref_audio: Path | None, make_voice: Callable[[ReferenceSound], Any] | None
    ) -> WarmUpReport:
        """Steps 2 to 5: voice, session, units, speech."""
        report = WarmUpReport()
        self.step(2, f"reference voice: {ref_audio or 'none'}")
        audio_16k = voice = None
        if ref_audio is not None:
            reference = ReferenceSound.read(ref_audio)
            with named("reference voice"):
                audio_16k, voice = reference.audio_16k(), make_voice and make_voice(reference)
        prompt = SystemPrompt.of(SYSTEM, audio_16k, voice)
        self.step(3, "prepare the session")
        config = self._engine.config.session.model_copy(update={"seed": SEED})
        with named("prepare"):
            session = self._open(config, prompt)
            session.prepare()
        self.step(4, f"{len(units)} units: prefill, generate, finalize")
        self._run_units(session, units, report)
        if self._engine.n_slots > 1:
            self._burst(units, config, prompt, report)
            if self._measures:
                self._measure(units, report)
        self._speak(report)
        return report

    def _open(self, config: SessionConfig, prompt: SystemPrompt) -> WarmUpSession:
        session = WarmUpSession(self._engine, f"warm-up {len(self._sessions) + 1}", config, prompt)
        self._sessions.append(session)
        return session

    def _run_units(self, session: WarmUpSession, units: list[WarmUpUnit], report: WarmUpReport) -> None:
        """Run units in order, until a turn ends, or of a brief warm-up until the model has spoken."""
        first, n = time.perf_counter(), len(units)
        for number, unit in enumerate(units, 1):
            with named(f"unit {number} of {n}"):
                start = time.perf_counter()
                checked(unit.sound)
                aud_proc = 1000 * (time.perf_counter() - start)
                vis_proc = max(session.send(unit) - aud_proc, 0.0)
                result = session.result()
            report.add(result, UnitTimes.of(result.times, vis_proc=vis_proc, aud_proc=aud_proc))
            self._record_speech(result, report)
            self._log(f"[warmup] {report.line(n, time.perf_counter() - first)}")
            self._progress("units", number, n)
            if result.end_of_turn or (self._briefly and self._has_spoken(report)):
                break

    def _has_spoken(self, report: WarmUpReport) -> bool:
        return report.tts_triggered and (self._has_sound or self._engine.parts.vocoder is None)

    def _record_speech(self, result: UnitResult, report: WarmUpReport) -> None:
        """Record which speech stages a unit has run."""
        report.tts_triggered |= result.n_speech_tokens > 0
        self._has_sound |= result.times.sound > 0

    def _burst(
        self, units: list[WarmUpUnit], config: SessionConfig, prompt: SystemPrompt, report: WarmUpReport
    ) -> None:
        """Open a session in every free slot, and run a unit at every batch size."""
        parts, start, n_spoken = self._engine.parts, time.perf_counter(), 0
        eager = config.model_copy(update={"force_listen_count": 0})  # may speak at once
        with named("burst"):
            opened = [self._open(eager, prompt) for _ in range(parts.n_slots - len(self._sessions))]
            for preparing in [session.begin_preparing() for session in opened]:  # several prompts in a call
                preparing.result()
        unit_steps = parts.unit_steps
        sizes = [*(size for size in unit_steps.shapes.batch if size < parts.n_slots), *[parts.n_slots] * 2]
        if unit_steps.regions.is_sealed or self._briefly:  # the compile stage has run every size, or there is none
            sizes = sizes[-1:]
        for number, size in enumerate(sizes):
            unit = units[number % len(units)]
            self._progress("units of several sessions at once", number, len(sizes))
            with named(f"unit {number + 1} of {size} sessions at once"):
                for session in self._sessions[:size]:
                    session.send(unit)
                results = [session.result() for session in self._sessions[:size]]
            report.add_burst(results)
            n_spoken += sum(not result.is_listen for result in results)
            for result in results:
                self._record_speech(result, report)
        listed = ", ".join(map(str, sizes))
        self._log(
            f"[warmup] burst: {listed} sessions at once, {report.n_burst_units} units, {n_spoken} of them spoken, "
            f"in {time.perf_counter() - start:.1f}s"
        )

    def _measure(self, units: list[WarmUpUnit], report: WarmUpReport) -> None:
        """Measure the cost of units that speak, whatever the model decides, with the sessions of the burst."""
        self._progress("units that speak", 0, 0)
        with named("units that speak"):
            alone = [self._spoken(self._sessions[:1], units[number % len(units)], report) for number in range(N_LONE)]
            together = self._spoken(self._sessions, units[0], report)
        report.cost = UnitCost.fitted(alone[-1].seconds, together, shares_calls=False)
        self._log(
            f"[warmup] units that speak: alone {alone[-1].seconds:.2f}s, {together.n} at once {together.seconds:.2f}s: "
            f"{report.cost.most(TARGET_S)} sessions in time"
        )

    def _spoken(self, sessions: Sequence[WarmUpSession], unit: WarmUpUnit, report: WarmUpReport) -> Burst:
        for session in sessions:
            session.send(unit, speaks=True)
        results = [session.result() for session in sessions]
        for result in results:
            self._record_speech(result, report)
        burst = burst_of(results)
        assert burst is not None, "load: expected one of each unit"
        return burst

    def _speak(self, report: WarmUpReport) -> None:
        """Run the speech regions that no unit has run, on example input in scratch slots."""
        parts = self._engine.parts
        tables: list[tuple[RegionTable, Sequence[str]]] = []
        if parts.unit_steps.speaker is not None and not report.tts_triggered:
            tables.append((parts.unit_steps.regions, SPEECH_REGIONS))
        if parts.vocoder is not None and not self._has_sound:
            tables.append((parts.vocoder.regions, SOUND_REGIONS))
        if not tables:
            why = "the model has spoken" if report.tts_triggered else "the model has no speech"
            self.step(5, f"speech on example input: not needed, {why}")
            return
        names = [name for _, some in tables for name in some]
        self.step(5, f"the model did not speak: {', '.join(names)} on example input, outside of sessions")
        with named("speech on example input"):
            self._engine.submit(_run_examples, tables).result()
        report.fallback_used = True

    def clear(self, before: SessionsMark) -> None:
        """Close the sessions and restore the engine's state. before: from `Engine.mark_sessions`."""
        for closing in [session.handle.close() for session in self._sessions]:
            closing.result()
        self._engine.forget_sessions_since(before).result()
        self._engine.submit(_free_memory, self._engine.parts).result()


def _run_examples(tables: list[tuple[RegionTable, Sequence[str]]]) -> None:
    """Run each region once, at its smallest size."""
    for table, names in tables:
        for name in names:
            region = table.table[name]
            tensors, static = region.example(next(region.buckets(table.shapes)))
            table(name, *tensors, **static)
            table.clear_scratch()


def _free_memory(parts: EngineParts) -> None:
    gc.collect()
    if parts.model.device.type == "cuda":
        torch.cuda.empty_cache()
