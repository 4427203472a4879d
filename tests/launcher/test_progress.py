"""/health as text, the status display on a terminal and elsewhere, and the last message of a log."""

import io
import re

import pytest

from launcher.managed_process import describe_exit, last_message
from launcher.progress import LiveLine, StatusDisplay, ready_text, starting_line, totals_text
from worker.compile.cache import CacheReport, CacheState
from worker.status import START


def body(state: str, what: str = "", done: int = 0, total: int = 0) -> dict:
    return {"state": state, "progress": {"what": what, "done": done, "total": total, "seconds": 1.0}}


def test_starting_line_shows_stage_time_and_progress() -> None:
    assert starting_line("worker 0", None, 3.21).text == "worker 0  starting    3.2 s"
    got = starting_line("worker 0", body("COMPILING", "llm.model", 3, 12), 75.4)
    assert got.text == "worker 0  compiling   75 s    [===         ]  3/12 llm.model"
    assert starting_line("worker 0", body("LOADING", "weights"), 3725).text.endswith("62 min 05 s  weights")
    for state in START:
        assert state.value not in starting_line("worker 0", body(state.value), 0).text, "expected a text of its own"


def test_line_key_changes_with_stage_or_step() -> None:
    key = starting_line("w", body("LOADING", "a", 1, 2), 1).key
    assert key == starting_line("w", body("LOADING", "a", 1, 2), 9).key
    assert key != starting_line("w", body("LOADING", "a", 2, 2), 1).key
    assert key != starting_line("w", body("COMPILING", "a", 1, 2), 1).key


def test_ready_text_shows_start_times_slots_device_and_cache() -> None:
    cache = CacheReport("folder", "key", CacheState.WARM, hits=41, misses=2)
    health = {
        "start_seconds": {"LOADING": 12.3, "COMPILING": 130.0, "WARMING_UP": 5.0},
        "slots": {"total": 8},
        "device": {"type": "cuda:0", "name": "NVIDIA H200"},
        "model": {"speaks": False},
        "compile": {"cache": vars(cache), "targets": {"apm": {"error": "no"}, "tts.model": {"error": None}}},
    }
    got = ready_text("worker 3 (GPU 3)", health, 150)
    assert got == (
        "worker 3 (GPU 3)  ready in 2 min 30 s (loading 12 s, compiling 2 min 10 s, warming up 5.0 s): 8 slots, "
        "NVIDIA H200, without a vocoder: text only, compile cache: 41 hits, 2 misses, "
        "not compiled: apm (see /compile_report)"
    )
    assert ready_text("worker 0", {"slots": {"total": 1}, "device": {"type": "cpu", "name": "x86"}}, 9.44) == (
        "worker 0  ready in 9.4 s: 1 slot, cpu"
    )
    assert ready_text("worker 0", {}, 1).endswith("0 slots, unknown device"), "expected no key to be required"
    speech = {"slots": {"total": 4, "free": 4}}
    for omni, expected in ((False, ""), (True, "0 slots, ")):
        body = {"models": {"omni": omni, "speech": speech}, "device": {"type": "cpu"}}
        assert ready_text("worker 0", body, 1).endswith(f"1.0 s: {expected}speech model with 4 slots, cpu")


def test_totals_text() -> None:
    assert totals_text(2, 2, 8) == "2 workers, 8 slots"
    assert totals_text(1, 2, 1) == "1 of 2 workers, 1 slot"
    assert totals_text(1, 1, 4) == "1 worker, 4 slots"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_terminal_prints_live_lines_on_change_and_at_limited_rate() -> None:
    stream, clock = io.StringIO(), Clock()
    with StatusDisplay(stream, is_terminal=False, clock=clock) as display:
        display.update("w", LiveLine(1, "one"))
        display.update("w", LiveLine(1, "one, later"))
        clock.now = 0.5
        display.update("w", LiveLine(2, "two"))
        display.print_line("event")
        clock.now = 1.0
        display.update("w", LiveLine(3, "three"))
        display.remove("w")
        display.update("w", LiveLine(1, "again"))
    assert stream.getvalue().splitlines() == ["one", "event", "three", "again"]


def screen_of(text: str) -> str:
    """The visible text of a terminal after it printed `text`: carriage return, cursor up, erase line."""
    rows, row = [""], 0
    for token in re.findall(r"\x1b\[[?\d]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if token == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif up := re.fullmatch(r"\x1b\[(\d+)A", token):
            row -= int(up[1])
        elif token == "\x1b[2K":
            rows[row] = ""
        elif token not in ("\r", "\x1b[?25l", "\x1b[?25h"):
            assert not token.startswith("\x1b"), f"expected a control code this function supports, got {token!r}"
            rows[row] = token
    return "\n".join(rows).rstrip("\n")


def test_on_terminal_replaces_live_lines_below_permanent_ones() -> None:
    stream = io.StringIO()
    with StatusDisplay(stream, is_terminal=True) as display:
        display.update("a", LiveLine(1, "a1"))
        display.update("b", LiveLine(1, "b1"))
        display.update("a", LiveLine(2, "a2 [red]"))
        assert screen_of(stream.getvalue()) == "a2 [red]\nb1"
        display.print_line("event")
        assert screen_of(stream.getvalue()) == "event\na2 [red]\nb1"
        display.remove("a")
        display.print_line("a is ready")
        assert screen_of(stream.getvalue()) == "event\na is ready\nb1"
        display.remove("b")
        display.print_line("all")
        assert screen_of(stream.getvalue()) == "event\na is ready\nall"
        display.update("c", LiveLine(1, "c1"))
    assert screen_of(stream.getvalue()) == "event\na is ready\nall"
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l"), "expected a visible cursor"


def test_live_line_never_wraps_and_permanent_line_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    display = StatusDisplay(stream, is_terminal=True)
    display.update("a", LiveLine(1, "x" * 500))
    assert len(screen_of(stream.getvalue())) <= 80
    display.print_line("y" * 200)
    assert "y" * 200 in stream.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_ignores_closed_output(is_terminal: bool) -> None:
    class ClosedStream(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    with StatusDisplay(ClosedStream(), is_terminal=is_terminal) as display:
        display.print_line("text")
        display.update("a", LiveLine(1, "text"))


def test_last_message_prefers_errors() -> None:
    log = ["12:00:00 INFO a | x", "12:00:01 ERROR worker.service | no such folder", "12:00:02 INFO a | y"]
    assert last_message(log) == "no such folder"
    raised = ["12:00:01 CRITICAL worker.log | the program died", "Traceback (most recent call last):", "  File ..."]
    assert last_message([*raised, "KeyError: 'x'", "", "12:00:02 INFO a | y"]) == "the program died: KeyError: 'x'"
    assert last_message(["something", "error: setting x: expected y, got z"]) == "setting x: expected y, got z"
    assert last_message(["first", "ModuleNotFoundError: torch", ""]) == "ModuleNotFoundError: torch"
    assert last_message([]) == ""
    assert len(last_message(["x" * 5000])) == 300


def test_describe_exit() -> None:
    got = (describe_exit(2), describe_exit(-15), describe_exit(-99))
    assert got == ("exit status 2", "signal SIGTERM", "signal 99")
    assert "memory" in describe_exit(-9)
