"""Sessions over slots: open, prepare, accept units, pause, close.

Everything runs on the engine thread. Only `prepare` runs the model; the other calls return at once, and units run in
the loop. Contains prompts and the order of calls. Does not contain threads, sockets or files.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from models.errors import ContextOverflowError
from models.inputs.image import ImagePatches
from models.sampling.settings import TextSampling
from models.stages.runner import Rows
from models.stages.unit_steps import UnitSteps
from worker.config.session import SIDE_DUPLEX_SET, EngineConfig, SessionConfig
from worker.loop.audio_buffer import AudioBuffer
from worker.loop.duplex_job import DuplexJob
from worker.loop.early.early_job import EarlyJob
from worker.loop.early.early_prefill import EarlyPrefill, remove_early_rows
from worker.loop.language import Language
from worker.loop.prompt.inserted_text import MAX_TEXT_CHARS, TextJob
from worker.loop.prompt.prompts import PromptChange, Prompts, Snapshot
from worker.loop.prompt.system_prompt import Adjustment, AdjustOutcome, SystemPrompt
from worker.loop.replay.replay_job import ReplayJob
from worker.loop.results import Event, Failure
from worker.loop.session import Gate, OrderError, Session, SessionPhase, TextInput, UnitInput
from worker.loop.unit_loop import UnitLoop
from worker.loop.voice_manager import VoiceManager
from worker.loop.window import UnitWindow

LOG = logging.getLogger(__name__)


class SessionsMark(NamedTuple):
    """State that closed sessions leave behind, see `Sessions.mark`. n_opened: seeds drawn. snapshots: by digest."""

    n_opened: int
    snapshots: OrderedDict[str, Snapshot]


class Sessions:
    """All sessions of one engine."""

    def __init__(
        self, unit_steps: UnitSteps, language: Language, voices: VoiceManager, loop: UnitLoop, config: EngineConfig
    ):
        self._unit_steps, self._language, self._voices, self._loop = unit_steps, language, voices, loop
        self._config, self._open = config, dict[str, Session]()
        self._prompts = Prompts(unit_steps, language.tokenizer, loop.observer, config.snapshots)
        self._n_opened = 0
        if config.early_prefill:
            loop.pictures.feed_with(EarlyPrefill(unit_steps, language, loop.unfed, config.early_prefill, self.__len__))

    def __len__(self) -> int:
        return len(self._open)

    def get(self, name: str) -> Session:
        """An open session by name. Raises: OrderError if there is none."""
        if name not in self._open:
            raise OrderError(f"session {name}", expected="an open session", got="none of that name")
        return self._open[name]

    def context_len(self, session: Session) -> int:
        """Context rows that a session holds."""
        return self._unit_steps.context_len(session.slot)

    @property
    def max_waiting_units(self) -> int:
        """Units that may wait beside the one that runs."""
        return self._config.max_waiting_units

    @property
    def max_prompt_s(self) -> float:
        """Seconds of sound in a prompt, at most."""
        return min(self._config.max_prompt_s, self._voices.max_voice_s)

    # --- open and prepare ----------------------------------------------------------------------

    def open(
        self, name: str, config: SessionConfig, emit: Callable[[Event], None], n_rows: int | None = None
    ) -> Session:
        """Lease a slot.

        Args:
            n_rows: context rows that the session needs; None: as many as its settings ask for.
        Raises: OrderError if the name is taken; SlotError if no slot is free, or too few rows of a pool that the slots
            share; SettingsError.
        """
        if name in self._open:
            raise OrderError(f"session {name}: open", expected="a name that is free", got="one in use")
        self._config.check_session(config)
        slot = self._unit_steps.open(n_rows or self._config.rows_of(config))
        try:
            session = Session(name, slot, config, emit, self._audio_buffer(config), self._window(slot, config))
        except BaseException:
            self._unit_steps.close(slot)
            raise
        self._open[name] = session
        return session

    def prepare(self, session: Session, prompt: SystemPrompt, config: SessionConfig | None = None) -> int:
        """Start the session's context from a prompt. config: settings from now on; None keeps the current ones.

        Returns: context rows of the prompt.
        Raises: OrderError; SettingsError; AudioError; ContextOverflowError; SlotError for too many voices. After an
        error the session is new and its slot empty.
        """
        session.move_gate("prepare")
        session.move("prepare")
        try:
            return self._prepare(session, prompt, config or session.config)
        except BaseException:
            self._abandon(session, "the session could not be prepared")
            raise

    def _abandon(self, session: Session, why: str) -> None:
        """Empty a session whose context is lost: it must be prepared again."""
        self._voices.take_back(session)
        self._unit_steps.empty(session.slot)
        session.move("reset")
        session.drop_waiting(why)

    def _prepare(self, session: Session, prompt: SystemPrompt, config: SessionConfig) -> int:
        unit_steps, slot = self._unit_steps, session.slot
        self._config.check_session(config)
        unit_steps.empty(slot)
        self._loop.unfed.forget(session)
        unit_steps.reserve(slot, self._config.rows_of(config))
        session.reset(config, self._audio_buffer(config), self._window(slot, config))
        session.set_seed(self.seed(config))
        unit_steps.configure(slot, self._text_sampling(config), config.speech_sampling(), session.seed)
        self._expect_early(config)
        self._voices.lend(session, prompt.voice)
        n_rows = self._prompts.start(session, prompt)
        session.window.configure(config.window, self._max_window_tokens(slot, config))  # a long prompt has more rows
        return n_rows

    def feed_prompt(self, session: Session, rows: Rows) -> int:
        """Feed the prompt of an empty session. Returns: its rows. Raises: ContextOverflowError, NumericsError."""
        return self._prompts.feed(session, rows)

    def seed(self, config: SessionConfig) -> int:
        """Seed of a session's random numbers."""
        self._n_opened += 1
        return config.seed if config.seed is not None else (self._config.seed + self._n_opened) % 2**64

    # --- snapshots -----------------------------------------------------------------------------

    @property
    def n_snapshots(self) -> int:
        """Number of saved prompts."""
        return len(self._prompts.snapshots)

    def forget_snapshots(self) -> None:
        """Drop all saved prompts: the next session feeds its prompt."""
        self._prompts.snapshots.clear()

    def mark(self) -> SessionsMark:
        """State that closed sessions leave behind, for `forget_since`."""
        return SessionsMark(self._n_opened, self._prompts.snapshots.copy())

    def forget_since(self, mark: SessionsMark) -> None:
        """Restore the seeds and saved prompts of `mark`, so that sessions since then do not affect later ones.

        All times of first sounds are forgotten.
        """
        self._n_opened = mark.n_opened
        self._loop.forget_first_sounds()
        self._prompts.restore(mark.snapshots)

    # --- units ---------------------------------------------------------------------------------

    def unit(self, session: Session, unit: UnitInput) -> None:
        """Queue one unit; its result is emitted as an event.

        Raises: OrderError if the session accepts none now, or has too many waiting.
        """
        if not (session.reference and session.gate is Gate.STOPPED):
            session.move_gate("unit")
        session.forget_frames_ahead()
        self._queue(session, unit, "unit")
        self._expect_pictures(session, unit.frames)

    def expect_picture(self, session: Session, slices: list[ImagePatches]) -> None:
        """Encode a picture of a later unit while no unit is in flight, if there is time and room."""
        n_slices = sum(map(len, session.frames_ahead)) + len(slices)
        if session.is_live and n_slices <= self.max_early_slices:
            session.expect_frame(slices)
            self._expect_pictures(session, [slices])

    def forget_pictures_ahead(self, session: Session) -> None:
        """Do not expect the pictures of `expect_picture`: their unit was refused."""
        session.forget_frames_ahead()

    def _expect_pictures(self, session: Session, frames: list[list[ImagePatches]]) -> None:
        if not session.reference:
            self._loop.pictures.expect(session, [part for frame in frames for part in frame])

    @property
    def max_early_slices(self) -> int:
        """Image slices of a session that may be encoded before their unit; 0: none."""
        return self._loop.pictures.capacity

    def insert_text(self, session: Session, text: TextInput) -> None:
        """Queue a text that is fed between two units. Emits `InsertedText`, or a failure: ContextOverflowError.

        Raises: OrderError if the session accepts none now, or has too many units waiting.
        """
        session.move_gate("text")
        self._queue(session, text, "text")

    def _queue(self, session: Session, waiting: UnitInput | TextInput, what: str) -> None:
        if not session.is_live:
            raise OrderError(f"session {session.id}: {what}", expected="a prepared session", got=session.phase)
        if len(session.waiting) >= self._config.max_waiting_units:
            expected = f"at most {self._config.max_waiting_units} units waiting"
            raise OrderError(f"session {session.id}: {what}", expected=expected, got=len(session.waiting) + 1)
        session.waiting.append(waiting)

    def text_ids(self, role: str, text: str) -> tuple[int, ...]:
        """Context rows of a text to insert. Any thread may call it. Raises: ContextOverflowError, TokenError."""
        if len(text) > MAX_TEXT_CHARS:
            raise ContextOverflowError("text", expected=f"at most {MAX_TEXT_CHARS} characters", got=len(text))
        return tuple(self._language.message(role, text))

    def dispatch(self) -> None:
        """Start the next waiting unit or text of every session that runs none; end sessions whose reply is over."""
        early: list[Session] = []
        for session in list(self._open.values()):
            if session.closes_when_idle and not session.is_busy:
                self._end(session)
            self._loop.unfed.feed_due(session)
            if session.waiting and not session.is_busy:
                if isinstance(first := session.waiting[0], UnitInput) and first.early is not None:
                    early.append(session)
                    continue
                waiting = session.waiting.popleft()
                if isinstance(waiting, UnitInput):
                    given = session, waiting.arrived, waiting, self._language, self._voices
                    decided = waiting.decided
                    self._loop.add(ReplayJob(*given, decided, self._unit_steps) if decided else DuplexJob(*given))
                else:
                    remove_early_rows(self._unit_steps, session)
                    max_length = self._unit_steps.capacity(session.slot) - session.config.unit_rows
                    self._loop.add(TextJob(session, waiting.arrived, waiting, max_length))
        for session in early:
            self._start_early(session)

    def _start_early(self, session: Session) -> None:
        """Try the session's waiting unit early, once all units whose time has come are prefilled."""
        if self._loop.has_unfed_units:
            return
        unit = session.waiting.popleft()
        assert isinstance(unit, UnitInput), "expected a unit that may run early"
        given = session, unit.arrived, unit, self._language, self._voices
        if not self._loop.run_early(EarlyJob(*given), len(self._open)):
            self._expect_pictures(session, unit.frames)
            self._loop.add(DuplexJob(*given))

    def adjust(self, session: Session, change: Adjustment) -> AdjustOutcome:
        """Change a session from the next unit on; its context, turn and random numbers stay. All changes, or none.

        Raises: OrderError while a unit runs; SettingError for a value that the engine refuses and for a setting that
            only `prepare` can change; ContextOverflowError if the prompt or a larger unit does not fit; AudioError;
            as `VoiceManager.adjust`. After an error of the device while rows move, the session is new, its slot empty.
        """
        self._loop.unfed.feed_idle(session)
        if session.phase is not SessionPhase.READY:
            raise OrderError(f"session {session.id}: adjust", expected="a session between units", got=session.phase)
        remove_early_rows(self._unit_steps, session)
        config = change.config or session.config
        self._config.check_session(config)
        session.config.check_adjustable(config)
        self._unit_steps.reserve(session.slot, self._config.rows_of(config))
        self._check_room(session, config)
        prompt = None if change.prompt is None else self._plan_prompt(session, change.prompt, config)
        notes = self._voices.adjust(session, speaks=config.generate_audio, voice=change.voice)
        notes += self._language.notes_on(config)
        try:
            if prompt is not None:
                self._prompts.apply(session, prompt)
            if change.voice is not None:
                self._voices.begin_unspoken(session)
            self._reconfigure(session, config)
        except BaseException:
            self._abandon(session, "the session could not be adjusted")
            raise
        speaks = config.generate_audio and session.speech.vocoder_slot is not None
        return AdjustOutcome(session.n_units + 1, speaks, notes)

    def _plan_prompt(self, session: Session, prompt: SystemPrompt, config: SessionConfig) -> PromptChange:
        window = session.window.copy()
        window.configure(config.window, self._max_window_tokens(session.slot, config))
        return self._prompts.plan(session, prompt, window, self._unit_steps.capacity(session.slot) - config.unit_rows)

    def _check_room(self, session: Session, config: SessionConfig) -> None:
        """A window evicts when a unit is closed, so the next one must fit as it is."""
        n_rows, most = session.window.length + config.unit_rows, self._unit_steps.capacity(session.slot)
        if config.window.mode != "off" and config.unit_rows > session.config.unit_rows and n_rows > most:
            what, expected = f"context of session {session.id}", f"at most {most} rows with a unit"
            raise ContextOverflowError(what, expected=expected, got=f"{session.window.length} + {config.unit_rows}")

    def _reconfigure(self, session: Session, config: SessionConfig) -> None:
        before = session.config
        text, speech = self._text_sampling(config), config.speech_sampling()
        self._unit_steps.adjust(
            session.slot,
            text if text != self._text_sampling(before) else None,
            speech if speech != before.speech_sampling() else None,
        )
        session.window.configure(config.window, self._max_window_tokens(session.slot, config))
        self._expect_early(config)
        session.reconfigure(config)

    def _expect_early(self, config: SessionConfig) -> None:
        if config.runs_early:
            self._loop.expect_early_units()

    def pause(self, session: Session) -> None:
        """Refuse units until `resume`; waiting units still run. Raises: OrderError."""
        session.move_gate("pause")

    def resume(self, session: Session) -> None:
        """Accept units again. Raises: OrderError."""
        session.move_gate("resume")

    def stop(self, session: Session) -> None:
        """Refuse units until `clear_stop`; waiting units fail, a running unit is finished. Raises: OrderError."""
        session.move_gate("stop")
        session.drop_waiting("the session was stopped")

    def clear_stop(self, session: Session) -> None:
        """Accept units again. Raises: OrderError."""
        session.move_gate("clear_stop")

    def break_speech(self, session: Session, on: bool = True) -> None:
        """Request the running or the next unit to stop speaking at its next token; off: cancel the request.

        A running reply is silent at once, and its text ends at the next token.
        Raises: OrderError for a session that is not prepared.
        """
        if not session.is_live:
            raise OrderError(f"session {session.id}: break", expected="a prepared session", got=session.phase)
        session.request_interrupt(on and not self._loop.interrupt(session))  # a job that stops now needs none

    # --- close ---------------------------------------------------------------------------------

    def close(self, session: Session) -> None:
        """End a session: running and waiting units are dropped without an event, its slots are emptied and released.

        Raises: OrderError if it is closed.
        """
        session.move("close")
        del self._open[session.id]
        session.waiting.clear()
        self._loop.drop(session)
        try:
            self._voices.take_back(session)
        finally:
            self._unit_steps.close(session.slot)

    def fail_all(self, error: Exception) -> None:
        """Emit a failure to every open session."""
        for session in self._open.values():
            session.send(Failure(session.id, session.n_units, error))

    def close_all(self) -> None:
        """End every session in any phase, for the end of the engine."""
        for session in list(self._open.values()):
            self._end(session)

    def _end(self, session: Session) -> None:
        try:
            self.close(session)
        except Exception:
            LOG.exception("session %s: could not be closed", session.id)

    def _text_sampling(self, config: SessionConfig) -> TextSampling:
        sampling = config.text_sampling()
        has_side_lane = self._language.side_lane is not None and config.wants_side_lane
        return replace(sampling, set_index=SIDE_DUPLEX_SET) if has_side_lane else sampling

    def _audio_buffer(self, config: SessionConfig) -> AudioBuffer:
        return AudioBuffer(reference=config.compat == "reference", max_waiting_s=2 * self._config.max_waiting_units)

    def _window(self, slot: int, config: SessionConfig) -> UnitWindow:
        return UnitWindow(
            config.window,
            is_special=self._language.is_special,
            decode=self._language.text,
            marker=self._language.tokenizer.encode(config.window.marker),
            max_tokens=self._max_window_tokens(slot, config),
            evict_newest=True,
        )

    def _max_window_tokens(self, slot: int, config: SessionConfig) -> int | None:
        return None if config.compat == "reference" else self._unit_steps.capacity(slot) - config.unit_rows
