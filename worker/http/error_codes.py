"""The protocol's error code for an exception, and the error for a message that comes at a wrong time."""

from models.errors import (
    AudioError,
    ContextOverflowError,
    ImageError,
    MessageError,
    ModelError,
    SettingsError,
    SlotError,
    TokenError,
)
from worker.engine_thread import EngineError
from worker.loop.session import OrderError
from worker.media import MediaError
from worker.protocol.codes import ErrorCode
from worker.protocol.wire import WireError
from worker.status import StateError

CODES: tuple[tuple[type[Exception], ErrorCode], ...] = (
    (SettingsError, ErrorCode.BAD_CONFIG),
    (AudioError, ErrorCode.BAD_AUDIO),
    (ImageError, ErrorCode.BAD_IMAGE),
    (MediaError, ErrorCode.BAD_VIDEO),
    (MessageError, ErrorCode.BAD_MESSAGE),
    (TokenError, ErrorCode.BAD_MESSAGE),
    (ContextOverflowError, ErrorCode.CONTEXT_FULL),
    (SlotError, ErrorCode.BUSY),
    (OrderError, ErrorCode.NOT_PREPARED),
    (StateError, ErrorCode.BUSY),
    (EngineError, ErrorCode.ENGINE),
    (ModelError, ErrorCode.ENGINE),
)


def code_of(error: Exception) -> ErrorCode:
    """The code of an exception; INTERNAL for an unexpected one."""
    if isinstance(error, WireError):
        return error.code
    return next((code for kind, code in CODES if isinstance(error, kind)), ErrorCode.INTERNAL)


def not_now(
    code: ErrorCode,
    text: str,
    what: str = "audio_chunk",
    expected: str = "a prepared session that is not paused",
) -> WireError:
    """The error for a message that is refused; clients match `text`."""
    return WireError(code, what, expected=expected, got=code, text=text)
