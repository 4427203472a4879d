"""Health as lines, and lines on a terminal and elsewhere."""

import io

from launcher.managed_process import ending, last_words
from launcher.progress import Board, LiveLine, ready_text, starting_line, totals_text
from worker.compile.cache import CacheReport, CacheState
from worker.status import START


def body(state: str, what: str = "", done: int = 0, total: int = 0) -> dict:
    return {"state": state, "progress": {"what": what, "done": done, "total": total, "seconds": 1.0}}


def test_a_worker_that_starts() -> None:
    assert starting_line("worker 0", None, 3.21).text == "worker 0  starting    3.2 s"
    got = starting_line("worker 0", body("COMPILING", "llm.model", 3, 12), 75.4)
    assert got.text == "worker 0  compiling   75 s    [===         ]  3/12 llm.model"
    assert starting_line("worker 0", body("LOADING", "weights"), 3725).text.endswith("62 min 05 s  weights")
    for state in START:
        assert state.value not in starting_line("worker 0", body(state.value), 0).text, "expected a word of its own"


def test_a_line_is_another_one_when_stage_or_step_changes() -> None:
    key = starting_line("w", body("LOADING", "a", 1, 2), 1).key
    assert key == starting_line("w", body("LOADING", "a", 1, 2), 9).key
    assert key != starting_line("w", body("LOADING", "a", 2, 2), 1).key
    assert key != starting_line("w", body("COMPILING", "a", 1, 2), 1).key


def test_a_worker_that_is_ready() -> None:
    cache = CacheReport("folder", "key", CacheState.WARM, hits=41, misses=2)
    told = {
        "start_seconds": {"LOADING": 12.3, "COMPILING": 130.0, "WARMING_UP": 5.0},
        "slots": {"total": 8},
        "device": {"type": "cuda:0", "name": "NVIDIA H200"},
        "model": {"speaks": False},
        "compile": {"cache": vars(cache), "targets": {"apm": {"error": "no"}, "tts.model": {"error": None}}},
    }
    got = ready_text("worker 3 (GPU 3)", told, 150)
    assert got == (
        "worker 3 (GPU 3)  ready in 2 min 30 s (loading 12 s, compiling 2 min 10 s, warming up 5.0 s): 8 slots, "
        "NVIDIA H200, without a vocoder: text only, compile cache: 41 hits, 2 misses, "
        "not compiled: apm (/compile_report tells why)"
    )
    assert ready_text("worker 0", {"slots": {"total": 1}, "device": {"type": "cpu", "name": "x86"}}, 9.44) == (
        "worker 0  ready in 9.4 s: 1 slot, cpu"
    )
    assert ready_text("worker 0", {}, 1).endswith("0 slots, unknown device"), "expected no health to be too short"


def test_totals() -> None:
    assert totals_text(2, 2, 8) == "2 workers, 8 slots"
    assert totals_text(1, 2, 1) == "1 of 2 workers, 1 slot"
    assert totals_text(1, 1, 4) == "1 worker, 4 slots"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_elsewhere_lines_come_as_they_change_and_not_too_often() -> None:
    stream, clock = io.StringIO(), Clock()
    board = Board(stream, is_terminal=False, clock=clock)
    board.show("w", LiveLine(1, "one"))
    board.show("w", LiveLine(1, "one, later"))
    clock.now = 0.5
    board.show("w", LiveLine(2, "two"))
    board.say("event")
    clock.now = 1.0
    board.show("w", LiveLine(3, "three"))
    board.drop("w")
    board.show("w", LiveLine(1, "anew"))
    assert stream.getvalue().splitlines() == ["one", "event", "three", "anew"]


class Screen:
    """A terminal, as far as the board needs one."""

    def __init__(self, text: str):
        self.rows, row = [""], 0
        for part in text.replace("\x1b[J", "\0").split("\n"):
            while part.startswith("\x1b["):
                n, _, part = part[2:].partition("F")
                row -= int(n)
                if part.startswith("\0"):
                    part, self.rows[row:] = part[1:], [""]
            self.rows[row] = part
            row += 1
            self.rows += [""] * (row + 1 - len(self.rows))

    @property
    def text(self) -> str:
        return "\n".join(self.rows).rstrip("\n")


def test_on_a_terminal_lines_are_rewritten_below_those_that_stay() -> None:
    stream = io.StringIO()
    board = Board(stream, is_terminal=True)
    board.show("a", LiveLine(1, "a1"))
    board.show("b", LiveLine(1, "b1"))
    board.show("a", LiveLine(2, "a2"))
    assert Screen(stream.getvalue()).text == "a2\nb1"
    board.say("event")
    assert Screen(stream.getvalue()).text == "event\na2\nb1"
    board.drop("a")
    board.say("a is ready")
    assert Screen(stream.getvalue()).text == "event\na is ready\nb1"
    board.drop("b")
    board.say("all")
    assert Screen(stream.getvalue()).text == "event\na is ready\nall"


def test_a_living_line_never_wraps() -> None:
    stream = io.StringIO()
    Board(stream, is_terminal=True).show("a", LiveLine(1, "x" * 500))
    assert len(stream.getvalue().strip()) < 80


def test_a_reader_that_is_gone_is_no_failure() -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    Board(Gone(), is_terminal=False).say("anybody?")


def test_last_words() -> None:
    log = ["12:00:00 INFO a | x", "12:00:01 ERROR worker.service | no such folder", "12:00:02 INFO a | y"]
    assert last_words(log) == "no such folder"
    raised = ["12:00:01 CRITICAL worker.log | the program died", "Traceback (most recent call last):", "  File ..."]
    assert last_words([*raised, "KeyError: 'x'", "", "12:00:02 INFO a | y"]) == "the program died: KeyError: 'x'"
    assert last_words(["something", "error: setting x: expected y, got z"]) == "setting x: expected y, got z"
    assert last_words(["first", "ModuleNotFoundError: torch", ""]) == "ModuleNotFoundError: torch"
    assert last_words([]) == ""
    assert len(last_words(["x" * 5000])) == 300


def test_endings() -> None:
    assert (ending(2), ending(-15), ending(-99)) == ("exit status 2", "signal SIGTERM", "signal 99")
    assert "memory" in ending(-9)
