"""Logging of all programs: one line an event on stderr, `HH:MM:SS LEVEL name | text`. Torch-free.

Knows handlers and hooks; does not know what is logged.
"""

import logging
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

from models.errors import SettingsError

LEVEL_VARIABLE = "DUOLOGUE_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
# Libraries that tell at INFO of every request, frame or kernel.
QUIET = ("asyncio", "fastapi", "filelock", "httpcore", "httpx", "multipart", "PIL", "torch", "uvicorn", "websockets")

LOG = logging.getLogger(__name__)


class OneLine(logging.Formatter):
    """A message never starts a second line, whatever a client put into it; only a traceback has more of them."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s | %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = "".join(one if one.isprintable() else _escaped(one) for one in record.message)
        return super().formatMessage(record)


def level_of(flag: str | None, environ: Mapping[str, str]) -> str:
    """The level asked for: the flag, else DUOLOGUE_LOG_LEVEL, else INFO. Raises: SettingsError for no such level."""
    asked = flag or environ.get(LEVEL_VARIABLE) or "INFO"
    if asked.upper() not in LEVELS:
        raise SettingsError("log level", expected=" or ".join(LEVELS), got=repr(asked))
    return asked.upper()


def set_up(level: str = "INFO", *, stream: TextIO | None = None) -> None:
    """Log to `stream`, stderr if None; doing it again replaces what was set up before.

    Warnings and exceptions that end a thread or the program are logged too. Servers that bring a logging setup of
    their own are to be started without it (uvicorn: `log_config=None`).
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(OneLine())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.captureWarnings(True)
    threading.excepthook = _thread_died
    sys.excepthook = _program_died


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
