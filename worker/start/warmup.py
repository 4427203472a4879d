"""A worker's first conversation: a video file, heard and answered unit by unit before anybody may connect.

It runs through the same engine, in the same order as a client's session would, so that whatever happens for the first
time happens here: handles of libraries, memory of allocators, host paths. Compiling is done before. Afterwards the
engine is as it was: its sessions are closed, what comes next draws the numbers that it would have drawn anyway.

Knows one engine and a file. Does not know status, sockets nor what is compiled.
"""

import gc
import io
import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.errors import ModelError
from models.graphs.region_graphs import RegionTable, compile_counters
from models.inputs.audio_sizes import UNIT_SAMPLES
from worker.assembly.parts import EngineParts
from worker.config.session import SessionConfig
from worker.engine import Engine
from worker.loop.audio_buffer import checked
from worker.loop.results import Event, Failure, PartialResult, UnitResult
from worker.loop.sessions import Sessions, SystemPrompt
from worker.media import MediaError, read_units
from worker.start.voices import ReferenceSound
from worker.start.warmup_report import UnitTimes, WarmUpReport

LOG = logging.getLogger(__name__)
SYSTEM = "Streaming Omni Conversation."
SEED = 0
JPEG_QUALITY = 90
REMEDY = (
    "build it with `python assets/build_warmup.py`, or name another one: service.warmup_video in config.json, "
    "or --warmup-video"
)
SPEECH_REGIONS = ("spoken_rows", "speech_begin", "speech_step")
SOUND_REGIONS = ("begin", "flow", "hift")

Log = Callable[[str], None]
Tell = Callable[[str, int, int], None]


class WarmUpError(ModelError, RuntimeError):
    """A step of the warm-up, or one of its units, came to nothing."""


@dataclass(frozen=True)
class WarmUpMedia:
    """Files to warm up with. video: sound and pictures, a second of both at least. ref_audio: the voice to speak with;
    None: the session has no voice.
    """

    video: Path
    ref_audio: Path | None = None


@dataclass(frozen=True, eq=False)
class WarmUpUnit:
    """One second. sound: [16000] float32 at 16 kHz. picture: JPEG."""

    sound: np.ndarray
    picture: bytes


def warm_up(
    engine: Engine,
    media: WarmUpMedia,
    *,
    voice: Callable[[ReferenceSound], Any] | None = None,
    log: Log = LOG.info,
    progress: Tell | None = None,
    max_units: int = 10,
    units: list[WarmUpUnit] | None = None,
) -> WarmUpReport:
    """Hold the conversation. The engine runs, and has no sessions.

    Args:
        voice: makes a voice (`models.token2wav.voice.voice.Voice`) of a reference sound, such as `Voices.of`; None
        for an
            engine without a vocoder. The voice stays prepared in the vocoder until others need its room: it is the one
            that most sessions are going to speak with.
        progress: told a few words, how much is done and of how much.
        max_units: hear no more of the file. units: of the file, as `extract` gave them; None: they are read here.
    Raises: MediaError for a file that is missing or lacks sound or pictures, with the remedy; AudioError for the
        reference sound; WarmUpError naming the unit or step that failed, and why. The engine is as it was then.
    """
    begun, n_graphs = time.perf_counter(), compile_counters()["graphs"]
    run = _Run(engine, log, progress or (lambda what, done, total: None))
    run.step(1, f"extract sound and pictures of {media.video}")
    units = units or extract(media.video, max_units)
    if engine.n_free() != engine.parts.n_slots:
        n_open = engine.parts.n_slots - engine.n_free()
        raise WarmUpError("warm-up: engine", expected="one without sessions", got=f"{n_open} open")
    with named("engine"):
        before = engine.ask(Sessions.mark).result()
    try:
        report = run.converse(units, media.ref_audio, voice)
    except BaseException:
        with suppress(Exception):  # why it failed is what counts
            run.clear(before)
        raise
    run.step(6, "close the session and give memory back")
    with named("close"):
        run.clear(before)
    report.total_s = time.perf_counter() - begun
    report.compiled_graphs = compile_counters()["graphs"] - n_graphs
    triggered = report.tts_triggered
    log(f"[warmup] ✓ omni duplex warmup complete (total={report.total_s:.1f}s, tts_triggered={triggered})")
    return report


