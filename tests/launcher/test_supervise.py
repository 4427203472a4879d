"""Whole lives of a launcher's processes, with stubs that die, hang, break down and refuse to go."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.lock import Taken, held
from launcher.managed_process import ChildProcess, Program
from tests.launcher.processes import free_ports, stubs, wait_until
from tests.launcher.run_plan import STUB


def test_what_a_start_looks_like(tmp_path: Path) -> None:
    with stubs(tmp_path, {"state": "LOADING"}, {"slots": 3}) as launched:
        launched.wait_line(r"worker 0 \(CPU\)  loading .* 1/4 weights")
        launched.wait_line(r"worker 1 \(CPU\)  ready in .*: 3 slots, cpu")
        assert not any(line.startswith("ready:") for line in launched.lines), launched.output
        launched.set_mood("worker_0", {"slots": 1})
        got = launched.wait_line("^ready: ")
        assert "(2 workers, 4 slots; Ctrl-C stops)" in got, got
        assert "http://localhost:" in got, got
        assert launched.pid_files() == ["gateway.pid", "launcher.pid", "worker_0.pid", "worker_1.pid"]
        assert launched.pid("launcher") == launched.process.pid
        assert "stub | begins" in (tmp_path / "worker_1.log").read_text()


@pytest.mark.parametrize(
    ("stem", "number", "how"),
    [
        ("worker_0", signal.SIGKILL, "signal SIGKILL"),
        ("gateway", signal.SIGKILL, "signal SIGKILL"),
        ("worker_0", signal.SIGTERM, "exit status 0"),
    ],
)
def test_a_process_that_ends_is_started_again(tmp_path: Path, stem: str, number: int, how: str) -> None:
    with stubs(tmp_path, {"child": True}) as launched:
        launched.ready()
        before = launched.pid(stem)
        os.kill(before, number)
        launched.wait_line(f"{stem.replace('_', ' ')} ended with {how}.* starting it again in 0.05 s")
        launched.wait_line("answers at .* again" if stem == "gateway" else "ready in", 1 if stem == "gateway" else 2)
        assert launched.pid(stem) != before
        seen = launched.family()
        launched.send(signal.SIGINT)
        assert launched.wait() == 0, launched.output
        launched.expect_nobody_left()
        expected = 5 if stem == "worker_0" else 4  # gateway, worker and its child, and what was started anew
        assert len(seen) == expected, f"expected {expected} processes in all, got {seen}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_ends_the_gateway_then_the_workers_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    with stubs(tmp_path, {"child": True}, {}) as launched:
        launched.set_mood("gateway", {"drain": 0.3})
        launched.ready(2)
        launched.send(number)
        assert launched.wait() == 0, launched.output
        launched.expect_nobody_left()
        assert launched.pid_files() == []
        ends = [event for event in launched.events() if not event.endswith("start")]
        assert ends[:2] == ["gateway term", "gateway end"], f"expected the gateway to end first, got {ends}"
        assert sorted(ends[2:]) == ["worker_0 end", "worker_0 term", "worker_1 end", "worker_1 term"], ends
        assert launched.lines[-1] == "stopped", launched.output
        launched.wait_line("waiting 0 s for gateway: sessions have up to 0 s")


def test_a_terminal_that_closes_is_nothing_to_nohup(tmp_path: Path) -> None:
    with stubs(tmp_path, ignored=[signal.SIGHUP]) as launched:
        launched.ready()
        launched.send(signal.SIGHUP)
        os.kill(launched.pid("worker_0"), signal.SIGKILL)
        launched.wait_line("ready in", 2)
        launched.send(signal.SIGTERM)
        assert launched.wait() == 0, launched.output


def test_a_second_ctrl_c_kills_what_does_not_go(tmp_path: Path) -> None:
    with stubs(tmp_path, {"deaf": True}, drain_s=600) as launched:
        launched.ready()
        launched.send(signal.SIGINT)
        launched.send(signal.SIGTERM)  # both for one wish, as some terminals do
        launched.wait_line("waiting 0 s for worker 0: sessions have up to 600 s, Ctrl-C again")
        assert "killed" not in launched.output, launched.output
        until = time.monotonic() + 30
        while "killed" not in launched.output and time.monotonic() < until:
            launched.send(signal.SIGINT)
            time.sleep(0.2)
        assert launched.wait() == 0, launched.output
        launched.wait_line("worker 0 killed: at once")
        launched.expect_nobody_left()
        assert launched.pid_files() == []


def test_a_full_disk_does_not_lose_hold_of_what_runs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    program = Program(
        "worker 0", "worker_0", (sys.executable, "-c", "import time; time.sleep(60)"), "http://127.0.0.1:1"
    )
    child = ChildProcess(program, tmp_path, root)
    child.start()
    assert child.is_running, "expected a process without a pid file, got none"
    child.kill()
    until = time.monotonic() + 10
    while child.is_running:
        assert time.monotonic() < until, "expected it to be killed"
        time.sleep(0.02)


def test_children_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with stubs(tmp_path) as launched:
        launched.ready()
        launched.process.kill()
        launched.wait()
        launched.expect_nobody_left()
        assert "worker_0 term" in launched.events(), "expected a worker that was asked, got one that was killed"


def test_the_next_launcher_follows_one_that_was_killed(tmp_path: Path) -> None:
    with stubs(tmp_path) as killed:
        killed.ready()
        killed.process.kill()
        killed.wait()
        killed.expect_nobody_left()
    assert (tmp_path / "worker_0.pid").exists()
    (tmp_path / "worker_5.pid").write_text((tmp_path / "worker_0.pid").read_text())
    (tmp_path / "worker_0.log").write_text("of the killed one\n")
    with stubs(tmp_path) as launched:
        launched.ready()
        assert launched.pid_files() == ["gateway.pid", "launcher.pid", "worker_0.pid"]
        assert (tmp_path / "worker_0.log.1").read_text() == "of the killed one\n"
        assert "of the killed one" not in (tmp_path / "worker_0.log").read_text()


def test_settings_that_cannot_be_end_it_with_one_line(tmp_path: Path) -> None:
    with stubs(tmp_path, {"exit": 2}) as launched:
        assert launched.wait() == 1, launched.output
        got = [line for line in launched.lines if line.startswith("error:")]
        assert len(got) == 1 and "worker 0 ended with exit status 2: there is no model" in got[0], launched.output
        assert launched.events().count("worker_0 start") == 1
        assert launched.pid_files() == []


def test_three_starts_that_fail_end_it(tmp_path: Path) -> None:
    with stubs(tmp_path, {"exit": 1}) as launched:
        assert launched.wait() == 1, launched.output
        assert launched.events().count("worker_0 start") == 3
        waits = [line.rpartition(" in ")[2] for line in launched.lines if "starting it again" in line]
        assert waits == ["0.05 s", "0.1 s"], launched.output


def test_others_go_on_without_one_that_is_given_up(tmp_path: Path) -> None:
    with stubs(tmp_path, {"exit": 2}, {}) as launched:
        launched.wait_line(r"worker 0 ended with exit status 2: .*; given up \(log: .*worker_0.log\)")
        got = launched.wait_line("^ready: ")
        assert "(1 of 2 workers, 2 slots;" in got, got
        launched.send(signal.SIGTERM)
        assert launched.wait() == 0, launched.output


def test_a_worker_that_broke_down_is_replaced(tmp_path: Path) -> None:
    with stubs(tmp_path) as launched:
        launched.ready()
        before = launched.pid("worker_0")
        launched.set_mood("worker_0", {"state": "FAILED"})
        launched.wait_line("worker 0 broke down: the engine broke; starting it again")
        launched.set_mood("worker_0", {})
        launched.wait_line("ready in", 2)
        assert launched.pid("worker_0") != before


@pytest.mark.parametrize("stem", ["worker_0", "gateway"])
def test_a_process_that_hangs_is_replaced(tmp_path: Path, stem: str) -> None:
    with stubs(tmp_path, hung_s=1.0) as launched:
        launched.ready()
        before = launched.pid(stem)
        os.kill(before, signal.SIGSTOP)
        launched.wait_line(f"{stem.replace('_', ' ')} has not answered for 1 s and was killed; starting it again")
        wait_until(lambda: (tmp_path / f"{stem}.pid").exists() and launched.pid(stem) != before, "another process")


def test_an_answer_of_somebody_else_counts_for_nothing(tmp_path: Path) -> None:
    ports = free_ports(2)
    (tmp_path / "other.json").write_text("{}")
    with subprocess.Popen([sys.executable, str(STUB), "other", str(ports[1]), str(tmp_path)]) as other:
        try:
            wait_until(lambda: answers(ports[1]), "a server on the worker's port")
            with stubs(tmp_path, ports=ports) as launched:
                assert launched.wait() == 1, launched.output
                assert "Address already in use; given up" in launched.lines[-1], launched.output
                assert ")  ready in" not in launched.output, launched.output
        finally:
            other.kill()


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_one_launcher_for_a_folder(tmp_path: Path) -> None:
    with stubs(tmp_path) as launched:
        launched.ready()
        with pytest.raises(Taken) as raised, held(tmp_path):
            pass
        assert raised.value.pid == launched.process.pid
