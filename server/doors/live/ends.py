"""How Realtime sessions end: close code, reason, label of the metric, and the error before it."""

from typing import NamedTuple

from server.doors.live.event_error import EventError
from server.live.closes import SocketClose
from worker.protocol.codes import CloseCode, ErrorCode

MAX_FRAME = 32 * 2**20  # bytes of one event
GOING_AWAY, TOO_BIG = 1001, 1009


class DoorEnd(NamedTuple):
    """How a connection ends. how: value of the metric's label. error: sent before the close frame."""

    code: int
    reason: str
    how: str
    error: EventError | None = None


class SessionOverError(Exception):
    """The session is over."""

    def __init__(self, end: DoorEnd):
        super().__init__(end.reason)
        self.end = end


GONE = DoorEnd(CloseCode.NORMAL, "", "client gone")
IDLE = DoorEnd(CloseCode.NORMAL, "idle", "ended")
DRAINED = DoorEnd(GOING_AWAY, "Shutting down", "draining")
FRAME_TOO_BIG = DoorEnd(TOO_BIG, f"expected at most {MAX_FRAME} bytes", "ended")
WORKER_LOST = DoorEnd(CloseCode.INTERNAL_ERROR, "Worker lost", "worker lost")
OVERLOADED = DoorEnd(CloseCode.TRY_AGAIN_LATER, "Overloaded", "queue full")
INTERNAL = DoorEnd(CloseCode.INTERNAL_ERROR, "Internal error", "internal")


def expired(session_s: float) -> DoorEnd:
    """The end of a session that has reached its limit. session_s: the limit."""
    error = EventError("session_expired", f"The session has reached its limit of {session_s / 60:g} minutes")
    return DoorEnd(CloseCode.NORMAL, "session_expired", "ended", error)


def invalid_settings(error: EventError) -> DoorEnd:
    """The end of a session that cannot begin. error: about its settings."""
    return DoorEnd(CloseCode.POLICY_VIOLATION, "invalid settings", "cancelled", error)


def end_of(close: SocketClose) -> DoorEnd:
    """The end of a session that the gateway ends. Its error has no code at which stock clients stop."""
    if close.how == DRAINED.how:
        return DRAINED
    error = None
    if close.error is not None and close.error.code == ErrorCode.LIMIT_REACHED:
        error = EventError("rate_limit_exceeded", close.error.error, type="rate_limit_error")
    elif close.error is not None:
        error = EventError(str(close.error.code), close.error.error, type="server_error")
    return DoorEnd(close.code, close.reason, close.how, error)
