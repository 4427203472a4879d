"""Log lines: format, levels, silenced loggers, and exceptions that end a thread or the program."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from models.errors import SettingsError
from worker.log import QUIET, OneLine, level_of

LINE = re.compile(r"^\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\S+) \| (.*)$")


def run(root: Path, body: str) -> tuple[int, list[str]]:
    """Exit status and stderr of a small program that logs."""
    code = f"import logging, sys, threading, warnings\nfrom worker import log\n{body}\nsys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    assert not done.stdout, f"expected nothing on stdout, got {done.stdout!r}"
    return done.returncode, done.stderr.splitlines()


def events(lines: list[str]) -> list[tuple[str, ...]]:
    """(level, name, text) of the lines that are events."""
    return [found.groups() for line in lines if (found := LINE.match(line))]


def formatted(message: str, *args: object) -> str:
    return OneLine().format(logging.LogRecord("worker.unit", logging.INFO, "file", 1, message, args, None))


def test_writes_one_line_per_event() -> None:
    assert LINE.match(formatted("unit %d/%d", 3, 10)).groups() == ("INFO", "worker.unit", "unit 3/10")  # type: ignore[union-attr]
    text = formatted("session %s", "x\n12:00:00 ERROR fake | \x1b[31mred\r\u2028\ud800 你好")
    assert len(text.splitlines()) == 1, text
    assert text.endswith(r"session x\n12:00:00 ERROR fake | \x1b[31mred\r\u2028\ud800 你好"), text


def test_levels_and_quiet_libraries(root: Path) -> None:
    rc, lines = run(
        root,
        "log.set_up('INFO')\n"
        "for name in ('worker.a', 'httpx', 'uvicorn.access', 'websockets.server'):\n"
        "    for level in (10, 20, 30): logging.getLogger(name).log(level, 'at %d', level)\n"
        "warnings.warn('odd')",
    )
    assert rc == 0, (rc, lines)
    got = events(lines)
    assert got[:5] == [
        ("INFO", "worker.a", "at 20"),
        ("WARNING", "worker.a", "at 30"),
        ("WARNING", "httpx", "at 30"),
        ("WARNING", "uvicorn.access", "at 30"),
        ("WARNING", "websockets.server", "at 30"),
    ], got
    assert got[5][:2] == ("WARNING", "py.warnings") and "odd" in got[5][2] and len(lines) == 6, lines


def test_quiet_libraries_are_no_louder_than_the_rest(root: Path) -> None:
    _, lines = run(root, f"log.set_up('ERROR')\nfor name in {QUIET}: logging.getLogger(name).warning('w')")
    assert not lines, lines


def test_second_set_up_replaces_the_first(root: Path) -> None:
    _, lines = run(root, "log.set_up(); log.set_up('DEBUG'); logging.getLogger('x').debug('once')")
    assert events(lines) == [("DEBUG", "x", "once")] and len(lines) == 1, lines


def test_logs_what_ends_a_thread_or_the_program(root: Path) -> None:
    rc, lines = run(
        root,
        "log.set_up()\n"
        "def quits(): raise SystemExit\n"
        "def dies(): raise ValueError('of this')\n"
        "for target in (quits, dies):\n"
        "    thread = threading.Thread(target=target, name=target.__name__); thread.start(); thread.join()\n"
        "raise KeyError('and that')",
    )
    assert rc == 1, rc
    assert events(lines) == [
        ("CRITICAL", "worker.log", "thread dies died"),
        ("CRITICAL", "worker.log", "the program died"),
    ], lines
    assert "ValueError: of this" in lines and "KeyError: 'and that'" in lines, lines


def test_does_not_log_an_interrupt(root: Path) -> None:
    _, lines = run(root, "log.set_up()\nraise KeyboardInterrupt")
    assert not events(lines) and lines[-1] == "KeyboardInterrupt", lines


@pytest.mark.parametrize(
    ("flag", "variable", "expected"),
    [
        (None, None, "INFO"),
        (None, "debug", "DEBUG"),
        ("warning", "debug", "WARNING"),
        (None, "", "INFO"),
    ],
)
def test_level_from_flag_or_environment(flag: str | None, variable: str | None, expected: str) -> None:
    environ = {} if variable is None else {"DUOLOGUE_LOG_LEVEL": variable}
    assert level_of(flag, environ) == expected


def test_refuses_unknown_levels() -> None:
    with pytest.raises(SettingsError) as caught:
        level_of(None, {"DUOLOGUE_LOG_LEVEL": "loud"})
    assert str(caught.value) == "log level: expected DEBUG or INFO or WARNING or ERROR, got 'loud'"
