"""Sessions over slots: what the engine thread does when it is asked to open, prepare, take a unit, pause or close.

Everything here runs on one thread and returns at once but for `prepare`; the units themselves run in the loop. Knows
prompts and the order of things. Does not know threads, sockets or files.
"""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from models.errors import ContextOverflowError, NumericsError
from models.stages.runner import Rows
from models.stages.unit_steps import UnitSteps
from worker.config.session import EngineConfig, SessionConfig
from worker.config.settings import SettingError, SettingProblem
from worker.describe import shown
from worker.loop.audio_buffer import AudioBuffer
from worker.loop.duplex_job import DuplexJob
from worker.loop.language import Language
from worker.loop.results import Event, Failure
from worker.loop.session import Gate, OrderError, Phase, Session, UnitInput
from worker.loop.unit_loop import UnitLoop
from worker.loop.voice_manager import VoiceManager
from worker.loop.window import UnitWindow

LOG = logging.getLogger(__name__)
# What `prepare` builds a session from, beside its prompt.
SETTLED_KNOBS = (
    "generate_audio",
    "tts_temperature",
    "tts_repetition_penalty",
    "window",
    "euler_steps",
    "seed",
    "compat",
)
MAX_SNAPSHOT_ROWS = 1024  # a longer prompt is hardly shared, and would take the room of many
REF_AUDIO_CHUNK_S = 1.0  # a row of the reference voice looks ahead to the end of its second


@dataclass(frozen=True)
class SystemPrompt:
    """What a session starts from.

    prefix, suffix: text before and behind the reference voice. ref_audio: [n] float32 at 16 kHz, heard by the language
    model. voice: `models.token2wav.voice.voice.Voice` the model speaks with.
    """

    prefix: str
    suffix: str
    ref_audio: np.ndarray | None = None
    voice: Any = None

    @classmethod
    def of(cls, system: str, ref_audio: np.ndarray | None = None, voice: Any = None) -> "SystemPrompt":
        """The template the model is trained with around a system text."""
        return cls(f"<|im_start|>system\n{system}\n<|audio_start|>", "<|audio_end|><|im_end|>", ref_audio, voice)