def extract(video: Path, max_units: int) -> list[WarmUpUnit]:
    """The file's whole seconds that have sound and a picture, from the first one on. Raises: MediaError."""
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
    """What fails inside is told as a `WarmUpError` of this name."""
    try:
        yield
    except WarmUpError:
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise WarmUpError(f"warm-up: {what}", expected="it to work", got=got) from error


class _Talker:
    """One session of the warm-up."""

    def __init__(self, engine: Engine, name: str, config: SessionConfig, prompt: SystemPrompt):
        self._engine, self._events, self._prompt = engine, queue.SimpleQueue[Event](), prompt
        self._most_rows = engine.parts.duplex.runner.llm_len - config.unit_rows
        self.handle = engine.open(name, config, self._events.put).result()

    def prepare(self) -> None:
        self.handle.prepare(self._prompt).result()

    def send(self, unit: WarmUpUnit) -> float:
        """Returns: ms on this thread until the unit was handed over."""
        if self.handle.n_rows > self._most_rows:
            self.prepare()  # nothing leaves its context, and there are more seconds in the file than room in that
        start = time.perf_counter()
        taken = self.handle.send(unit.sound, [unit.picture])
        spent = 1000 * (time.perf_counter() - start)
        taken.result()
        return spent

    def result(self) -> UnitResult:
        """Raises: what the unit failed of; then it has not counted, or its session is lost."""
        while isinstance(event := self._events.get(), PartialResult):
            pass
        # Asked behind the unit: it is closed by then, and if that failed, it has been told.
        self._engine.submit(lambda: None).result()
        while not self._events.empty():
            event = self._events.get()
        if isinstance(event, Failure):
            raise event.error
        assert isinstance(event, UnitResult), event
        return event


