"""The host's state of one conversation and the order in which its events are legal. Torch-free.

Does not contain how a unit is computed. Used on the engine thread only.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from models.errors import ModelError
from models.inputs.audio_sizes import SAMPLE_RATE
from models.inputs.image import ImagePatches
from models.inputs.tokens import TextStream
from models.token2wav.stream.windows import TokenWindows
from worker.config.session import SessionConfig
from worker.early.trial import EarlyTrial
from worker.loop.audio_buffer import AudioBuffer
from worker.loop.early.early_rows import EarlyRows
from worker.loop.order.unplayed_sound import UnplayedSound
from worker.loop.results import DecidedUnit, Event, Failure
from worker.loop.rounds import Rounds
from worker.loop.window import Drop, Rebuild, UnitRecord, UnitWindow

LOG = logging.getLogger(__name__)


class OrderError(ModelError, RuntimeError):
    """A session received an event that is not legal in its current phase."""


class SessionPhase(StrEnum):
    NEW = "new"
    READY = "ready"
    PREFILLED = "prefilled"  # a unit or reply is running
    GENERATED = "generated"  # its result is out, its context is not closed yet
    CLOSED = "closed"


class Gate(StrEnum):
    """Whether units are accepted. The phase changes independently of it."""

    OPEN = "open"
    PAUSED = "paused"
    STOPPED = "stopped"


# All legal transitions. Event -> phase it is legal in -> phase after it.
PHASES: dict[str, dict[SessionPhase, SessionPhase]] = {
    "prepare": {SessionPhase.NEW: SessionPhase.READY, SessionPhase.READY: SessionPhase.READY},
    "prefill": {SessionPhase.READY: SessionPhase.PREFILLED},
    "generate": {SessionPhase.PREFILLED: SessionPhase.GENERATED},
    "finalize": {SessionPhase.GENERATED: SessionPhase.READY},
    "fail": {SessionPhase.PREFILLED: SessionPhase.READY, SessionPhase.GENERATED: SessionPhase.READY},
    "reset": {phase: SessionPhase.NEW for phase in SessionPhase if phase is not SessionPhase.CLOSED},
    "close": {phase: SessionPhase.CLOSED for phase in SessionPhase if phase is not SessionPhase.CLOSED},
}
LIVE = frozenset({SessionPhase.READY, SessionPhase.PREFILLED, SessionPhase.GENERATED})
GATES: dict[str, dict[Gate, Gate]] = {
    "unit": {Gate.OPEN: Gate.OPEN},
    "text": {Gate.OPEN: Gate.OPEN, Gate.PAUSED: Gate.PAUSED},
    "prepare": {Gate.OPEN: Gate.OPEN},
    "pause": {Gate.OPEN: Gate.PAUSED},
    "resume": {Gate.PAUSED: Gate.OPEN},
    "stop": dict.fromkeys(Gate, Gate.STOPPED),
    "clear_stop": {Gate.STOPPED: Gate.OPEN},
}


@dataclass(eq=False)
class UnitInput:
    """One unit as the client sent it, checked and cut into patches.

    Args:
        sound: [n] float32 at 16 kHz or None.
        frames: slices of each image.
        force_listen: listen whatever the model decides.
        arrived: clock reading when the unit arrived.
        force_speak: speak whatever the model decides.
        close_early: complete sound that is too short for a unit with silence.
        early: the unit may run early; None: it may not.
        decided: the unit's decisions, which are replayed; None: the model decides.
        earlier: pieces of sound before it, which the client has had results for; they stay if the unit fails.
    """

    sound: np.ndarray | None
    frames: list[list[ImagePatches]]
    force_listen: bool
    arrived: float
    force_speak: bool = False
    close_early: bool = False
    early: EarlyTrial | None = None
    decided: DecidedUnit | None = None
    earlier: Sequence[np.ndarray] = ()


@dataclass(frozen=True)
class TextInput:
    """A text to insert between two units. ids: all its context rows. arrived: clock reading when it arrived."""

    ids: tuple[int, ...]
    arrived: float


@dataclass(eq=False)
class SpeechProgress:
    """A session's speech between units.

    Attributes:
        vocoder_slot: None without a voice.
        windows: cuts speech tokens into windows for the vocoder; None in a session without sound.
        is_on: the turn is spoken. A turn keeps it to its end, whatever happens to `generate_audio` meanwhile.
        draining: the turn's text has ended, its speech has not.
        n_drained: speech tokens drawn since the text ended.
        n_speech_tokens: speech tokens of this turn.
        unit_tokens: those of its last unit.
    """

    vocoder_slot: int | None = None
    windows: TokenWindows | None = None
    is_on: bool = False
    draining: bool = False
    n_drained: int = 0
    n_speech_tokens: int = 0
    unit_tokens: list[int] = field(default_factory=list)

    def begin_unit(self) -> None:
        """The next speech tokens are those of another unit."""
        self.unit_tokens.clear()

    def add(self, speech_tokens: Sequence[int]) -> None:
        """Add speech tokens to the turn."""
        self.n_speech_tokens += len(speech_tokens)
        self.unit_tokens.extend(speech_tokens)

    def count_drained(self, n: int) -> None:
        """Add `n` speech tokens drawn after the turn's text has ended."""
        self.n_drained += n

    def set_draining(self, draining: bool) -> None:
        self.draining = draining


