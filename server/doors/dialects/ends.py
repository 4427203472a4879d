"""How sessions of the dialects end. The reason is that of `session.closed`."""

from server.doors.core.event_writer import ClientGoneError
from server.doors.live.ends import GOING_AWAY, GONE, MAX_FRAME, TOO_BIG, DoorEnd, SessionOverError
from server.doors.live.event_error import EventError
from server.live.closes import SessionEnd, SocketClose
from server.live.worker_link import WorkerLostError
from worker.protocol.codes import CloseCode, ErrorCode
from worker.protocol.messages import Error

SERVER_ERROR = "server_error"
STOPPED = DoorEnd(CloseCode.NORMAL, "stopped", "ended")
CLIENT_CLOSE = DoorEnd(CloseCode.NORMAL, "client_close", "ended")
TIMEOUT = DoorEnd(CloseCode.NORMAL, "timeout", "ended")
CONNECTION_LOST = DoorEnd(CloseCode.NORMAL, "disconnect_grace_expired", "client gone")
CONTEXT_FULL = DoorEnd(CloseCode.NORMAL, "context_full", "ended")
SHUTDOWN = DoorEnd(GOING_AWAY, "server_shutdown", "draining")
WORKER_LOST = DoorEnd(
    CloseCode.INTERNAL_ERROR,
    "error",
    "worker lost",
    EventError(ErrorCode.WORKER_LOST, "The worker was lost, and the conversation with it", type=SERVER_ERROR),
)
FRAME_TOO_BIG = DoorEnd(
    TOO_BIG, "error", "ended", EventError(ErrorCode.TOO_LARGE, f"message: expected at most {MAX_FRAME} bytes, got more")
)
INTERNAL = DoorEnd(
    CloseCode.INTERNAL_ERROR,
    "error",
    "internal",
    EventError(ErrorCode.INTERNAL, "Internal server error", type=SERVER_ERROR),
)


def refused_context(error: Error) -> DoorEnd:
    """The end of a session whose context the worker refuses."""
    return DoorEnd(CloseCode.INTERNAL_ERROR, "error", "internal", EventError(str(error.code), error.error))


def end_of(close: SocketClose) -> DoorEnd:
    """The end of a session that the gateway ends."""
    if close.how == SHUTDOWN.how:
        return SHUTDOWN
    error = EventError(ErrorCode.CANCELLED, close.reason, type=SERVER_ERROR)
    if close.error is not None:
        error = EventError(str(close.error.code), close.error.error, type=SERVER_ERROR)
    return DoorEnd(close.code, "error", close.how, error)


def end_of_errors(errors: BaseExceptionGroup[BaseException]) -> DoorEnd | None:
    """The end for the first known error in nested groups; None if there is none."""
    for error in errors.exceptions:
        match error:
            case SessionOverError():
                return error.end
            case SessionEnd():
                return end_of(error.close)
            case WorkerLostError():
                return WORKER_LOST
            case ClientGoneError():
                return GONE
            case BaseExceptionGroup() if (end := end_of_errors(error)) is not None:
                return end
    return None
