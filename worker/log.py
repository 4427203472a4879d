"""Logging of all programs: one line for each event on stderr, `HH:MM:SS LEVEL name | text`. Torch-free."""

import logging
import sys
import threading
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

from models.errors import SettingsError
from worker.key_text import scrubbed

LEVEL_VARIABLE = "DUOLOGUE_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
# Libraries that log every request, frame or kernel at INFO.
QUIET = ("asyncio", "fastapi", "filelock", "httpcore", "httpx", "multipart", "PIL", "torch", "uvicorn", "websockets")

MAX_LINE = 400  # characters of an error in one line

LOG = logging.getLogger(__name__)


class OneLine(logging.Formatter):
    """Writes each message on one line, with control characters escaped and keys left out.

    Only a traceback has several lines.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s | %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return scrubbed(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = "".join(one if one.isprintable() else _escaped(one) for one in record.message)
        return super().formatMessage(record)


def level_of(flag: str | None, environ: Mapping[str, str]) -> str:
    """The log level: the flag, else DUOLOGUE_LOG_LEVEL, else INFO. Raises: SettingsError for an unknown level."""
    level = flag or environ.get(LEVEL_VARIABLE) or "INFO"
    if level.upper() not in LEVELS:
        raise SettingsError("log level", expected=" or ".join(LEVELS), got=repr(level))
    return level.upper()


def set_up(level: str = "INFO", *, stream: TextIO | None = None) -> None:
    """Log to `stream`, or to stderr if it is None; a second call replaces the handlers of the first.

    Warnings and exceptions that end a thread or the program are logged too. A server with a logging setup of its own
    must be started without it (uvicorn: `log_config=None`).
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(OneLine())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.captureWarnings(True)
    threading.excepthook = _thread_died
    sys.excepthook = _program_died


def first_line(error: BaseException) -> str:
    """One line for an error: its type, and the first line of its text or, without text, where it was raised.

    A first line that ends with a colon is followed by the next one.
    """
    kind = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        frames = traceback.extract_tb(error.__traceback__)
        return f"{kind} at {frames[-1].filename}:{frames[-1].lineno}" if frames else kind
    n_leading = next((at for at, line in enumerate(lines) if not line.endswith(":")), 0)
    text = " ".join([f"{kind}:", *lines[: n_leading + 1]])
    return text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}..."


def _thread_died(died: threading.ExceptHookArgs) -> None:
    if died.exc_type is SystemExit:
        return
    name = died.thread.name if died.thread else "unknown"
    LOG.critical(
        "thread %s died", name, exc_info=(died.exc_type, died.exc_value or died.exc_type(), died.exc_traceback)
    )


def _program_died(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    LOG.critical("the program died", exc_info=(kind, error, trace))


def _escaped(one: str) -> str:
    return one.encode("unicode_escape").decode("ascii")
