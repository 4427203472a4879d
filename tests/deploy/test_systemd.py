"""systemd accepts the units, and the programs accept their command lines."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.options import parser as launcher_parser
from server.cluster.__main__ import parser as authority_parser
from server.main import parser as gateway_parser
from worker.config.service import ServiceSection
from worker.main import parser as worker_parser

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
PARSERS = {
    "launcher": launcher_parser,
    "server.main": gateway_parser,
    "worker.main": worker_parser,
    "server.cluster": authority_parser,
}


@pytest.mark.parametrize("unit", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_programs_accept_their_command_lines(unit: Path) -> None:
    text = unit.read_text(encoding="utf-8").replace("%i", "0")
    python, dash_m, module, *flags = shlex.split(re.search(r"^ExecStart=(.*)$", text, re.M)[1])
    assert (python, dash_m) == ("/srv/duologue/.venv/base/bin/python", "-m")
    given = dict(re.findall(r"^Environment=(\w+)=(\S+)$", text, re.M))
    PARSERS[module]().parse_args([re.sub(r"\$\{(\w+)\}", lambda name: given[name[1]], flag) for flag in flags])
    drains = {"launcher": 2, "server.cluster": 0}.get(module, 1)
    seconds = int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.M)[1])
    expected = drains * ServiceSection().drain_timeout_s + 10
    assert seconds > expected, f"expected more than the drain, {expected} s, got {seconds}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    files = []
    for unit in sorted(FOLDER.iterdir()):
        text = unit.read_text(encoding="utf-8").replace("/srv/duologue/.venv/base/bin/python", sys.executable)
        file = tmp_path / unit.name.replace("@", "@0")
        file.write_text(re.sub(r"^(User|Group)=duologue$", r"\1=root", text, flags=re.M), encoding="utf-8")
        files.append(str(file))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True)
    remarks = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "duologue" in line]
    assert done.returncode == 0 and not remarks, f"expected no remark, got {done.returncode}: {done.stderr}"
