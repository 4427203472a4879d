"""One launcher with the real gateway and worker on the embedded checkpoint, from the command line to Ctrl-C."""

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from launcher.preflight import port_owner
from tests.launcher.processes import free_ports, launcher

START_S = 200.0


@pytest.mark.slow
def test_runs_real_programs_until_ctrl_c(tmp_path: Path) -> None:
    gateway, worker = free_ports(2)
    service = {
        "gateway_port": worker,  # overridden by --port
        "worker_base_port": worker + 1,
        "max_warmup_chunks": 2,
        "drain_timeout_s": 5,
        "cache_dir": str(tmp_path / "compiled"),
    }
    settings = {"model": {"device": "cpu"}, "service": service, "duplex": {"max_sessions": 3}}
    (tmp_path / "c.json").write_text(json.dumps(settings))
    flags = ("--config", str(tmp_path / "c.json"), "--log-dir", str(tmp_path / "logs"))
    with launcher(*flags, "--port", str(gateway), "--max-sessions", "1") as launched:
        launched.wait_line(f"gateway  answers at http://localhost:{gateway}, while the model loads")
        launched.wait_line(r"worker 0 \(CPU\)  ready in .*\(loading .*\): 1 slot, cpu", timeout=START_S)
        got = launched.wait_line("^ready: ")
        assert got == f"ready: http://localhost:{gateway}  (1 worker, 1 slot; Ctrl-C stops)"
        launched.wait_line("loading  ")
        assert fetch(gateway, "/health")["status"] == "healthy"
        assert fetch(gateway, "/readyz")["free_slots"] == 1
        who, remedy = port_owner(gateway, tmp_path)
        assert str(launched.process.pid) in who and f"kill {launched.process.pid}" in remedy, (who, remedy)
        assert len(launched.family()) >= 2
        launched.send(signal.SIGINT)
        assert launched.wait() == 0, launched.output
        launched.expect_none_left()
    assert not list((tmp_path / "logs").glob("*.pid"))
    assert "IDLE" in (tmp_path / "logs" / "worker_0.log").read_text()
    assert "listening on" in (tmp_path / "logs" / "gateway.log").read_text()


def fetch(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return json.load(answer)
