"""One worker's settings, what it has loaded, and how that is started."""

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.errors import ContextOverflowError
from worker.admission.session_capacity import SessionCapacity
from worker.admission.unit_cost import measured_cost
from worker.assembly.parts import pick_device
from worker.compile.compile_engine import RecompileWatch, uncompile_engine
from worker.compile.state import TargetState
from worker.config.session import EngineConfig
from worker.engine import Engine
from worker.engine_thread import EngineThread
from worker.loop.observer import Observer
from worker.report.compile_watch import CompileWatch
from worker.slots import SlotUse
from worker.speech.model import SpeechModel
from worker.speech.start import start_speech
from worker.speech.voices import VoiceFolders
from worker.start.starting import Started, start_engine
from worker.start.uploaded_voices import Reference, VoiceShelf
from worker.status import Status
from worker.trace.files import recorder_for

MAX_CHARS_PER_ROW = 16  # of a prompt; real text has about four characters for each token
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSettings:
    """One worker's settings. Times in s.

    Attributes:
        ref_audio: the default voice; None: no default.
        ref_folder: the voices that come with the server; clients name their files.
        voice_folder: registered voices, which clients name by name, id or file name.
        idle_timeout: a session without units ends after it; None: never.
        max_backlog: bytes of a session's waiting messages.
        spread_units: tell new sessions when to begin, so that units of all sessions are spread over the second.
        is_measured: no more sessions are admitted than have their units answered in time.
        secret: of the launcher, which clients must send; None: none.
        max_memory: bytes of the process above which its launcher replaces it; None: by what it holds once ready.
        trace_dir: folder of traces of all sessions; None: none are written.
        asked_trace_dir: folder of traces of sessions that ask for one; None: none is written.
    """

    engine: EngineConfig
    video: Path
    ref_audio: Path | None
    ref_folder: Path
    voice_folder: Path
    cache_dir: Path
    max_warmup_units: int
    pause_timeout: float
    idle_timeout: float | None
    drain_timeout: float
    max_backlog: int
    gpu_id: int
    is_measured: bool = False
    spread_units: bool = True
    secret: str | None = field(default=None, repr=False)
    trace_dir: Path | None = None
    asked_trace_dir: Path | None = None
    max_memory: int | None = None


@dataclass
class Loaded:
    """A serving engine and its companions.

    Attributes:
        admission: how many sessions are admitted.
        shelf: voices of clients.
        default: the default voice.
        late: counters of compilation after warm-up.
        watch: events of compilation after warm-up, with reasons.
        leases: number of leased slots by use.
    """

    engine: Engine
    started: Started
    admission: SessionCapacity
    shelf: VoiceShelf
    default: Reference | None
    late: RecompileWatch
    watch: CompileWatch
    leases: Counter[SlotUse] = field(default_factory=Counter)

    @property
    def n_leases(self) -> int:
        return self.leases.total()

    @property
    def n_snapshots(self) -> int:
        """Number of cached snapshots of prepared prompts."""
        return self.engine.n_snapshots()

    async def forget_snapshots(self) -> None:
        """Drop the cached snapshots. Raises: EngineError."""
        await asyncio.wrap_future(self.engine.forget_snapshots())

    def plain_text(self, text: str) -> str:
        """`text` so that names of special tokens in it have no effect in a prompt."""
        return self.engine.parts.language.tokenizer.without_added(text)

    def check_prompt(self, text: str, what: str = "system_prompt") -> None:
        """Raises: ContextOverflowError for a text so long that tokenizing it would delay other sessions."""
        limit = MAX_CHARS_PER_ROW * self.context_rows
        if len(text) > limit:
            raise ContextOverflowError(what, expected=f"at most {limit} characters", got=len(text))

    @property
    def context_rows(self) -> int:
        """Context length of a slot."""
        return self.engine.config.llm_len

    def compile_report(self) -> dict[str, Any]:
        """The compile report of the start, with the counters since."""
        return self.started.report.with_live(self.watch.counts()).model_dump(mode="json")

    def close(self) -> None:
        """End all sessions, and free what the device holds beside the weights."""
        self.engine.close()
        self.watch.stop()
        uncompile_engine(self.engine.parts)


def load_speech(settings: WorkerSettings, status: Status, thread: EngineThread) -> SpeechModel:
    """The speech model of the settings, which serves. Raises: as `start_speech`."""
    engine = settings.engine
    assert engine.speech_path is not None, "expected a speech model in the settings"
    folders = VoiceFolders(settings.ref_folder, settings.voice_folder, settings.ref_audio)
    return start_speech(engine.speech_path, engine, pick_device(engine.device), thread, folders, status.progress)


def load_omni(
    settings: WorkerSettings,
    status: Status,
    targets: dict[str, TargetState],
    observer: Observer | None,
    thread: EngineThread,
) -> Loaded:
    """The omni engine of the settings; arguments and errors of `start_engine`."""
    started = start_engine(
        settings.engine,
        video=settings.video,
        ref_audio=settings.ref_audio,
        max_units=settings.max_warmup_units,
        cache_dir=settings.cache_dir,
        status=status,
        targets=targets,
        observer=observer,
        thread=thread,
        recorder=recorder_for(settings.trace_dir, settings.asked_trace_dir),
        measures_cost=settings.is_measured,
    )
    engine = started.engine
    try:
        shelf = VoiceShelf(started.voices)
        default = shelf.of_file(settings.ref_audio) if settings.ref_audio else None
    except BaseException:
        engine.close()
        raise
    watch = CompileWatch(LOG)
    watch.start()
    cost = started.warm_up.cost or measured_cost(started.warm_up.lone, started.warm_up.bursts)
    if cost is not None:
        engine.expect_unit_times(cost.seconds)
    admission = SessionCapacity(engine.n_slots, cost if settings.is_measured else None)
    return Loaded(engine, started, admission, shelf, default, RecompileWatch(engine.parts), watch)
