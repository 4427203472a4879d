"""A worker's models over time: start in the background, lease slots to sessions, unload, load other models, drain.

Owns the status, the models, their engine thread, and the threads that start them. Messages and sockets are in `http`.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from models.errors import ModelError, SlotError
from worker.admission.lease_count import LeaseCount
from worker.admission.session_capacity import AdmissionReport
from worker.assembly.backend_flags import reset_backend_flags
from worker.assembly.parts import pick_device
from worker.compile.state import TargetState
from worker.config.session import SessionConfig
from worker.conversion.conversions import Conversions
from worker.conversion.converter import Converter
from worker.decoding import DecodingThreads
from worker.engine_thread import EngineError, EngineThread
from worker.loaded import Loaded, WorkerSettings, load_omni, load_speech
from worker.loop.observer import Observer
from worker.loop.results import UnitResult
from worker.memory_limit import MemoryLimit
from worker.model_changes import MODEL_NAMES, ModelName, changed_engine, check_load, close_all, replaced_models
from worker.slots import SlotLease, SlotUse, with_slot
from worker.speech.model import SpeechModel
from worker.start.memory import release_cached, release_memory
from worker.start.priority import StartPriority
from worker.start.uploaded_voices import Reference
from worker.status import LEGAL, State, StateError, Status
from worker.unit_phases import UnitPhases
from worker.voice_registry import voice_file

LOG = logging.getLogger(__name__)
MAX_PREPARING = 2  # prompts at a time; voices are made one by one
MAX_DECODING = 2  # chat requests at a time whose pictures and sound are decoded
MAX_DECODING_VIDEOS = 1  # the same with videos, which take up to minutes
SETTLE_S = 1.0  # time for the start thread to end after the state changed
WAIT_FOR_SLOT_S = 5.0


class Service:
    """One worker's models over time.

    loaded: the omni engine. speech: the speech model. Either is None if it is not served.

    preparing: held while a prompt is prepared, which occupies one of asyncio's threads.
    decoding: the same for the media of a chat, unless they contain videos.
    decoding_videos: the same for a chat with videos.
    decoders: threads for everything else that is decoded.
    """

    def __init__(
        self, settings: WorkerSettings, observer: Observer | None = None, priority: StartPriority | None = None
    ):
        """observer: of every engine that is started; for measurements. priority: low until the models are ready."""
        self.settings, self._observer, self._priority, self.status = settings, observer, priority, Status()
        self.targets: dict[str, TargetState] = {}
        self.loaded: Loaded | None = None
        self.conversions = Conversions(settings.ref_audio, settings.ref_folder, settings.voice_folder)
        self.speech: SpeechModel | None = None
        self.speech_error: str | None = None  # why the latest one was not loaded
        self._thread: EngineThread | None = None
        self.preparing = asyncio.Semaphore(MAX_PREPARING)
        self.decoding = asyncio.Semaphore(MAX_DECODING)
        self.decoding_videos = asyncio.Semaphore(MAX_DECODING_VIDEOS)
        self.decoders = DecodingThreads()
        self._lock, self._n_leased = threading.Lock(), 0
        self._changing = threading.Lock()  # held during a start or an unload
        self._phases = UnitPhases()
        self.memory = MemoryLimit(settings.max_memory)

    # --- start ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Load, compile and warm up in the background; `status` has the progress."""
        self._start_after([])

    def _start_after(self, closing: list[Callable[[], None]]) -> None:
        """Start as `start` does. closing: of `_detach`."""
        threading.Thread(target=self._start, args=(closing,), name="starter", daemon=True).start()

    def _start(self, closing: list[Callable[[], None]]) -> None:
        with self._changing:
            self._start_engine(closing)

    def _start_engine(self, closing: list[Callable[[], None]]) -> None:
        try:
            close_all(closing)
            speech, loaded = self._load_models(self.settings)
        except Exception as error:
            if self.status.state is not State.DRAINING:  # a stopped start is not a failure
                known = isinstance(error, ModelError)
                LOG.error("the worker cannot start: %s", error, exc_info=None if known else error)
                self._fail(error)
            return self._close_thread()
        if self._priority is not None:
            self._priority.restore()
        with self._lock:
            is_wanted = self.status.state is not State.DRAINING
            if is_wanted:
                self.loaded, self.speech = loaded, speech
                self.status.move(State.IDLE)
        if not is_wanted:
            return self._close_thread()
        times = ", ".join(f"{state.lower()} {seconds:.1f} s" for state, seconds in self.status.start_seconds.items())
        LOG.info("IDLE: %d slots (%s)", self.n_slots, times)

    def _load_models(self, settings: WorkerSettings) -> tuple[SpeechModel | None, Loaded | None]:
        """What the settings name, also what is loaded already; omni slots take the memory that is left."""
        engine, speech, loaded, thread = settings.engine, self.speech, self.loaded, self._thread
        is_serving = bool(self._loaded_names)
        if thread is None:
            thread = self._thread = EngineThread(pick_device(engine.device))
            thread.start()
        if engine.speech_path is not None and speech is None:
            try:
                speech = load_speech(settings, self.status, thread)
                self.speech_error = None
            except Exception as error:
                self.speech_error = str(error)
                if not is_serving:
                    raise
                LOG.exception("the speech model cannot start; the others are served on")
        self.conversions.load(engine, thread, self.status.progress, may_fail=is_serving)
        if engine.omni and loaded is None:
            loaded = load_omni(settings, self.status, self.targets, self._observer, thread)
        return speech, loaded

    @property
    def _loaded_names(self) -> set[ModelName]:
        parts = self.loaded, self.speech, self.conversions.is_loaded or None
        return {name for name, part in zip(MODEL_NAMES, parts, strict=True) if part is not None}

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
        if not self.is_ready or (loaded := self.loaded) is None:
            return 0
        return max(0, min(self.n_slots - loaded.n_leases, loaded.engine.n_fitting()))

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
        return await with_slot(lambda: self._lease(name, use), wait_s)

    def _lease(self, name: str, use: SlotUse) -> SlotLease:
        with self._lock:
            if not self.is_ready or self.loaded is None:
                raise StateError("worker", expected="one that is ready", got=self.status.state)
            if not self.n_free:
                got = f"{self.loaded.n_leases} sessions, of {self.n_slots} that are admitted"
                raise SlotError("worker", expected="a free slot", got=got)
            self._n_leased += 1
            loaded, session = self.loaded, f"{name}#{self._n_leased}"
            self._count(loaded, use, 1)
        return SlotLease(loaded.engine, session, use, lambda: self._release(loaded, use, session))

    def _release(self, loaded: Loaded, use: SlotUse, session: str) -> None:
        self._phases.leave(session)
        with self._lock:
            self._count(loaded, use, -1)

    def _count(self, loaded: Loaded, use: SlotUse, change: int) -> None:
        loaded.leases[use] += change
        if loaded is self.loaded:
            self.status.count_sessions(self._n_open)

    @property
    def _n_open(self) -> int:
        """Leased slots of all models."""
        n_omni, n_speech = self.uses.total(), 0 if self.speech is None else self.speech.slots.n_leased
        return n_omni + n_speech + self.conversions.slots.n_leased

    async def lease_speech(self, wait_s: float = WAIT_FOR_SLOT_S) -> tuple[SpeechModel, Callable[[], None]]:
        """The speech model, and what gives back the slot of it that is taken.

        wait_s: limit of the wait for a free slot: one that a client has left is free after the step in flight.
        Raises: SlotError if all slots are in use; StateError if not ready, or without a speech model.
        """

        def lease() -> tuple[SpeechModel, Callable[[], None]]:
            with self._lock:
                speech = self.speech
                if not self.is_ready or speech is None:
                    got = f"none: {self.speech_error}" if self.speech_error else "none"
                    raise StateError("worker", expected="one with a speech model", got=got)
                return speech, self._counted(speech.slots)

        return await with_slot(lease, wait_s)

    async def lease_conversion(self, wait_s: float = WAIT_FOR_SLOT_S) -> tuple[Converter, Callable[[], None]]:
        """The voice conversion, and what gives back the slot of it that is taken; wait_s as in `lease_speech`.

        Raises: SlotError if all slots are in use; SettingsError without a converter; StateError if not ready.
        """

        def lease() -> tuple[Converter, Callable[[], None]]:
            with self._lock:
                if not self.is_ready:
                    raise StateError("worker", expected="one that is ready", got=self.status.state)
                return self.conversions.converter, self._counted(self.conversions.slots)

        return await with_slot(lease, wait_s)

    def _counted(self, slots: LeaseCount) -> Callable[[], None]:
        """Take a slot of another model than the omni model, with the lock held. Returns: what gives it back, once."""
        give_back = slots.lease()
        self.status.count_sessions(self._n_open)

        def release() -> None:
            with self._lock:
                give_back()
                self.status.count_sessions(self._n_open)

        return release

    def session_config(self, given: dict[str, Any]) -> tuple[SessionConfig, list[str]]:
        """The worker's defaults with a client's settings, and notes on ignored keys. Raises: SettingError."""
        engine = self.omni.engine
        config, notes = SessionConfig.of(engine.config.session, given)
        engine.config.check_session(config)
        return config, [*notes, *engine.parts.language.notes_on(config)]

    def reference(self, named: str | None = None, samples: Any = None) -> Reference | None:
        """A voice of the server by name, from samples ([n] float32 at 16 kHz), or the default one. It may take seconds.

        Raises: SettingsError for an unknown name; AudioError.
        """
        loaded = self.omni
        if named is not None:
            return loaded.shelf.of_file(voice_file(named, self.settings.ref_folder, self.settings.voice_folder))
        return loaded.default if samples is None else loaded.shelf.of_samples(samples)

    @property
    def omni(self) -> Loaded:
        """Raises: StateError without the omni model."""
        if self.loaded is None:
            raise StateError("worker", expected="a loaded model", got=self.status.state)
        return self.loaded

    # --- other models --------------------------------------------------------------------------

    def unload(self, model: ModelName | None = None) -> dict[str, int]:
        """Free a model with its slots, compiled code and graphs. Returns: memory before and after, in bytes.

        model: None: all of them.
        Raises: StateError while sessions of any model are open or a start runs; EngineError if the step in flight does
            not end, after which the worker has failed.
        """
        if not self._changing.acquire(timeout=SETTLE_S):
            raise StateError("worker: unload", expected="one that has started", got=self.status.state)
        try:
            with self._lock:
                self._check_unused("unload", State.IDLE, State.FAILED)
                unloaded = set(MODEL_NAMES) if model is None else {model}
                is_last = self._loaded_names <= unloaded
                if is_last:
                    self.status.move(State.UNLOADED)
                closing = self._detach(unloaded)
            device = None if self._thread is None else self._thread.device
            close_all(closing)
            if not is_last:
                return release_cached(device)
            self._close_thread()
            reset_backend_flags()
            return release_memory(device)
        except EngineError as error:
            self._fail(error)
            raise
        finally:
            self._changing.release()

    def _detach(self, models: set[ModelName]) -> list[Callable[[], None]]:
        """Serve these models no more. Returns: what frees each, for `close_all`."""
        closing = [self.conversions.detach()] if "conversion" in models else []
        if "speech" in models and self.speech is not None:
            closing.append(self.speech.close)
            self.speech = None
        if "omni" in models:
            self.targets.clear()
            if self.loaded is not None:
                closing.append(self.loaded.close)
            self.loaded = None
        return closing

    def _check_unused(self, what: str, *states: State) -> None:
        """Raises: StateError in another state, or with open sessions."""
        if self.status.state not in states or self._n_open:
            expected = "one without sessions that has started"
            raise StateError(f"worker: {what}", expected=expected, got=self.status.state)

    def load(self, **changes: Any) -> None:
        """Load what the settings name and what is not loaded, in the background.

        Args:
            changes: fields of EngineConfig; `compile` as true or false. A new `model_path` resets `token2wav_path` and
                `pt_path`, which belong to the former checkpoint. A new `speech_path` or `s3gen_path` replaces a model
                that is loaded; until the new one is ready, no session begins.

        Raises: StateError while sessions are open, or with changes of an omni model that is loaded; SettingError.
        """
        engine = changed_engine(self.settings.engine, changes)
        with self._lock:
            if self._loaded_names:
                self._check_unused("load", State.IDLE)
                check_load(engine, changes, self._loaded_names)
            self.status.move(State.LOADING)
            self.settings = replace(self.settings, engine=engine)
            closing = self._detach(replaced_models(changes))
        self._start_after(closing)

    # --- the end -------------------------------------------------------------------------------

    def check(self) -> None:
        """Detect an engine that failed, and one that compiles while it serves."""
        if not self.is_ready:
            return
        if self.loaded is not None:
            self.loaded.late.check()
        if self.failure is not None:
            self._fail(self.failure)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine's thread, in any state; None while it runs."""
        return None if self._thread is None else self._thread.failure

    def drain(self) -> None:
        """Refuse new sessions from now on."""
        with self._lock:
            if self.status.state is not State.DRAINING:
                self.status.move(State.DRAINING)

    @property
    def is_drained(self) -> bool:
        return self.status.state is State.DRAINING and not self._n_open

    def shut_down(self) -> None:
        """Close the engine and its sessions."""
        self.decoders.close()
        self._close_thread()

    def _close_thread(self) -> None:
        """End the engine thread with all sessions, and the voice conversion beside it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()
        with suppress(EngineError):  # of a thread that does not answer
            self.conversions.detach()()
