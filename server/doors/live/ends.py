"""How Realtime sessions end: close code, reason, label of the metric, and the error before it."""

from typing import NamedTuple

from server.doors.live.event_error import EventError
from worker.protocol.codes import CloseCode

MAX_FRAME = 32 * 2**20  # bytes of one event
SESSION_S = 3600
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
EXPIRED = DoorEnd(
    CloseCode.NORMAL,
    "session_expired",
    "ended",
    EventError("session_expired", f"The session has reached its limit of {SESSION_S // 60} minutes"),
)
DRAINED = DoorEnd(GOING_AWAY, "Shutting down", "draining")
FRAME_TOO_BIG = DoorEnd(TOO_BIG, f"expected at most {MAX_FRAME} bytes", "ended")
WORKER_LOST = DoorEnd(CloseCode.INTERNAL_ERROR, "Worker lost", "worker lost")
OVERLOADED = DoorEnd(CloseCode.TRY_AGAIN_LATER, "Overloaded", "queue full")
INTERNAL = DoorEnd(CloseCode.INTERNAL_ERROR, "Internal error", "internal")
