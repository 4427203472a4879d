"""A worker's life: start an engine in the background, lend it to conversations, let it go, load another one, drain.

Owns the status and the engine. Knows threads. Does not know messages or sockets.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.errors import ContextOverflowError, ModelError, SettingsError, SlotError
from worker.assembly.backend_flags import reset_backend_flags
from worker.compile.state import TargetState
from worker.compile.tuning import LateWatch, untune
from worker.config.service import FOREIGN_VOICE, AudioSection
from worker.config.session import EngineConfig, SessionConfig
from worker.engine import Engine, EngineError, Handle
from worker.loop.results import Event
from worker.loop.sessions import Sessions
from worker.report.compile_watch import CompileWatch
from worker.start.releasing import release_memory
from worker.start.starting import Started, start_engine
from worker.start.uploaded_voices import Reference, VoiceShelf
from worker.status import LEGAL, State, StateError, Status

LOG = logging.getLogger(__name__)
MAX_PREPARING = 2  # prompts; voices are made one at a time
SETTLE_S = 1.0  # a start that is over still has its last words to say
MAX_CHARS_A_ROW = 16  # of a prompt; real text has about four to a token


@dataclass(frozen=True)
class WorkerSettings:
    """What one worker is told. Times in s.

    ref_audio: the default voice, None for none. ref_folder: the only folder whose sounds clients may name.
    idle_timeout: a session that sends nothing for so long ends; None: never. max_backlog: bytes of messages that a
    session may have waiting.
    """

    engine: EngineConfig
    video: Path
    ref_audio: Path | None
    ref_folder: Path
    cache_dir: Path
    max_warmup_units: int
    pause_timeout: float
    idle_timeout: float | None
    drain_timeout: float
    max_backlog: int
    gpu_id: int


@dataclass
class Loaded:
    """An engine that serves, and what goes with it. late: how much compiles from now on. watch: what, and why."""

    engine: Engine
    started: Started
    shelf: VoiceShelf
    default: Reference | None
    late: LateWatch
    watch: CompileWatch
    n_sessions: int = 0


@dataclass(frozen=True)
class SlotLease:
    """A slot of an engine, from `Service.open` to `Service.close`."""

    handle: Handle
    loaded: Loaded


class Service:
    """One worker's engine over time.

    preparing: to be held while a prompt is made: that takes a thread, and the others are for units.
    """

    def __init__(self, settings: WorkerSettings):
        self.settings = settings
        self.status = Status()
        self.targets: dict[str, TargetState] = {}
        self.loaded: Loaded | None = None
        self.preparing = asyncio.Semaphore(MAX_PREPARING)
        self._lock = threading.Lock()
        self._changing = threading.Lock()  # one start or release at a time, however long it takes
        self._n_opened = 0

    # --- start ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Load, compile and warm up in the background; `status` tells how far it is."""
        threading.Thread(target=self._start, name="starter", daemon=True).start()

    def _start(self) -> None:
        with self._changing:
            self._start_engine()

    def _start_engine(self) -> None:
        try:
            loaded = self._load(self.settings)
        except Exception as error:
            if self.status.state is not State.DRAINING:  # nobody waits for it any more
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
        started = start_engine(
            settings.engine,
            video=settings.video,
            ref_audio=settings.ref_audio,
            max_units=settings.max_warmup_units,
            cache_dir=settings.cache_dir,
            status=self.status,
            targets=self.targets,
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
        return Loaded(engine, started, shelf, default, LateWatch(engine.parts), watch)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if State.FAILED in LEGAL[self.status.state]:
                self.status.move(State.FAILED, str(error))

    # --- sessions ------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self.status.state in (State.IDLE, State.BUSY)

    @property
    def n_slots(self) -> int:
        loaded = self.loaded
        return 0 if loaded is None else loaded.engine.parts.n_slots

    @property
    def n_free(self) -> int:
        """Slots for new sessions; 0 unless ready."""
        loaded = self.loaded
        return loaded.engine.parts.n_slots - loaded.n_sessions if self.is_ready and loaded is not None else 0

    async def open(self, name: str, emit: Callable[[Event], None]) -> SlotLease:
        """Lease a slot; it goes back through `close`. emit: gets the session's events, on the engine's thread.

        Raises: SlotError if all are taken; StateError if not ready; EngineError.
        """
        with self._lock:
            if not self.is_ready or self.loaded is None:
                raise StateError("worker", expected="one that is ready", got=self.status.state)
            if not self.n_free:
                raise SlotError("worker", expected="a free slot", got=f"all {self.n_slots} in use")
            self._n_opened += 1
            loaded, number = self.loaded, self._n_opened
            self._count(loaded, 1)
        opening = loaded.engine.open(f"{name}#{number}", None, emit)
        try:
            return SlotLease(await asyncio.shield(asyncio.wrap_future(opening)), loaded)
        except asyncio.CancelledError:
            opening.add_done_callback(lambda opened: self._abandon(opened, loaded))
            raise
        except Exception:
            with self._lock:
                self._count(loaded, -1)
            raise

    def _abandon(self, opened: "Future[Handle]", loaded: Loaded) -> None:
        """Nobody waits any more for what was opened."""
        if opened.exception() is None:
            self.close(SlotLease(opened.result(), loaded))
        else:
            with self._lock:
                self._count(loaded, -1)

    def close(self, lease: SlotLease) -> None:
        """End a session at once; its slot is free when the step in flight is over."""
        lease.handle.close().add_done_callback(lambda closed: self._closed(closed, lease.loaded))

    def _closed(self, closed: "Future[None]", loaded: Loaded) -> None:
        error = closed.exception()
        if error is not None and not isinstance(error, EngineError):
            LOG.error("a session could not be closed: %s", error, exc_info=error)
        with self._lock:
            self._count(loaded, -1)

    def _count(self, loaded: Loaded, change: int) -> None:
        loaded.n_sessions += change
        if loaded is self.loaded:
            self.status.count_sessions(loaded.n_sessions)

    def session_config(self, given: dict[str, Any]) -> tuple[SessionConfig, list[str]]:
        """The worker's defaults with what a client gave, and what was ignored. Raises: SettingError."""
        held = self._loaded().engine.config
        config, notes = SessionConfig.of(held.session, given)
        held.check_session(config)
        return config, notes

    def check_prompt(self, text: str) -> None:
        """Raises: ContextOverflowError for a text so long that to count its tokens would hold up everybody."""
        most = MAX_CHARS_A_ROW * self._loaded().engine.config.llm_len
        if len(text) > most:
            raise ContextOverflowError("system_prompt", expected=f"at most {most} characters", got=len(text))

    def reference(self, named: str | None = None, samples: Any = None) -> Reference | None:
        """A voice by file name, from samples ([n] float32 at 16 kHz), or the default one. Takes its time.

        Raises: SettingsError for a name that is not there; AudioError.
        """
        loaded = self._loaded()
        if named is not None:
            return loaded.shelf.of_file(self._registered(named))
        return loaded.default if samples is None else loaded.shelf.of_samples(samples)

    def _registered(self, named: str) -> Path:
        # Clients name files as they know them; only what lies in this one folder is theirs to name.
        folder = self.settings.ref_folder
        names = sorted(path.name for path in folder.glob("*") if path.is_file())
        name = named.replace("\\", "/").rpartition("/")[2]
        if name == FOREIGN_VOICE and name not in names:
            name = AudioSection().ref_audio_path.name  # the public implementation's own, which its clients name
        if name not in names:
            raise SettingsError("ref_audio_path", expected=f"one of {names}", got=named[:200])
        return folder / name

    def _loaded(self) -> Loaded:
        loaded = self.loaded
        if loaded is None:
            raise StateError("worker", expected="a loaded model", got=self.status.state)
        return loaded

    def compile_report(self) -> dict[str, Any]:
        """What the start compiled, and what has compiled since. Raises: StateError."""
        loaded = self._loaded()
        return loaded.started.report.with_live(loaded.watch.counts()).model_dump(mode="json")

    @property
    def n_snapshots(self) -> int:
        """Prepared prompts that are kept for the next session."""
        return 0 if self.loaded is None else self.loaded.engine.n_snapshots()

    async def forget_snapshots(self) -> None:
        """Raises: StateError, EngineError."""
        await asyncio.wrap_future(self._loaded().engine.ask(Sessions.forget_snapshots))

    # --- other models --------------------------------------------------------------------------

    def unload(self) -> dict[str, int]:
        """Let model, slots, compiled code and graphs go. Returns: memory before and after, in bytes.

        Raises: StateError while sessions are open or a start is under way.
        """
        if not self._changing.acquire(timeout=SETTLE_S):
            raise StateError("worker: unload", expected="one that has started", got=self.status.state)
        try:
            with self._lock:
                n_open = 0 if self.loaded is None else self.loaded.n_sessions
                if self.status.state not in (State.IDLE, State.FAILED) or n_open:
                    expected = "one without sessions that has started"
                    raise StateError("worker: unload", expected=expected, got=self.status.state)
                self.status.move(State.UNLOADED)
                loaded, self.loaded = self.loaded, None
                self.targets.clear()
            device = None
            if loaded is not None:
                device = loaded.engine.parts.model.device
                loaded.engine.close()
                loaded.watch.stop()
                untune(loaded.engine.parts)
            del loaded
            reset_backend_flags()
            return release_memory(device)
        finally:
            self._changing.release()

    def load(self, **changes: Any) -> None:
        """Start an engine with other settings, in the background.

        changes: knobs of EngineConfig; `compile` as true or false. A vocoder that was named belongs to its checkpoint.
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
        """Notice an engine that broke down, and one that compiles while it serves."""
        loaded = self.loaded
        if loaded is None or not self.is_ready:
            return
        loaded.late.check()
        if loaded.engine.failure is not None:
            self._fail(loaded.engine.failure)

    @property
    def failure(self) -> BaseException | None:
        """What the engine broke down from, whatever state the worker is in."""
        loaded = self.loaded
        return None if loaded is None else loaded.engine.failure

    def drain(self) -> None:
        """Take no session any more."""
        with self._lock:
            if self.status.state is not State.DRAINING:
                self.status.move(State.DRAINING)

    @property
    def is_drained(self) -> bool:
        return self.status.state is State.DRAINING and (self.loaded is None or not self.loaded.n_sessions)

    def shut_down(self) -> None:
        """End the engine and whatever still runs on it."""
        if self.loaded is not None:
            self.loaded.engine.close()
