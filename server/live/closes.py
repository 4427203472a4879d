"""How the gateway ends a connection: close code, reason, label of the metric, and the error before it."""

from typing import NamedTuple

from models.errors import SettingsError
from server.access.refusal import AccessRefusedError
from server.dispatch.missing_model import MissingModel
from worker.protocol.codes import TRY_AGAIN, CloseCode, ErrorCode
from worker.protocol.messages import Error

MISSING_MODEL_S = 10.0  # for which a request waits for a model that no worker serves


class SocketClose(NamedTuple):
    """How a connection ends. how: value of the metric's label. error: message sent before the close frame.

    retry_after_s: when the client may try again, if that is known.
    """

    code: int
    reason: str
    how: str
    error: Error | None = None
    retry_after_s: float | None = None


class SessionEnd(Exception):
    """The gateway ends the session."""

    def __init__(self, close: SocketClose):
        super().__init__(close.reason)
        self.close = close


CLIENT_GONE = SocketClose(CloseCode.NORMAL, "", "client gone")
CLOSED = SocketClose(CloseCode.NORMAL, "closed", "ended")  # by the message `close` of a streaming session
DRAINING = SocketClose(
    CloseCode.SERVICE_RESTART,
    "Shutting down",
    "draining",
    Error(error="The server is shutting down", code=ErrorCode.DRAINING),
)
CANCELLED = SocketClose(
    CloseCode.TRY_AGAIN_LATER,
    "Request cancelled",
    "cancelled",
    Error(error="Request cancelled", code=ErrorCode.CANCELLED),
)
ENDED = SocketClose(
    CloseCode.POLICY_VIOLATION,
    "Session ended",
    "cancelled",
    Error(error="The session was ended by the operator", code=ErrorCode.CANCELLED),
)
BUSY = SocketClose(
    CloseCode.TRY_AGAIN_LATER,
    "Busy",
    "queue full",
    Error(error="The server buffers too many requests", code=ErrorCode.QUEUE_FULL),
)
QUOTA_USED = SocketClose(
    CloseCode.POLICY_VIOLATION,
    "Quota used up",
    "limit",
    Error(error="The minutes of this key are used up for today", code=ErrorCode.LIMIT_REACHED),
)
RECLAIMED = SocketClose(
    CloseCode.TRY_AGAIN_LATER,
    "Slot reclaimed",
    "cancelled",
    Error(error="A session needs the slot", code=ErrorCode.BUSY),
)
REPLACED = SocketClose(CloseCode.REPLACED, "Replaced", "replaced")
RESUME_EXPIRED = SocketClose(CloseCode.NORMAL, "", "resume expired")  # the client has not come back
HANDED_OVER = SocketClose(CloseCode.SERVICE_RESTART, TRY_AGAIN, "handed over")  # its worker keeps it
TRY_RESUME_AGAIN = SocketClose(CloseCode.SERVICE_RESTART, TRY_AGAIN, "resume unsure")  # a worker does not answer
NO_REQUEST = SocketClose(CloseCode.POLICY_VIOLATION, "No request", "cancelled")


def queue_full(max_size: int) -> SocketClose:
    """The end of a session that found the queue full. max_size: number of tickets that may wait."""
    error = Error(error=f"Queue full ({max_size} requests)", code=ErrorCode.QUEUE_FULL)
    return SocketClose(CloseCode.TRY_AGAIN_LATER, "Queue full", "queue full", error)


def model_missing(missing: MissingModel) -> SocketClose:
    """The end of a request for a model that no worker serves."""
    error = Error(error=str(missing), code=ErrorCode.BUSY)
    return SocketClose(CloseCode.TRY_AGAIN_LATER, "No model", "no model", error, MISSING_MODEL_S)


def bad_labels(error: SettingsError) -> SocketClose:
    """The end of a connection whose address demands labels that cannot be read."""
    return SocketClose(CloseCode.POLICY_VIOLATION, "Bad labels", "bad labels", Error.of(error, ErrorCode.BAD_MESSAGE))


def labels_missing(labels: frozenset[str]) -> SocketClose:
    """The end of a session that needs a worker with labels that none has."""
    error = Error(error=f"labels: expected those of a worker, got {', '.join(sorted(labels))}", code=ErrorCode.BUSY)
    return SocketClose(CloseCode.TRY_AGAIN_LATER, "No such worker", "no such worker", error, MISSING_MODEL_S)


def limit_close(error: AccessRefusedError) -> SocketClose:
    """The end of a session that a limit of its client does not allow."""
    message = Error(error=str(error), code=ErrorCode.LIMIT_REACHED)
    return SocketClose(CloseCode.TRY_AGAIN_LATER, "Limit reached", "limit", message, error.retry_after_s)


def resume_refused(error: Exception) -> SocketClose:
    """The end of a connection that continues no session."""
    message = Error.of(error, ErrorCode.RESUME_REFUSED)
    return SocketClose(CloseCode.POLICY_VIOLATION, "Resume refused", "resume refused", message)


def worker_lost(error: Exception) -> SocketClose:
    message = Error(error=f"The worker was lost: {error}", code=ErrorCode.WORKER_LOST)
    return SocketClose(CloseCode.INTERNAL_ERROR, "Worker lost", "worker lost", message)


def internal_error(error: Exception) -> SocketClose:
    return SocketClose(CloseCode.INTERNAL_ERROR, "Internal error", "internal", Error.of(error, ErrorCode.INTERNAL))