class _Run:
    """A warm-up under way."""

    def __init__(self, engine: Engine, log: Log, tell: Tell):
        self._engine, self._log, self._tell = engine, log, tell
        self._talkers: list[_Talker] = []
        self._has_sound = False

    def step(self, number: int, what: str) -> None:
        self._log(f"[warmup] ({number}/6) {what}")
        self._tell(what, 0, 0)

    def converse(
        self, units: list[WarmUpUnit], ref_audio: Path | None, make_voice: Callable[[ReferenceSound], Any] | None
    ) -> WarmUpReport:
        """Steps 2 to 5."""
        report = WarmUpReport()
        self.step(2, f"reference voice: {ref_audio or 'none'}")
        heard = voice = None
        if ref_audio is not None:
            reference = ReferenceSound.read(ref_audio)
            with named("reference voice"):
                heard, voice = reference.heard(), make_voice and make_voice(reference)
        prompt = SystemPrompt.of(SYSTEM, heard, voice)
        self.step(3, "prepare the session")
        config = self._engine.config.session.model_copy(update={"seed": SEED})
        with named("prepare"):
            talker = self._open(config, prompt)
        self.step(4, f"{len(units)} units: prefill, generate, finalize")
        self._hear(talker, units, report)
        if self._engine.parts.n_slots > 1:
            self._burst(units, config, prompt, report)
        self._speak(report)
        return report

    def _open(self, config: SessionConfig, prompt: SystemPrompt) -> _Talker:
        talker = _Talker(self._engine, f"warm-up {len(self._talkers) + 1}", config, prompt)
        self._talkers.append(talker)
        talker.prepare()
        return talker

    def _hear(self, talker: _Talker, units: list[WarmUpUnit], report: WarmUpReport) -> None:
        """One unit after the other, up to the end of a turn."""
        begun, n = time.perf_counter(), len(units)
        for number, unit in enumerate(units, 1):
            with named(f"unit {number} of {n}"):
                start = time.perf_counter()
                checked(unit.sound)
                aud_proc = 1000 * (time.perf_counter() - start)
                vis_proc = max(talker.send(unit) - aud_proc, 0.0)
                result = talker.result()
            report.add(result, UnitTimes.of(result.times, vis_proc=vis_proc, aud_proc=aud_proc))
            self._spoke(result, report)
            self._log(f"[warmup] {report.line(n, time.perf_counter() - begun)}")
            self._tell("units", number, n)
            if result.end_of_turn:
                break

    def _spoke(self, result: UnitResult, report: WarmUpReport) -> None:
        """Note what of speech a unit has come to."""
        report.tts_triggered |= result.n_speech_tokens > 0
        self._has_sound |= result.times.sound > 0

    def _burst(
        self, units: list[WarmUpUnit], config: SessionConfig, prompt: SystemPrompt, report: WarmUpReport
    ) -> None:
        """As many sessions as there are slots, the first of them there already: a unit in every size of batch."""
        parts, begun, n_spoken = self._engine.parts, time.perf_counter(), 0
        eager = config.model_copy(update={"force_listen_count": 0})  # to speak
        with named("burst"):
            while len(self._talkers) < parts.n_slots:
                self._open(eager, prompt)
        runner = parts.duplex.runner
        sizes = [*(size for size in runner.shapes.batch if size < parts.n_slots), *[parts.n_slots] * 2]
        if runner.regions.is_sealed:  # every size has run, and nothing but what has will
            sizes = sizes[-1:]
        for number, size in enumerate(sizes):
            unit = units[number % len(units)]
            self._tell("units of several sessions at once", number, len(sizes))
            with named(f"unit {number + 1} of {size} sessions at once"):
                for talker in self._talkers[:size]:
                    talker.send(unit)
                results = [talker.result() for talker in self._talkers[:size]]
            report.n_burst_units += size
            n_spoken += sum(not result.is_listen for result in results)
            for result in results:
                self._spoke(result, report)
        told = ", ".join(map(str, sizes))
        self._log(
            f"[warmup] burst: {told} sessions at once, {report.n_burst_units} units, {n_spoken} of them spoken, "
            f"in {time.perf_counter() - begun:.1f}s"
        )

    def _speak(self, report: WarmUpReport) -> None:
        """Whatever of speech no unit came to, once on made-up input, in the scratch slots that no session has."""
        parts = self._engine.parts
        tables: list[tuple[RegionTable, Sequence[str]]] = []
        if parts.duplex.speaker is not None and not report.tts_triggered:
            tables.append((parts.duplex.runner.regions, SPEECH_REGIONS))
        if parts.vocoder is not None and not self._has_sound:
            tables.append((parts.vocoder.regions, SOUND_REGIONS))
        if not tables:
            why = "the model has spoken" if report.tts_triggered else "the model has no speech"
            self.step(5, f"speech on made-up input: not needed, {why}")
            return
        names = [name for _, some in tables for name in some]
        self.step(5, f"the model did not speak: {', '.join(names)} on made-up input, no session takes part")
        with named("speech on made-up input"):
            self._engine.submit(_run_examples, tables).result()
        report.fallback_used = True

    def clear(self, before: Any) -> None:
        """Close the sessions and forget that they were. before: of `Sessions.mark`."""
        for closing in [talker.handle.close() for talker in self._talkers]:
            closing.result()
        self._engine.ask(Sessions.forget_since, before).result()
        self._engine.submit(_free_memory, self._engine.parts).result()


def _run_examples(tables: list[tuple[RegionTable, Sequence[str]]]) -> None:
    """Each region once, at its smallest size."""
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
