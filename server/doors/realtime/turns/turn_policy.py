"""Which units listen and which speak: a state machine between the client's settings and the model's decisions.

Contains no I/O, no clock and no events.
"""

import math
from dataclasses import dataclass

from server.doors.realtime.session_config import TurnDetection

# Factor on the odds of listening.
LISTEN_SCALE = {"low": 2.0, "medium": 1.0, "auto": 1.0, "high": 0.5}
# Units after the user's turn in which the model may wait; `auto` leaves the model untouched.
PATIENCE = {"low": 8, "medium": 4, "high": 2}
IMPATIENCE = 0.5  # further factor after them


@dataclass(frozen=True)
class UnitDecision:
    """What the session demands of a unit; neither: the model decides."""

    force_listen: bool = False
    force_speak: bool = False


class TurnPolicy:
    """The demands on units.

    Attributes:
        detection: settings in force.
        is_asked: the client has asked for a response that has not been begun by a unit.
        is_turn_open: the model's turn goes on after the last finished unit.
    """

    def __init__(self, detection: TurnDetection):
        self.detection = detection
        self.is_asked = self.is_turn_open = False
        self._is_expected = False  # the user's turn has ended under server_vad
        self._is_cut = False
        self._n_before = 0  # units that are heard before the one that answers
        self._n_waited: int | None = None  # units since the user's turn that is not answered; None: there is none

    def ask(self, n_waiting: int = 0) -> None:
        """The client asks for a response. n_waiting: units of its sound that wait, all of which are heard before."""
        self.is_asked, self._n_before = True, max(0, n_waiting - 1)

    def end_user_turn(self, n_waiting: int = 0) -> None:
        """The detector has heard enough silence after speech. n_waiting: as in `ask`."""
        self._n_waited = 0
        if self.detection.type == "server_vad" and self.detection.create_response:
            self._is_expected, self._n_before = True, max(0, n_waiting - 1)

    def begin_user_turn(self) -> None:
        """The user speaks again: the answer to the turn before is not owed any more."""
        self._is_expected, self._n_waited = False, None

    def begin_response(self) -> None:
        """The model answers."""
        self.is_asked = self._is_expected = False
        self._n_waited = None

    def cut(self, *, is_running: bool) -> None:
        """A response is cancelled. is_running: a unit runs or the model's turn is open, so the next unit ends it."""
        self._is_cut = is_running
        self.is_asked = self._is_expected = False

    @property
    def is_answer_due(self) -> bool:
        """A unit is wanted now, without waiting for the rest of its sound."""
        return self.is_asked or (self._is_expected and not self.is_turn_open)

    @property
    def is_free(self) -> bool:
        """Whether the model decides about the next unit, between its turns."""
        is_bound = self._is_cut or self.is_turn_open or self.is_answer_due
        return self.detection.create_response and not is_bound

    @property
    def listen_scale(self) -> float:
        """Factor on the odds of listening in the next unit."""
        eagerness = self.detection.eagerness
        is_over = self._n_waited is not None and self._n_waited >= PATIENCE.get(eagerness, math.inf)
        return LISTEN_SCALE[eagerness] * (IMPATIENCE if is_over else 1.0)

    def next_unit(self, *, is_responding: bool, n_waiting: int = 0) -> UnitDecision:
        """The demand on the unit that goes to the worker now.

        Args:
            is_responding: a response has content already.
            n_waiting: units that wait after this one.
        """
        if self._is_cut:
            self._is_cut = False
            if self.is_turn_open or not self.is_asked:
                return UnitDecision(force_listen=True)
        if self.is_asked or (self._is_expected and not self.is_turn_open):
            self._n_before = min(self._n_before, n_waiting)
            if self._n_before:
                self._n_before -= 1
                return UnitDecision(force_listen=True)
            self.is_asked = self._is_expected = False
            return UnitDecision(force_speak=True)
        self._is_expected = False
        if not self.detection.create_response and not is_responding:
            return UnitDecision(force_listen=True)
        return UnitDecision()

    def record_result(self, *, is_listen: bool, end_of_turn: bool) -> None:
        """A unit is finished."""
        self.is_turn_open = not is_listen and not end_of_turn
        if self._n_waited is not None:
            self._n_waited += 1
