"""A worker's engine over time: start in the background, lease slots to sessions, unload, load another model, drain.

Owns the status and the engine, and the threads that start it. Messages and sockets are in `http`.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from models.errors import ContextOverflowError, ModelError, SlotError
from worker.admission.session_capacity import AdmissionReport, SessionCapacity
from worker.admission.unit_cost import measured_cost
from worker.assembly.backend_flags import reset_backend_flags
from worker.compile.compile_engine import RecompileWatch, uncompile_engine
from worker.compile.state import TargetState
from worker.config.session import EngineConfig, SessionConfig
from worker.conversion.conversions import Conversions
from worker.decoding import DecodingThreads
from worker.engine import Engine
from worker.loop.observer import Observer
from worker.loop.results import UnitResult
from worker.report.compile_watch import CompileWatch
from worker.slots import SlotLease, SlotUse
from worker.start.memory import release_memory
from worker.start.starting import Started, start_engine
from worker.start.uploaded_voices import Reference, VoiceShelf
from worker.status import LEGAL, State, StateError, Status
from worker.unit_phases import UnitPhases
from worker.voice_registry import voice_file

LOG = logging.getLogger(__name__)
MAX_PREPARING = 2  # prompts at a time; voices are made one by one
MAX_DECODING = 2  # chat requests at a time whose pictures and sound are decoded
MAX_DECODING_VIDEOS = 1  # the same with videos, which take up to minutes
SETTLE_S = 1.0  # time for the start thread to end after the state changed
WAIT_FOR_SLOT_S, POLL_S = 5.0, 0.05
MAX_CHARS_PER_ROW = 16  # of a prompt; real text has about four characters for each token


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
        secret: of the launcher, which clients must know; None: none.
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


class Service:
    """One worker's engine over time.

    preparing: held while a prompt is prepared, which occupies one of asyncio's threads.
    decoding: the same for the media of a chat, unless they contain videos.
    decoding_videos: the same for a chat with videos.
    decoders: threads for everything else that is decoded.
    """

    def __init__(self, settings: WorkerSettings, observer: Observer | None = None):
        """observer: of every engine that is started; for measurements."""
        self.settings, self._observer, self.status = settings, observer, Status()
        self.targets: dict[str, TargetState] = {}
        self.loaded: Loaded | None = None
        self.conversions = Conversions(settings.ref_audio, settings.ref_folder, settings.voice_folder)
        self.preparing = asyncio.Semaphore(MAX_PREPARING)
        self.decoding = asyncio.Semaphore(MAX_DECODING)
        self.decoding_videos = asyncio.Semaphore(MAX_DECODING_VIDEOS)
        self.decoders = DecodingThreads()
        self._lock, self._n_leased = threading.Lock(), 0
        self._changing = threading.Lock()  # held during a start or an unload
        self._phases = UnitPhases()

    # --- start ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Load, compile and warm up in the background; `status` has the progress."""
        threading.Thread(target=self._start, name="starter", daemon=True).start()

    def _start(self) -> None:
        with self._changing:
            self._start_engine()

    def _start_engine(self) -> None:
        try:
            loaded = self._load(self.settings)
        except Exception as error:
            if self.status.state is not State.DRAINING:  # a stopped start is not a failure
                known = isinstance(error, ModelError)
                LOG.error("the worker cannot start: %s", error, exc_info=None if known else error)
                self._fail(error)
            return
        with self._lock:
            is_wanted = self.status.state is not State.DRAINING
            if is_wanted:
                self.loaded = loaded
                self.status.move(State.IDLE)
        if not is_wanted:
            loaded.engine.close()
            return
        times = ", ".join(f"{state.lower()} {seconds:.1f} s" for state, seconds in self.status.start_seconds.items())
        LOG.info("IDLE: %d slots (%s)", self.n_slots, times)

    def _load(self, settings: WorkerSettings) -> Loaded:
        self.conversions.load(settings.engine, self.status.progress)
        started = start_engine(
            settings.engine,
            video=settings.video,
            ref_audio=settings.ref_audio,
            max_units=settings.max_warmup_units,
            cache_dir=settings.cache_dir,
            status=self.status,
            targets=self.targets,
            observer=self._observer,
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
        cost = measured_cost(started.warm_up.lone, started.warm_up.bursts)
        if cost is not None:
            engine.expect_unit_times(cost.seconds)
        admission = SessionCapacity(engine.n_slots, cost if settings.is_measured else None)
        return Loaded(engine, started, admission, shelf, default, RecompileWatch(engine.parts), watch)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if State.FAILED in LEGAL[self.status.state]:
                self.status.move(State.FAILED, str(error))

    # --- sessions ------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self.status.state in (State.IDLE, State.BUSY)

    @property
    def n_slots(self) -> int:
        """Sessions that are admitted: the number of slots, or fewer if units would be late."""
        loaded = self.loaded
        return 0 if loaded is None else loaded.admission.capacity

    @property
    def n_free(self) -> int:
        """Slots for new sessions; 0 unless ready."""
        loaded = self.loaded
        return max(0, self.n_slots - loaded.n_leases) if self.is_ready and loaded is not None else 0

    def start_after_ms(self, session: str) -> float | None:
        """When a session should begin its first second, in ms from now; None: at any time."""
        return 1000 * self._phases.reserve(session) if self.settings.spread_units else None

    def count_unit(self, event: UnitResult, arrived: float) -> None:
        """Let a unit's time decide how many sessions are admitted, and its arrival when others should begin."""
        if event.tokens:
            self._phases.count_unit(event.session, arrived)
        if self.loaded is not None and event.times.load is not None and not event.is_incomplete:
            self.loaded.admission.record(event.times.load, spoke=not event.is_listen)

    def admission(self) -> AdmissionReport | None:
        """How many sessions are admitted and why; None without a model."""
        loaded = self.loaded
        return None if loaded is None else loaded.admission.report(loaded.n_leases)

    @property
    def uses(self) -> Counter[SlotUse]:
        """Number of leased slots by use."""
        return Counter() if self.loaded is None else self.loaded.leases

    async def lease(self, name: str, use: SlotUse, wait_s: float = WAIT_FOR_SLOT_S) -> SlotLease:
        """Lease a slot, without a session in it yet.

        Args:
            name: for the session's name.
            use: what the slot is leased for.
            wait_s: limit of the wait for a free slot, in s.
        Raises: SlotError if all slots are in use; StateError if not ready.
        """
        until = time.monotonic() + wait_s
        while True:
            try:
                return self._lease(name, use)
            except SlotError:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(POLL_S)

    def _lease(self, name: str, use: SlotUse) -> SlotLease:
        with self._lock:
            if not self.is_ready or self.loaded is None:
                raise StateError("worker", expected="one that is ready", got=self.status.state)
            if not self.n_free:
                got = f"{self.loaded.n_leases} sessions, of {self.n_slots} that are admitted"
                raise SlotError("worker", expected="a free slot", got=got)
            self._n_leased += 1
            loaded, number = self.loaded, self._n_leased
            self._count(loaded, use, 1)
        session = f"{name}#{number}"
        return SlotLease(loaded.engine, session, use, lambda: self._release(loaded, use, session))

    def _release(self, loaded: Loaded, use: SlotUse, session: str) -> None:
        self._phases.leave(session)
        with self._lock:
            self._count(loaded, use, -1)

    def _count(self, loaded: Loaded, use: SlotUse, change: int) -> None:
        loaded.leases[use] += change
        if loaded is self.loaded:
            self.status.count_sessions(loaded.n_leases)

    def session_config(self, given: dict[str, Any]) -> tuple[SessionConfig, list[str]]:
        """The worker's defaults with a client's settings, and notes on ignored keys. Raises: SettingError."""
        engine = self._loaded().engine
        config, notes = SessionConfig.of(engine.config.session, given)
        engine.config.check_session(config)
        return config, [*notes, *engine.parts.language.notes_on(config)]

    def check_prompt(self, text: str, what: str = "system_prompt") -> None:
        """Raises: ContextOverflowError for a text so long that tokenizing it would delay other sessions."""
        limit = MAX_CHARS_PER_ROW * self._loaded().engine.config.llm_len
        if len(text) > limit:
            raise ContextOverflowError(what, expected=f"at most {limit} characters", got=len(text))

    def plain_text(self, text: str) -> str:
        """`text` so that names of special tokens in it have no effect in a prompt. Raises: StateError."""
        return self._loaded().engine.parts.language.tokenizer.without_added(text)

    @property
    def context_rows(self) -> int:
        """Context length of a slot."""
        return self._loaded().engine.config.llm_len

    def reference(self, named: str | None = None, samples: Any = None) -> Reference | None:
        """A voice of the server by name, from samples ([n] float32 at 16 kHz), or the default one. It may take seconds.

        Raises: SettingsError for an unknown name; AudioError.
        """
        loaded = self._loaded()
        if named is not None:
            return loaded.shelf.of_file(voice_file(named, self.settings.ref_folder, self.settings.voice_folder))
        return loaded.default if samples is None else loaded.shelf.of_samples(samples)

    def _loaded(self) -> Loaded:
        loaded = self.loaded
        if loaded is None:
            raise StateError("worker", expected="a loaded model", got=self.status.state)
        return loaded

    def compile_report(self) -> dict[str, Any]:
        """The compile report of the start, with the counters since. Raises: StateError."""
        loaded = self._loaded()
        return loaded.started.report.with_live(loaded.watch.counts()).model_dump(mode="json")

    @property
    def n_snapshots(self) -> int:
        """Number of cached snapshots of prepared prompts."""
        return 0 if self.loaded is None else self.loaded.engine.n_snapshots()

    async def forget_snapshots(self) -> None:
        """Drop the cached snapshots. Raises: StateError, EngineError."""
        await asyncio.wrap_future(self._loaded().engine.forget_snapshots())

    # --- other models --------------------------------------------------------------------------

    def unload(self) -> dict[str, int]:
        """Free model, slots, compiled code and graphs. Returns: memory before and after, in bytes.

        Raises: StateError while sessions are open or a start runs.
        """
        if not self._changing.acquire(timeout=SETTLE_S):
            raise StateError("worker: unload", expected="one that has started", got=self.status.state)
        try:
            with self._lock:
                n_open = 0 if self.loaded is None else self.loaded.n_leases
                if self.status.state not in (State.IDLE, State.FAILED) or n_open:
                    expected = "one without sessions that has started"
                    raise StateError("worker: unload", expected=expected, got=self.status.state)
                self.status.move(State.UNLOADED)
                loaded, self.loaded = self.loaded, None
                self.targets.clear()
            self.conversions.unload()
            device = None if loaded is None else loaded.engine.device
            if loaded is not None:
                loaded.engine.close()
                loaded.watch.stop()
                uncompile_engine(loaded.engine.parts)
            del loaded
            reset_backend_flags()
            return release_memory(device)
        finally:
            self._changing.release()

    def load(self, **changes: Any) -> None:
        """Start an engine with other settings, in the background.

        Args:
            changes: fields of EngineConfig; `compile` as true or false. A new `model_path` resets `token2wav_path` and
                `pt_path`, which belong to the former checkpoint.
        Raises: StateError unless unloaded; SettingError.
        """
        if "compile" in changes:
            changes["compile"] = self.settings.engine.compile.model_copy(update={"enabled": changes["compile"]})
        own_parts = {"token2wav_path": None, "pt_path": None} if "model_path" in changes else {}
        engine = EngineConfig(**{**dict(self.settings.engine), **own_parts, **changes})
        with self._lock:
            self.status.move(State.LOADING)
            self.settings = replace(self.settings, engine=engine)
        self.start()

    # --- the end -------------------------------------------------------------------------------

    def check(self) -> None:
        """Detect an engine that failed, and one that compiles while it serves."""
        loaded = self.loaded
        if loaded is None or not self.is_ready:
            return
        loaded.late.check()
        if loaded.engine.failure is not None:
            self._fail(loaded.engine.failure)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine's thread, in any state; None while it runs."""
        loaded = self.loaded
        return None if loaded is None else loaded.engine.failure

    def drain(self) -> None:
        """Refuse new sessions from now on."""
        with self._lock:
            if self.status.state is not State.DRAINING:
                self.status.move(State.DRAINING)

    @property
    def is_drained(self) -> bool:
        return self.status.state is State.DRAINING and (self.loaded is None or not self.loaded.n_leases)

    def shut_down(self) -> None:
        """Close the engine and its sessions."""
        self.decoders.close()
        self.conversions.unload()
        if self.loaded is not None:
            self.loaded.engine.close()
