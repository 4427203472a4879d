"""Launchers of stub programs that exit, hang, fail and ignore SIGTERM."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.leftovers import end_leftovers
from launcher.lock import FolderLockedError, lock_folder
from launcher.managed_process import ChildProcess, Program
from tests.launcher.launch_stubs import STUB
from tests.launcher.processes import free_ports, stubs, wait_until
from worker.worker_report import read_reports


def test_start_prints_progress_and_locks_folder(tmp_path: Path) -> None:
    with stubs(tmp_path, {"state": "LOADING"}, {"slots": 3}) as launched:
        launched.wait_line(r"worker 0 \(CPU\)  loading .* 1/4 weights")
        launched.wait_line(r"worker 1 \(CPU\)  ready in .*: 3 slots, cpu")
        assert not any(line.startswith("ready:") for line in launched.lines), launched.output
        launched.set_behavior("worker_0", {"slots": 1})
        got = launched.wait_line("^ready: ")
        assert "(2 workers, 4 slots; Ctrl-C stops)" in got, got
        assert "http://localhost:" in got, got
        assert launched.pid_files() == ["gateway.pid", "launcher.pid", "worker_0.pid", "worker_1.pid"]
        assert launched.pid("launcher") == launched.process.pid
        assert "stub | begins" in (tmp_path / "worker_1.log").read_text()
        with pytest.raises(FolderLockedError) as raised, lock_folder(tmp_path):
            pass
        assert raised.value.pid == launched.process.pid == launched.pid("launcher")


def test_restarts_processes_that_end_or_fail(tmp_path: Path) -> None:
    """The launcher runs as under nohup: SIGHUP, which a closing terminal sends, does not stop it."""
    with stubs(tmp_path, {"child": True}, ignored=[signal.SIGHUP]) as launched:
        launched.ready()
        launched.send(signal.SIGHUP)

        before = launched.pid("worker_0")
        os.kill(before, signal.SIGKILL)
        launched.wait_line("worker 0 ended with signal SIGKILL.* starting it again in 0.05 s")
        launched.ready(2)
        assert launched.pid("worker_0") != before

        before = launched.pid("gateway")
        os.kill(before, signal.SIGKILL)
        launched.wait_line("gateway ended with signal SIGKILL.* starting it again in 0.05 s")
        launched.wait_line("answers at .* again")
        assert launched.pid("gateway") != before

        os.kill(launched.pid("worker_0"), signal.SIGTERM)
        launched.wait_line("worker 0 ended with exit status 0.* starting it again in 0.1 s")
        launched.ready(3)

        before = launched.pid("worker_0")
        launched.set_behavior("worker_0", {"state": "FAILED"})
        launched.wait_line("worker 0 broke down: the engine broke; starting it again in 0.2 s")
        launched.set_behavior("worker_0", {})
        launched.ready(4)
        assert launched.pid("worker_0") != before

        seen = launched.family()
        launched.send(signal.SIGTERM)
        assert launched.wait() == 0, launched.output
        launched.expect_none_left()
        expected = 2 + 3 * 2 + 1  # gateways, three workers with a child, one without
        assert len(seen) == expected, f"expected {expected} processes in all, got {seen}"


def test_restarts_processes_that_hang(tmp_path: Path) -> None:
    with stubs(tmp_path, hang_timeout_s=1.0) as launched:
        launched.ready()
        before = {stem: launched.pid(stem) for stem in ("worker_0", "gateway")}
        for pid in before.values():
            os.kill(pid, signal.SIGSTOP)
        for stem, pid in before.items():
            launched.wait_line(f"{stem.replace('_', ' ')} has not answered for 1 s and was killed; starting it again")
            wait_until(lambda: (tmp_path / f"{stem}.pid").exists() and launched.pid(stem) != pid, "another process")  # noqa: B023


def test_stop_ends_gateway_then_workers_and_leaves_nothing(tmp_path: Path) -> None:
    with stubs(tmp_path, {"child": True}, {}) as launched:
        launched.set_behavior("gateway", {"drain": 0.3})
        launched.ready(2)
        launched.send(signal.SIGHUP)
        assert launched.wait() == 0, launched.output
        launched.expect_none_left()
        assert launched.pid_files() == []
        ends = [event for event in launched.events() if not event.endswith("start")]
        assert ends[:2] == ["gateway term", "gateway end"], f"expected the gateway to end first, got {ends}"
        assert sorted(ends[2:]) == ["worker_0 end", "worker_0 term", "worker_1 end", "worker_1 term"], ends
        assert launched.lines[-1] == "stopped", launched.output
        launched.wait_line("waiting 0 s for gateway: sessions have up to 0 s")


def test_second_ctrl_c_kills_processes_that_ignore_sigterm(tmp_path: Path) -> None:
    with stubs(tmp_path, {"ignores_sigterm": True}, drain_s=600) as launched:
        launched.ready()
        launched.send(signal.SIGINT)
        launched.send(signal.SIGTERM)  # some terminals send both for one Ctrl-C
        launched.wait_line("waiting 0 s for worker 0: sessions have up to 600 s, Ctrl-C again")
        assert "killed" not in launched.output, launched.output
        until = time.monotonic() + 30
        while "killed" not in launched.output and time.monotonic() < until:
            launched.send(signal.SIGINT)
            time.sleep(0.2)
        assert launched.wait() == 0, launched.output
        launched.wait_line("worker 0 killed: at once")
        launched.expect_none_left()
        assert launched.pid_files() == []


def test_full_disk_does_not_end_supervision(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    program = Program(
        "worker 0", "worker_0", (sys.executable, "-c", "import time; time.sleep(60)"), "http://127.0.0.1:1"
    )
    child = ChildProcess(program, tmp_path, root)
    child.log.mkdir()  # cannot be opened, also by root
    child.start()
    assert child.is_running, "expected a process without a log and a pid file, got none"
    child.kill()
    wait_until(lambda: not child.is_running, "the end of the process")


def test_killed_launcher_leaves_no_process_and_no_lock(tmp_path: Path) -> None:
    lines: list[str] = []
    with stubs(tmp_path, {"ignores_sigterm": True}) as killed:
        killed.ready()
        worker = killed.pid("worker_0")
        killed.process.kill()
        killed.wait()
        wait_until(lambda: "worker_0 term" in killed.events(), "SIGTERM from the kernel")
        end_leftovers(tmp_path, 0.2, lines.append)
        assert f"worker 0 (pid {worker})" in lines[0] and "killed: it did not end" in lines[-1], lines
        killed.expect_none_left()
        killed.set_behavior("worker_0", {})
    assert (tmp_path / "worker_0.pid").exists()
    (tmp_path / "worker_5.pid").write_text((tmp_path / "worker_0.pid").read_text())
    (tmp_path / "worker_0.log").write_text("of the killed one\n")
    with stubs(tmp_path) as launched:
        launched.ready()
        assert launched.pid_files() == ["gateway.pid", "launcher.pid", "worker_0.pid"]
        assert (tmp_path / "worker_0.log.1").read_text() == "of the killed one\n"
        assert "of the killed one" not in (tmp_path / "worker_0.log").read_text()


def test_gives_up_on_rejected_settings_and_after_three_failed_starts(tmp_path: Path) -> None:
    with stubs(tmp_path, {"exit": 2}, {"exit": 1}) as launched:
        assert launched.wait() == 1, launched.output
        launched.wait_line(r"worker 0 ended with exit status 2: there is no model; given up \(log: .*worker_0.log\)")
        errors = [line for line in launched.lines if line.startswith("error:")]
        assert len(errors) == 1 and "worker 1 ended with exit status 1: there is no model" in errors[0], launched.output
        starts = [event for event in launched.events() if event.endswith("start") and event != "gateway start"]
        assert sorted(starts) == ["worker_0 start", *["worker_1 start"] * 3]
        waits = [line.rpartition(" in ")[2] for line in launched.lines if "starting it again" in line]
        assert waits == ["0.05 s", "0.1 s"], launched.output
        assert launched.pid_files() == []


def test_other_workers_serve_while_one_cannot_start_or_leaks(tmp_path: Path) -> None:
    with stubs(tmp_path, {"exit": 2}, {"exit": 1}, {}, max_worker_bytes=200_000_000) as launched:
        launched.wait_line(r"worker 0 ended with exit status 2: .*; given up \(log: .*worker_0.log\)")
        got = launched.wait_line("^ready: ")
        assert "(1 of 3 workers, 2 slots;" in got, got
        again = "worker 1 ended with exit status 1: there is no model; starting it again in"
        waits = [launched.wait_line(again, n).rpartition(" in ")[2] for n in range(1, 6)]
        assert waits == ["0.05 s", "0.1 s", "0.2 s", "0.2 s", "0.2 s"], waits
        reports = read_reports(tmp_path).workers
        states = {name: report.state for name, report in reports.items()}
        assert states.pop("worker_1") in ("starting", "waiting")
        assert states == {"worker_0": "given up", "worker_2": "ready"}
        assert reports["worker_1"].reason == "ended with exit status 1: there is no model"
        assert reports["worker_1"].restarts >= 4 and not reports["worker_2"].reason
        launched.set_behavior("worker_1", {})
        launched.ready(2)
        wait_until(lambda: read_reports(tmp_path).workers["worker_1"].state == "ready", "the report")
        assert not read_reports(tmp_path).workers["worker_1"].reason
        launched.set_behavior("worker_2", {"memory": 250_000_000, "pid": launched.pid("worker_2")})
        launched.wait_line("worker 2 holds 0.[23] GB of memory, expected at most 0.2 GB, and was ended; starting it")
        assert "worker_2 end" in launched.events(), "expected the worker to stop in order"
        launched.ready(3)
        launched.send(signal.SIGTERM)
        assert launched.wait() == 0, launched.output
        assert not read_reports(tmp_path).workers


def test_ignores_answers_of_other_programs_on_the_port(tmp_path: Path) -> None:
    ports = free_ports(2)
    (tmp_path / "other.json").write_text("{}")
    with subprocess.Popen([sys.executable, str(STUB), "other", str(ports[1]), str(tmp_path)]) as other:
        try:
            wait_until(lambda: accepts_connections(ports[1]), "a server on the worker's port")
            with stubs(tmp_path, ports=ports) as launched:
                assert launched.wait() == 1, launched.output
                assert "Address already in use; given up" in launched.lines[-1], launched.output
                assert ")  ready in" not in launched.output, launched.output
        finally:
            other.kill()


def accepts_connections(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