class Sessions:
    """All sessions of one engine."""

    def __init__(
        self, duplex: UnitSteps, language: Language, voices: VoiceManager, loop: UnitLoop, config: EngineConfig
    ):
        self._duplex, self._language, self._voices, self._loop = duplex, language, voices, loop
        self._config = config
        self._open: dict[str, Session] = {}
        self._snapshots: OrderedDict[str, Any] = OrderedDict()
        self._n_opened = 0

    def __len__(self) -> int:
        return len(self._open)

    def get(self, name: str) -> Session:
        """Raises: OrderError if there is no such session."""
        if name not in self._open:
            raise OrderError(f"session {name}", expected="an open session", got="none of that name")
        return self._open[name]

    def open(self, name: str, config: SessionConfig, emit: Callable[[Event], None]) -> Session:
        """Lease a slot. Raises: OrderError if the name is taken; SlotError if no slot is free; SettingsError."""
        if name in self._open:
            raise OrderError(f"session {name}: open", expected="a name that is free", got="one in use")
        self._config.check_session(config)
        slot = self._duplex.open()
        try:
            session = Session(name, slot, config, emit, self._audio_buffer(config), self._window(config))
        except BaseException:
            self._duplex.close(slot)
            raise
        self._open[name] = session
        return session

    def prepare(self, session: Session, prompt: SystemPrompt, config: SessionConfig | None = None) -> int:
        """Start the session's context anew from a prompt. config: other settings from now on.

        Returns: context rows of the prompt.
        Raises: OrderError; SettingsError; AudioError; ContextOverflowError; SlotError for too many voices. The session
        is new then, its slot empty.
        """
        session.turn_gate("prepare")
        session.move("prepare")
        try:
            return self._prepare(session, prompt, config or session.config)
        except BaseException:
            self._voices.take_back(session)
            self._duplex.empty(session.slot)
            session.move("reset")
            session.drop_waiting("the session could not be prepared")
            raise

    def _prepare(self, session: Session, prompt: SystemPrompt, config: SessionConfig) -> int:
        self._config.check_session(config)
        self._duplex.empty(session.slot)
        session.renew(config, self._audio_buffer(config), self._window(config))
        self._duplex.configure(session.slot, config.text_sampling(), config.speech_sampling(), self.seed(config))
        tokenizer = self._language.tokenizer
        prefix, suffix = tokenizer.encode(prompt.prefix), tokenizer.encode(prompt.suffix)
        if config.generate_audio:
            self._voices.lend(session, prompt.voice)
        else:
            self._voices.take_back(session)
        n_rows = self._feed_prompt(session, prefix, prompt.ref_audio, suffix)
        session.window.protect(n_rows - len(suffix), suffix)
        if not session.reference and config.window.mode != "off":
            n_held = n_rows - (len(suffix) if config.window.mode == "context" else 0)
            saved = self._snapshots.get(_digest(prefix, prompt.ref_audio, suffix))  # shared if there is one
            keys = self._duplex.save_keys(session.slot, n_held) if saved is None else saved
            self._duplex.context.hold(session.slot, keys, n_held)
        return n_rows

    @property
    def n_snapshots(self) -> int:
        """Prepared prompts that are kept."""
        return len(self._snapshots)

    def forget_snapshots(self) -> None:
        """The next session's prompt is fed anew, whatever it is."""
        self._snapshots.clear()

    def seed(self, config: SessionConfig) -> int:
        """What a session's draws start from."""
        self._n_opened += 1
        return config.seed if config.seed is not None else (self._config.seed + self._n_opened) % 2**64

    def _feed_prompt(self, session: Session, prefix: list[int], ref_audio: np.ndarray | None, suffix: list[int]) -> int:
        duplex, slot = self._duplex, session.slot
        key = _digest(prefix, ref_audio, suffix)
        if (saved := self._snapshots.get(key)) is not None:
            self._snapshots.move_to_end(key)
            duplex.load(slot, saved)
            return duplex.runner.context_len(slot)
        rows = self._prompt_rows(prefix, ref_audio, suffix)
        if rows is None:
            return 0
        n_rows = self.feed_prompt(session, rows)
        if self._config.snapshots and n_rows <= MAX_SNAPSHOT_ROWS:
            self._snapshots[key] = duplex.save(slot)
            if len(self._snapshots) > self._config.snapshots:
                self._snapshots.popitem(last=False)
        return n_rows

    def feed_prompt(self, session: Session, rows: Rows) -> int:
        """Feed what an empty session starts from. Returns: its rows. Raises: ContextOverflowError, NumericsError."""
        duplex, what = self._duplex, f"prompt of session {session.id}"
        if len(rows) > duplex.runner.llm_len:
            raise ContextOverflowError(what, expected=f"at most {duplex.runner.llm_len} rows", got=len(rows))
        self._loop.observer.fed(session.id, "prompt", 0, rows)
        (chosen,) = duplex.feed([session.slot], [rows], [False])
        if chosen.bad:
            raise NumericsError(what, expected="finite numbers", got="NaN or infinity")
        return len(rows)

    def _prompt_rows(self, prefix: list[int], ref_audio: np.ndarray | None, suffix: list[int]) -> Rows | None:
        runner = self._duplex.runner
        if not prefix and not suffix and ref_audio is None:
            return None
        if ref_audio is None:
            return Rows.mixed([*prefix, *suffix], [])
        (heard,) = runner.encode_clips([torch.from_numpy(ref_audio)], chunk_length=REF_AUDIO_CHUNK_S)
        ids = [*prefix, *[0] * len(heard), *suffix]
        return Rows.mixed(ids, [(len(prefix), heard)])

    # --- while it lives ------------------------------------------------------------------------

    def unit(self, session: Session, unit: UnitInput) -> None:
        """Take one unit; its result comes through `emit`.

        Raises: OrderError if the session takes none now, or has too many waiting.
        """
        if not (session.reference and session.gate is Gate.STOPPED):
            session.turn_gate("unit")
        if not session.is_live:
            raise OrderError(f"session {session.id}: unit", expected="a prepared session", got=session.phase)
        if len(session.waiting) >= self._config.max_waiting_units:
            expected = f"at most {self._config.max_waiting_units} units waiting"
            raise OrderError(f"session {session.id}: unit", expected=expected, got=len(session.waiting) + 1)
        session.waiting.append(unit)

    def dispatch(self) -> None:
        """Start the next unit of every session that has one waiting and none running, and end those that are over."""
        for session in list(self._open.values()):
            if session.ends_itself and not session.is_busy:
                self._end(session)
            if session.waiting and not session.is_busy:
                unit = session.waiting.popleft()
                self._loop.add(DuplexJob(session, unit.arrived, unit, self._language, self._voices))

    def adjust(self, session: Session, config: SessionConfig) -> None:
        """Other settings from the next unit on; context, turn and random numbers go on.

        Raises: OrderError while a unit runs; SettingError for a knob that is settled when a session is prepared.
        """
        if session.phase is not Phase.READY:
            raise OrderError(f"session {session.id}: adjust", expected="a session between units", got=session.phase)
        self._config.check_session(config)
        settled = [knob for knob in SETTLED_KNOBS if getattr(config, knob) != getattr(session.config, knob)]
        if settled:
            values = ((knob, getattr(session.config, knob), getattr(config, knob)) for knob in settled)
            raise SettingError(
                [SettingProblem(knob, f"{held!r}, as prepared", shown(asked)) for knob, held, asked in values]
            )
        session.config = config
        self._duplex.adjust_text(session.slot, config.text_sampling())

    def pause(self, session: Session) -> None:
        """Take no units until `resume`; what waits is still run. Raises: OrderError."""
        session.turn_gate("pause")

    def resume(self, session: Session) -> None:
        session.turn_gate("resume")

    def stop(self, session: Session) -> None:
        """Take no units any more; what waits fails, a unit that runs is finished. Raises: OrderError."""
        session.turn_gate("stop")
        session.drop_waiting("the session was stopped")

    def clear_stop(self, session: Session) -> None:
        session.turn_gate("clear_stop")

    def break_speech(self, session: Session, on: bool = True) -> None:
        """Ask the unit that runs, or else the next one, to stop speaking at its next token; off: take that back.

        An answer that runs falls silent at once, and its text ends at the next token.
        """
        if not session.is_live:
            raise OrderError(f"session {session.id}: break", expected="a prepared session", got=session.phase)
        # An answer sees to it by itself.
        session.break_asked = on and not self._loop.break_off(session)

    def close(self, session: Session) -> None:
        """End a session: whatever runs or waits is dropped without a word, slots go back empty.

        Raises: OrderError if it is closed.
        """
        session.move("close")
        del self._open[session.id]
        session.waiting.clear()
        self._loop.drop(session)
        try:
            self._voices.take_back(session)
        finally:
            self._duplex.close(session.slot)

    def mark(self) -> tuple[int, OrderedDict[str, Any]]:
        """What is remembered of sessions that are over, for `forget_since`."""
        return self._n_opened, self._snapshots.copy()

    def forget_since(self, mark: tuple[int, OrderedDict[str, Any]]) -> None:
        """Seeds and prompts of the sessions since `mark` leave no trace in later ones."""
        self._n_opened, self._snapshots = mark

    def tell_all(self, error: Exception) -> None:
        """Every session fails for a reason that is not its own."""
        for session in self._open.values():
            session.tell(Failure(session.id, session.n_units, error))

    def close_all(self) -> None:
        """End every session, whatever state it is in; for the end of the engine."""
        for session in list(self._open.values()):
            self._end(session)

    def _end(self, session: Session) -> None:
        try:
            self.close(session)
        except Exception:
            LOG.exception("session %s: could not be closed", session.id)

    def _audio_buffer(self, config: SessionConfig) -> AudioBuffer:
        return AudioBuffer(reference=config.compat == "reference", max_waiting_s=2 * self._config.max_waiting_units)

    def _window(self, config: SessionConfig) -> UnitWindow:
        reference = config.compat == "reference"
        return UnitWindow(
            config.window,
            is_special=self._language.is_special,
            decode=self._language.text,
            marker=self._language.tokenizer.encode(config.window.marker),
            max_tokens=None if reference else self._config.llm_len - config.unit_rows,
            evict_newest=True,
        )


def _digest(prefix: list[int], ref_audio: np.ndarray | None, suffix: list[int]) -> str:
    digest = hashlib.sha256(repr((prefix, suffix, ref_audio is not None)).encode())
    if ref_audio is not None:
        digest.update(np.ascontiguousarray(ref_audio, np.float32).tobytes())
    return digest.hexdigest()
