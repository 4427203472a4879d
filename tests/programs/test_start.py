"""A forked program finds what one with a process of its own finds, and ends as that does."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.programs import start as starting
from tests.programs.start import GATEWAY, ROOT, ForkedProgram, can_fork, start

PROBE = "tests.programs.probe"
WAIT_S = 60.0  # exceeding it means a hang
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
needs_forks = pytest.mark.skipif(not can_fork(), reason="needs descriptors of processes, and no GPU")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe is a program that is forked."""
    monkeypatch.setattr(starting, "MODULES", {PROBE: GATEWAY})


def found(program: Any) -> dict[str, Any]:
    line = program.stdout.readline()
    return json.loads(ADDRESS.sub("", line))


@pytest.fixture(params=[signal.SIG_IGN, signal.default_int_handler], ids=["ignored", "handled"])
def interrupt(request: pytest.FixtureRequest) -> Iterator[None]:
    """SIGINT as it is in the background job of a shell, and on a terminal: new processes inherit that it is ignored."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@needs_forks
@pytest.mark.usefixtures("interrupt")
def test_finds_what_a_process_of_its_own_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for modules in ({PROBE: GATEWAY}, {}):
        monkeypatch.setattr(starting, "MODULES", modules)
        program = start(PROBE, ["3", "two words"], {"DUOLOGUE_SERVICE_DATA_DIR": "somewhere"})
        assert isinstance(program, ForkedProgram) == bool(modules), f"expected the other kind, got {program}"
        results.append(found(program))
        assert program.stdout.read() == "to stderr\n"
        assert program.wait(WAIT_S) == program.returncode == program.poll() == 3
        program.stdout.close()
    forked, own = results
    assert forked == own, {name: (forked[name], own[name]) for name in own if forked[name] != own[name]}
    assert forked["environ"]["DUOLOGUE_SERVICE_DATA_DIR"] == "somewhere" and forked["folder"] == str(ROOT)


@needs_forks
@pytest.mark.usefixtures("forked")
def test_ends_by_a_signal() -> None:
    program = start(PROBE, ["wait"])
    found(program)
    assert program.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.01)
    program.send_signal(signal.SIGTERM)
    assert program.wait(WAIT_S) == -signal.SIGTERM
    program.kill()  # it has ended
    program.stdout.close()


@needs_forks
@pytest.mark.usefixtures("forked")
def test_programs_end_one_by_one() -> None:
    programs = [start(PROBE, ["wait"]) for _ in range(3)]
    for program in programs:
        found(program)
    programs[1].kill()
    assert programs[1].wait(WAIT_S) == -signal.SIGKILL
    assert programs[0].poll() is None and programs[2].poll() is None
    for program in programs:
        program.kill()
        program.wait(WAIT_S)
        program.stdout.close()


@pytest.mark.usefixtures("forked")
def test_variables_that_imports_may_read_need_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    program = start(PROBE, ["0"])
    assert isinstance(program, subprocess.Popen), f"expected a process of its own, got {program}"
    assert found(program)["environ"]["OMP_WAIT_POLICY"] == "passive"
    assert program.wait(WAIT_S) == 0
    program.stdout.close()


@needs_forks
def test_server_with_a_thread_does_not_start() -> None:
    program = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    program += "\nfrom tests.programs.fork_server import import_all; import_all(['json'])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1 and "got 2 threads after importing json" in done.stderr, done


@needs_forks
def test_closed_server_ends() -> None:
    server = starting.ForkServer(["json"])
    program = server.start(PROBE, ["wait"], {})
    found(program)
    server.close()
    program.kill()
    with pytest.raises(RuntimeError, match="the fork server's end"):
        program.wait(WAIT_S)
    program.stdout.close()
