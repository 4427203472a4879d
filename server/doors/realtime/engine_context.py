"""The model's context of a duplex session: its settings, the texts that wait for it, and its length."""

import logging
from collections import deque

from server.doors.core.unit_session import UnitSession
from server.doors.live.event_error import EventError
from server.doors.realtime.engine_settings import EngineSettings
from server.doors.realtime.lane_host import LaneHost
from server.doors.realtime.responses import context_full
from server.doors.realtime.turns.turn_policy import TurnPolicy
from worker.protocol.adjust_messages import Adjust
from worker.protocol.codec import FromClient
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import MAX_PAUSE_S, Error, Pause, Prepare, Prepared, Result, ServerMessage
from worker.protocol.text_messages import InsertText, TextInserted

LOG = logging.getLogger(__name__)
# Errors of the worker that the client has caused, and their codes in the API.
CLIENT_CODES = {
    ErrorCode.CONTEXT_FULL: "context_length_exceeded",
    ErrorCode.BAD_CONFIG: "invalid_value",
    ErrorCode.BAD_AUDIO: "invalid_value",
}


class EngineContext:
    """The context on a worker, and the errors about it.

    Args:
        host: the session.
        policy: the demands on the next unit.
    """

    def __init__(self, host: LaneHost, policy: TurnPolicy):
        self._host, self._policy = host, policy
        self.units: UnitSession | None = None
        self._applied: EngineSettings | None = None  # None: the context is not prepared
        self._refused: EngineSettings | None = None  # by the worker; `_refusal` has the reason
        self._refusal = ""
        self._is_begun = False  # the client has sent something that needs a context
        self._texts: deque[InsertText] = deque()
        self._n_rows = 0

    def _settings(self) -> EngineSettings:
        """What the next unit needs."""
        return self._host.engine_settings(self._policy.listen_scale, self.has_side_lane)

    def attach(self, units: UnitSession, history: list[InsertText]) -> None:
        """Use this session of a worker from now on. history: texts that its context begins with."""
        self.units, self._applied, self._refused, self._n_rows = units, None, None, 0
        if history:  # it includes the texts that were not sent
            self._texts = deque(history)
        if self._is_begun:
            self.begin()

    def begin(self) -> None:
        """Prepare the context, once the client has had the chance to configure the session."""
        self._is_begun = True
        if self._applied is not None or self.units is None:
            return
        wanted = self._settings()
        if wanted != self._refused:  # the same settings would be refused again
            self._applied = wanted
            self.units.send(wanted.prepare())

    def add_text(self, text: InsertText) -> None:
        """Insert a text before the next unit."""
        self._texts.append(text)

    def send_texts(self) -> None:
        """Send the texts that wait."""
        while self._texts and self.units is not None:
            self.units.send(self._texts.popleft())

    def update(self) -> None:
        """Send the settings of the next unit, if they have changed."""
        assert self.units is not None and self._applied is not None, "expected a prepared context"
        wanted = self._settings()
        if (change := wanted.adjust_from(self._applied)) is not None:
            self.units.send(change)
            self._applied = wanted

    def rest(self) -> None:
        """Pause the session on the worker, so that it is not ended as idle."""
        if self.units is not None and not self.units.is_paused:
            self.units.send(Pause(timeout=MAX_PAUSE_S))

    @property
    def has_side_lane(self) -> bool:
        """Whether the model calls functions beside its speech."""
        return self.units is not None and self.units.has_side_lane

    @property
    def is_prepared(self) -> bool:
        return self.units is not None and self._applied is not None

    @property
    def early_units(self) -> UnitSession | None:
        """The worker's session, if its next unit may run before its second is full."""
        return self.units if self.is_prepared and self.units and self.units.runs_early and not self.is_full else None

    @property
    def is_full(self) -> bool:
        """Whether a further unit might not fit, although no unit may leave the context."""
        if self._applied is None or self._applied.max_rows is None or self._n_rows <= self._applied.max_rows:
            return False
        most = self._settings().max_rows  # they may have changed since the last unit
        return most is not None and self._n_rows > most

    @property
    def refusal(self) -> EventError | None:
        """Why no unit can run until the client changes its settings; None: one can."""
        if self.is_full:
            return context_full()
        if self._refused is None or self._applied is not None or self._settings() != self._refused:
            return None
        return EventError("invalid_value", self._refusal, "session")

    def record(self, result: Result) -> None:
        """A unit is in the context."""
        self._n_rows = result.kv_cache_length

    def on_answer(self, request: FromClient, answer: ServerMessage) -> None:
        """Handle the answer to a message that is no unit."""
        if isinstance(answer, Prepared):
            self._n_rows = 0
        elif isinstance(answer, TextInserted):
            self._n_rows += answer.n_rows
        elif isinstance(answer, Error):
            self._on_refusal(request, answer)

    def _on_refusal(self, request: FromClient, answer: Error) -> None:
        LOG.warning("%s was refused: %s", request.type, answer.code)
        code = next((word for known, word in CLIENT_CODES.items() if known == answer.code), None)
        if isinstance(request, Prepare):
            self._refused, self._refusal = None if code is None else self._applied, answer.error
            self._applied = None
        if code is not None and isinstance(request, Prepare | Adjust | InsertText):
            self._host.report(EventError(code, answer.error, "item" if isinstance(request, InsertText) else "session"))