@dataclass(eq=False)
class Session:
    """Host state of one session; its tensors are in the slot.

    Attributes:
        emit: receives the session's events; must return at once.
        speech: state of the speech between units.
        unplayed: what the client still has to play of the open turn.
        phase, gate: see `PHASES` and `GATES`.
        waiting: units and inserted texts that have not begun.
        pending: ids that close the last unit; they are fed in front of the next one.
        text_stream: decodes the open turn's tokens; None before the first one.
        turn_open: the model's turn goes on.
        n_turn_tokens: spoken text tokens of the open turn.
        is_turn_limited: `max_turn_tokens` has ended the text of the last turn.
        side_ids: ids of a span of the side lane that the last unit has left open; None: none.
        n_inserted: context rows fed for inserted texts since the last unit.
        interrupt_requested: stop speaking at the next token.
        n_decided: units that reached a decision.
        n_units: units or replies counted so far.
        seed: of its random numbers.
        n_unit_ids: units registered with the window.
        frames_waiting: images that wait for the sound of their unit.
        frames_ahead: images of a unit that has not been received.
        early_rows: rows of the next unit that are in the context; None: none.
        rounds: of a half-duplex conversation; None otherwise.
        closes_when_idle: close the session after its first reply.
    """

    id: str
    slot: int
    config: SessionConfig
    emit: Callable[[Event], None]
    audio_buffer: AudioBuffer
    window: UnitWindow
    speech: SpeechProgress = field(default_factory=SpeechProgress)
    unplayed: UnplayedSound = field(default_factory=UnplayedSound)
    phase: SessionPhase = SessionPhase.NEW
    gate: Gate = Gate.OPEN
    waiting: deque[UnitInput | TextInput] = field(default_factory=deque)
    pending: list[int] = field(default_factory=list)
    text_stream: TextStream | None = None
    turn_open: bool = False
    n_turn_tokens: int = 0
    is_turn_limited: bool = False
    side_ids: tuple[int, ...] | None = None
    n_inserted: int = 0
    interrupt_requested: bool = False
    n_decided: int = 0
    n_units: int = 0
    seed: int = 0
    n_unit_ids: int = 0
    frames_waiting: list[list[ImagePatches]] = field(default_factory=list)
    frames_ahead: list[list[ImagePatches]] = field(default_factory=list)
    early_rows: EarlyRows | None = None
    rounds: Rounds | None = None
    closes_when_idle: bool = False

    @property
    def reference(self) -> bool:
        """Whether the session reproduces the public implementation."""
        return self.config.compat == "reference"

    @property
    def waiting_s(self) -> float:
        """Seconds of sound in the units that wait."""
        units = (one for one in self.waiting if isinstance(one, UnitInput))
        return sum(len(unit.sound) for unit in units if unit.sound is not None) / SAMPLE_RATE

    @property
    def is_live(self) -> bool:
        """Whether the session is prepared and open."""
        return self.phase in LIVE

    @property
    def is_busy(self) -> bool:
        """Whether a unit or reply is in flight."""
        return self.phase in (SessionPhase.PREFILLED, SessionPhase.GENERATED)

    @property
    def is_speaking(self) -> bool:
        """Whether the model's turn goes on, in text or in speech that is left to draw."""
        return self.turn_open or self.speech.draining

    # --- events --------------------------------------------------------------------------------

    def send(self, event: Event) -> None:
        """Emit an event. An exception of the receiver is logged and does not propagate."""
        try:
            self.emit(event)
        except Exception:
            LOG.exception("session %s: its receiver failed on a %s", self.id, type(event).__name__)

    def drop_waiting(self, why: str) -> None:
        """Emit a failure for every waiting unit and text instead of running it."""
        while self.waiting:
            what = "a unit" if isinstance(self.waiting.popleft(), UnitInput) else "a text"
            error = OrderError(f"session {self.id}: {what} that waited", expected="its turn to come", got=why)
            self.send(Failure(self.id, self.n_units, error))

    # --- phase and gate ------------------------------------------------------------------------

    def move(self, event: str) -> None:
        """Change the phase. Raises: OrderError if the event is not legal in the current phase."""
        after = PHASES[event].get(self.phase)
        if after is None:
            raise self._order_error(event, [phase.value for phase in PHASES[event]], self.phase)
        self.phase = after
        if after is SessionPhase.NEW:
            self.gate = Gate.OPEN  # a new session has nothing to pause

    def move_gate(self, event: str) -> None:
        """Change whether units are accepted. Raises: OrderError if the event is not legal now."""
        if self.phase not in LIVE and event != "prepare":
            raise self._order_error(event, sorted(LIVE), self.phase)
        after = GATES[event].get(self.gate)
        if after is None:
            raise self._order_error(event, [gate.value for gate in GATES[event]], self.gate)
        self.gate = after

    def _order_error(self, event: str, legal: list[str], now: str) -> OrderError:
        return OrderError(f"session {self.id}: {event}", expected=f"a session that is {' or '.join(legal)}", got=now)

    # --- state between units -------------------------------------------------------------------

    def reset(self, config: SessionConfig, audio_buffer: AudioBuffer, window: UnitWindow) -> None:
        """Forget everything but the name, the slot, the voice, the phase and the gate."""
        self.drop_waiting("the session was prepared again")
        self.config, self.audio_buffer, self.window = config, audio_buffer, window
        self.pending, self.frames_waiting, self.text_stream, self.side_ids = [], [], None, None
        self.frames_ahead, self.early_rows = [], None
        self.turn_open = self.interrupt_requested = self.is_turn_limited = False
        self.n_decided = self.n_units = self.n_unit_ids = self.n_turn_tokens = self.n_inserted = 0

    def reconfigure(self, config: SessionConfig) -> None:
        """Replace the settings; the next unit uses them."""
        self.config = config

    def replace_window(self, window: UnitWindow) -> None:
        """Replace the window, as the prompt is exchanged."""
        self.window = window

    def restore(self, audio_buffer: AudioBuffer, text_stream: TextStream | None) -> None:
        """Put back copies taken before a unit that failed."""
        self.audio_buffer, self.text_stream = audio_buffer, text_stream

    def start_speech(self, speech: SpeechProgress) -> None:
        """Replace the state of the speech."""
        self.speech = speech

    def open_text_stream(self, stream: TextStream) -> TextStream:
        """Set the decoder of the turn's text. Returns: it."""
        self.text_stream = stream
        return stream

    def request_interrupt(self, on: bool = True) -> None:
        """Request the running or the next unit to stop speaking at its next token; off: cancel the request."""
        self.interrupt_requested = on

    def take_interrupt(self) -> bool:
        """Clear the request for an interrupt. Returns: whether there was one."""
        requested, self.interrupt_requested = self.interrupt_requested, False
        return requested

    def hold_frames(self, frames: list[list[ImagePatches]]) -> None:
        """Set the images that wait for the sound of their unit."""
        self.frames_waiting = frames

    def expect_frame(self, frame: list[ImagePatches]) -> None:
        """Remember an image of the next unit."""
        self.frames_ahead.append(frame)

    def forget_frames_ahead(self) -> None:
        """The unit of the images is received, or they are dropped."""
        self.frames_ahead = []

    @property
    def n_early_rows(self) -> int:
        """Rows of the next unit that are in the context."""
        return 0 if self.early_rows is None else len(self.early_rows.ids)

    def keep_early_rows(self, rows: EarlyRows | None) -> None:
        """Record which rows of the next unit are in the context."""
        self.early_rows = rows

    def take_early_rows(self) -> EarlyRows | None:
        """Forget the early rows: they are part of a unit or removed. Returns: them."""
        rows, self.early_rows = self.early_rows, None
        return rows

    def set_pending(self, ids: list[int]) -> None:
        """Set the ids that close the last unit."""
        self.pending = ids

    def count_units(self, n: int, turn_open: bool, n_turn_tokens: int = 0) -> None:
        """Count a decision that took `n` units.

        Args:
            turn_open: the model's turn goes on after it.
            n_turn_tokens: spoken text tokens of that turn.
        """
        self.n_units += n
        self.n_decided += 1
        self.turn_open, self.n_turn_tokens = turn_open, n_turn_tokens

    def keep_side(self, ids: Sequence[int] | None) -> None:
        """Keep a span of the side lane that goes on with the next unit; None: there is none."""
        self.side_ids = None if ids is None else tuple(ids)

    def set_turn_limited(self, is_limited: bool) -> None:
        """Record whether `max_turn_tokens` has ended the text of the last turn."""
        self.is_turn_limited = is_limited

    def count_inserted(self, n_rows: int) -> None:
        """Count context rows fed for an inserted text."""
        self.n_inserted += n_rows

    def take_inserted(self) -> int:
        """Forget the count of rows fed for inserted texts. Returns: it."""
        n_rows, self.n_inserted = self.n_inserted, 0
        return n_rows

    def number_units(self, n: int) -> None:
        """Set the number of units so far, of which some may not have been replayed."""
        self.n_units, self.n_decided = n, max(n, self.n_decided)

    def set_seed(self, seed: int) -> None:
        self.seed = seed

    def count_reply(self) -> None:
        self.n_units += 1

    def close_turn(self) -> None:
        """End the model's turn after its unit has been counted."""
        self.turn_open = self.is_turn_limited = False
        self.n_turn_tokens = 0

    def register_unit(
        self, n_rows: int, kind: str, ids: tuple[int, ...], text: str, is_listen: bool
    ) -> list[Drop | Rebuild]:
        """Register a unit of `n_rows` context rows with the window. Returns: evictions to apply, in order."""
        record = UnitRecord(self.n_unit_ids, n_rows, kind, ids, text, is_listen)
        self.n_unit_ids += 1
        return self.window.close_unit(record)

    # --- kinds of session ----------------------------------------------------------------------

    def keep_rounds(self, rounds: Rounds) -> None:
        """Make this a half-duplex conversation."""
        self.rounds = rounds

    def close_when_idle(self) -> None:
        """Close the session after the reply in flight."""
        self.closes_when_idle = True
