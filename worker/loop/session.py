"""One conversation's life: which order of events is legal, and what the host remembers of it. Torch-free.

Knows states, not how a unit is computed. Touched by the engine thread only.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from models.errors import ModelError
from models.inputs.audio_sizes import SAMPLE_RATE
from worker.config.session import SessionConfig
from worker.loop.audio_buffer import AudioBuffer
from worker.loop.results import Event, Failure
from worker.loop.window import UnitWindow

LOG = logging.getLogger(__name__)


class OrderError(ModelError, RuntimeError):
    """A session was asked for something that is not its turn."""


class Phase(StrEnum):
    NEW = "new"
    READY = "ready"
    PREFILLED = "prefilled"  # a unit or answer is running
    GENERATED = "generated"  # its result is out, its context not closed yet
    CLOSED = "closed"


class Gate(StrEnum):
    """Whether units are taken; the phase goes on underneath."""

    OPEN = "open"
    PAUSED = "paused"
    STOPPED = "stopped"


# The whole law. Event -> phase it is legal in -> phase after it.
PHASES: dict[str, dict[Phase, Phase]] = {
    "prepare": {Phase.NEW: Phase.READY, Phase.READY: Phase.READY},
    "prefill": {Phase.READY: Phase.PREFILLED},
    "generate": {Phase.PREFILLED: Phase.GENERATED},
    "finalize": {Phase.GENERATED: Phase.READY},
    "fail": {Phase.PREFILLED: Phase.READY, Phase.GENERATED: Phase.READY},
    "reset": {phase: Phase.NEW for phase in Phase if phase is not Phase.CLOSED},
    "close": {phase: Phase.CLOSED for phase in Phase if phase is not Phase.CLOSED},
}
LIVE = frozenset({Phase.READY, Phase.PREFILLED, Phase.GENERATED})
GATES: dict[str, dict[Gate, Gate]] = {
    "unit": {Gate.OPEN: Gate.OPEN},
    "prepare": {Gate.OPEN: Gate.OPEN},
    "pause": {Gate.OPEN: Gate.PAUSED},
    "resume": {Gate.PAUSED: Gate.OPEN},
    "stop": dict.fromkeys(Gate, Gate.STOPPED),
    "clear_stop": {Gate.STOPPED: Gate.OPEN},
}


@dataclass(eq=False)
class UnitInput:
    """One unit as a client sent it, checked and cut into patches.

    sound: [n] float32 at 16 kHz or None. frames: slices of each picture (`models.inputs.image.ImagePatches`).
    """

    sound: np.ndarray | None
    frames: list[list[Any]]
    force_listen: bool
    arrived: float


@dataclass(eq=False)
class SpeechProgress:
    """A session's speech between units.

    slot: the vocoder's, None without a voice. windows: codes on their way to it. draining: the turn's text has ended,
    its speech has not. n_drained: codes drawn since. n_codes: codes of this turn.
    """

    slot: int | None = None
    windows: Any = None
    draining: bool = False
    n_drained: int = 0
    n_speech_tokens: int = 0


@dataclass(eq=False)
class Session:
    """What the host remembers; the tensors are in the slot.

    pending: ids that close the last unit and are fed in front of the next one. turn_open: the model is speaking.
    n_decided: units that reached a decision. n_units: units heard. break_asked: stop speaking at the next token.
    n_unit_ids: units registered, for the window's records. frames_waiting: pictures that wait for the sound of their
    unit. rounds: `worker.chat.rounds.Rounds` of a half-duplex conversation. ends_itself: it closes behind its first
    answer.
    """

    id: str
    slot: int
    config: SessionConfig
    emit: Callable[[Event], None]
    audio_buffer: AudioBuffer
    window: UnitWindow
    voice: SpeechProgress = field(default_factory=SpeechProgress)
    phase: Phase = Phase.NEW
    gate: Gate = Gate.OPEN
    waiting: deque[Any] = field(default_factory=deque)
    pending: list[int] = field(default_factory=list)
    text: Any = None  # TextStream of the open turn
    turn_open: bool = False
    break_asked: bool = False
    n_decided: int = 0
    n_units: int = 0
    n_unit_ids: int = 0
    frames_waiting: list[list[Any]] = field(default_factory=list)
    rounds: Any = None
    ends_itself: bool = False

    @property
    def reference(self) -> bool:
        return self.config.compat == "reference"

    @property
    def waiting_s(self) -> float:
        """Seconds of sound in units that wait."""
        return sum(len(unit.sound) for unit in self.waiting if unit.sound is not None) / SAMPLE_RATE

    @property
    def is_live(self) -> bool:
        return self.phase in LIVE

    @property
    def is_busy(self) -> bool:
        return self.phase in (Phase.PREFILLED, Phase.GENERATED)

    def drop_waiting(self, why: str) -> None:
        """What waits is never run; its sender hears of it."""
        while self.waiting:
            self.waiting.popleft()
            error = OrderError(f"session {self.id}: a unit that waited", expected="its turn to come", got=why)
            self.tell(Failure(self.id, self.n_units, error))

    def tell(self, event: Event) -> None:
        """Hand an event out; what the receiver raises is logged and harms nobody."""
        try:
            self.emit(event)
        except Exception:
            LOG.exception("session %s: its receiver failed on a %s", self.id, type(event).__name__)

    def renew(self, config: SessionConfig, audio_buffer: AudioBuffer, window: UnitWindow) -> None:
        """Forget everything but the name, the slot, the voice and what state it is in."""
        self.drop_waiting("the session was prepared anew")
        self.config, self.audio_buffer, self.window = config, audio_buffer, window
        self.pending, self.frames_waiting, self.text = [], [], None
        self.turn_open = self.break_asked = False
        self.n_decided = self.n_units = self.n_unit_ids = 0

    def move(self, event: str) -> None:
        """Change the phase. Raises: OrderError if the event is not legal now."""
        after = PHASES[event].get(self.phase)
        if after is None:
            raise self._wrong(event, [phase.value for phase in PHASES[event]], self.phase)
        self.phase = after
        if after is Phase.NEW:
            self.gate = Gate.OPEN  # there is nothing left to pause

    def turn_gate(self, event: str) -> None:
        """Change whether units are taken. Raises: OrderError if the event is not legal now."""
        if self.phase not in LIVE and event != "prepare":
            raise self._wrong(event, sorted(LIVE), self.phase)
        after = GATES[event].get(self.gate)
        if after is None:
            raise self._wrong(event, [gate.value for gate in GATES[event]], self.gate)
        self.gate = after

    def _wrong(self, event: str, legal: list[str], now: str) -> OrderError:
        return OrderError(f"session {self.id}: {event}", expected=f"a session that is {' or '.join(legal)}", got=now)
