"""The codes of the protocol: of errors, of close frames and their reasons. Torch-free."""

from enum import IntEnum, StrEnum


class ErrorCode(StrEnum):
    """The `code` of an `error` message, for programs; the text beside it is for people."""

    BAD_JSON = "bad_json"
    BAD_MESSAGE = "bad_message"
    UNKNOWN_TYPE = "unknown_type"
    MISSING_AUDIO = "missing_audio"
    BAD_BASE64 = "bad_base64"
    BAD_AUDIO = "bad_audio"
    BAD_IMAGE = "bad_image"
    BAD_VIDEO = "bad_video"
    BAD_CONFIG = "bad_config"
    NOT_PREPARED = "not_prepared"
    PAUSED = "paused"
    TOO_LARGE = "too_large"
    BINARY_NOT_AGREED = "binary_not_agreed"
    BACKLOG_FULL = "backlog_full"
    BUSY = "busy"
    DRAINING = "draining"
    CONTEXT_FULL = "context_full"
    ENGINE = "engine"
    INTERNAL = "internal"
    WORKER_LOST = "worker_lost"
    QUEUE_FULL = "queue_full"
    LIMIT_REACHED = "limit_reached"
    CANCELLED = "cancelled"
    RESUME_REFUSED = "resume_refused"
    QUARANTINED = "quarantined"


class CloseCode(IntEnum):
    """The WebSocket close codes in use (RFC 6455, section 7.4, the IANA registry, and 4001 of this protocol)."""

    NORMAL = 1000
    GOING_AWAY = 1001
    NO_STATUS = 1005  # never sent: the close frame had no code
    ABNORMAL = 1006  # never sent: the connection ended without a close frame
    POLICY_VIOLATION = 1008
    INTERNAL_ERROR = 1011
    SERVICE_RESTART = 1012
    TRY_AGAIN_LATER = 1013
    REPLACED = 4001  # to a client whose session goes on over another connection


TRY_AGAIN = "Try again"  # reason of a gateway's 1012: the session goes on over another connection


class CloseReason(StrEnum):
    """The reason in a worker's close frame."""

    STOPPED = "stopped"
    DONE = "done"
    REFUSED = "refused"
    PAUSE = "Pause timeout"
    IDLE = "Idle timeout"
    SESSION = "Session timeout"
    ENGINE = "engine"
    DRAINING = "draining"
    TAKEN = "taken over"
