"""Preflight checks: each problem is one line, the exit status is 2, and nothing is started."""

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.__main__ import main
from launcher.devices import CPU, Device, DriverGpu
from launcher.preflight import PlannedMachine, certificate_problems, folder_problems, memory_problems, port_owner
from models.checkpoint.embedded import TINY
from tests.launcher.processes import free_ports, launcher
from worker.config.service import load_config


@pytest.fixture
def ports() -> list[int]:
    return free_ports(2)


def refused(capsys: pytest.CaptureFixture[str], folder: Path, ports: list[int], *flags: str, **config: Any) -> str:
    """Run the launcher with settings that it refuses. config: sections of the settings. Returns: the error line."""
    file = folder / "settings.json"
    service = {"gateway_port": ports[0], "worker_base_port": ports[1], **config.pop("service", {})}
    file.write_text(
        json.dumps(
            {
                "model": {"device": "cpu", "model_path": str(Path(__file__).parents[2] / TINY)},
                "service": service,
                **config,
            }
        )
    )
    status = main(["--config", str(file), "--log-dir", str(folder / "logs"), *flags])
    output = capsys.readouterr()
    assert status == 2, f"expected exit status 2, got {status}: {output.out}{output.err}"
    assert not output.out and not list((folder / "logs").glob("*.pid")), f"expected nothing started, got {output.out}"
    lines = [line for line in output.err.splitlines() if not line.startswith("note:")]
    assert len(lines) == 1 and lines[0].startswith("error: "), f"expected one line, got {lines}"
    return lines[0]


@pytest.fixture(autouse=True)
def keep_logging_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.log.set_up", lambda level: None)


def test_real_launcher_reports_taken_port_in_one_line(tmp_path: Path, ports: list[int]) -> None:
    with socket.create_server(("127.0.0.1", ports[0])):
        settings = json.dumps({"model": {"device": "cpu"}, "service": {"worker_base_port": ports[1]}})
        (tmp_path / "c.json").write_text(settings)
        flags = ("--config", str(tmp_path / "c.json"), "--log-dir", str(tmp_path), "--port", str(ports[0]))
        with launcher(*flags) as launched:
            assert launched.wait() == 2, launched.output
            [line] = [line for line in launched.lines if not line.startswith("note: ")]
            assert line.startswith(f"error: port {ports[0]} (gateway) is taken by "), line
            assert f"(pid {os.getpid()}: " in line and "--port" in line, line
    assert not list(tmp_path.glob("*.pid")) and not list(tmp_path.glob("*.log"))


def test_reports_taken_worker_port(capsys: Any, tmp_path: Path, ports: list[int]) -> None:
    with socket.create_server(("127.0.0.1", ports[1])):
        got = refused(capsys, tmp_path, ports)
    assert f"port {ports[1]} (worker 0) is taken by" in got and "service.worker_base_port" in got, got


def test_port_owner_names_earlier_launcher(tmp_path: Path, ports: list[int]) -> None:
    (tmp_path / "worker_3.pid").write_text(f"{os.getpid()}\n")
    with socket.create_server(("127.0.0.1", ports[0])):
        who, remedy = port_owner(ports[0], tmp_path)
    assert (who, remedy) == (f"worker 3 of an earlier start_all.sh (pid {os.getpid()})", f"kill {os.getpid()}")


def test_reports_address_of_another_machine(capsys: Any, tmp_path: Path, ports: list[int]) -> None:
    got = refused(capsys, tmp_path, ports, "--host", "192.0.2.1", "--remote")
    assert "192.0.2.1" in got and "--host" in got, got


def test_refuses_invalid_settings(capsys: Any, tmp_path: Path, ports: list[int]) -> None:
    assert "duplex.max_sesions" in refused(capsys, tmp_path, ports, duplex={"max_sesions": 3})
    assert "service.gateway_port" in refused(capsys, tmp_path, ports, "--port", "70000")
    assert "log level" in refused(capsys, tmp_path, ports, "--log-level", "LOUD")
    assert main(["--config", str(tmp_path / "none.json")]) == 2


def test_reports_missing_model(capsys: Any, tmp_path: Path, ports: list[int]) -> None:
    got = refused(capsys, tmp_path, ports, "--model-path", str(tmp_path / "none"))
    assert "model: " in got and "got no such folder" in got and "model.model_path" in got, got
    got = refused(capsys, tmp_path, ports, "--model-path", str(tmp_path))
    assert "config.json" in got and "safetensors" in got, got


def test_reports_missing_warmup_video(capsys: Any, tmp_path: Path, ports: list[int]) -> None:
    got = refused(capsys, tmp_path, ports, service={"warmup_video": str(tmp_path / "none.mp4")})
    assert "warmup: " in got and "no such file" in got and "service.warmup_video" in got, got


def test_missing_vocoder_is_a_note(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ports: list[int], tiny: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model, ignore=shutil.ignore_patterns("token2wav"))
    monkeypatch.setattr("launcher.__main__.launch", lambda plan: 0)
    (tmp_path / "c.json").write_text(json.dumps({"service": {"gateway_port": ports[0], "worker_base_port": ports[1]}}))
    flags = ["--config", str(tmp_path / "c.json"), "--log-dir", str(tmp_path / "logs"), "--model-path", str(model)]
    assert main(flags) == 0
    assert "note: vocoder: " in capsys.readouterr().err


def test_reports_unusable_log_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    [got] = folder_problems(tmp_path / "file")
    assert "--log-dir" in got and str(tmp_path / "file") in got
    assert folder_problems(tmp_path / "new" / "one") == []


def test_reports_too_little_memory(tiny: Path) -> None:
    config, _ = load_config(None, flags={"model.model_path": str(tiny)}, environ={})
    gpu = DriverGpu(0, "GPU-a", "NVIDIA H200", total=100 << 30, free=1 << 20)
    small, large = Device("0", gpu), Device("1", DriverGpu(1, "GPU-b", "NVIDIA H200", total=100 << 30, free=99 << 30))
    machine = PlannedMachine(config, [small, large], {})
    [got] = memory_problems(machine, [small, large])
    assert got.startswith("GPU 0 (NVIDIA H200): 1.0 MiB of 100.0 GiB free, the models need at least "), got
    machine = PlannedMachine(config, [CPU, CPU], {})
    machine.free_memory = 10**9
    [got] = memory_problems(machine, [CPU, CPU])
    assert "2 workers need at least 1.0 GiB" in got, got
    assert memory_problems(machine, [CPU]) == []


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
def test_reports_unusable_certificates(tmp_path: Path) -> None:
    make = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=localhost")
    openssl(tmp_path, *make, "-nodes", "-keyout", "key.pem", "-out", "cert.pem")
    openssl(tmp_path, *make, "-passout", "pass:word", "-keyout", "locked.pem", "-out", "locked-cert.pem")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    assert certificate_problems(certificate, key) == []
    [got] = certificate_problems(certificate, tmp_path / "none.pem")
    assert "service.ssl_keyfile" in got and "No such file" in got and "--http" in got, got
    [got] = certificate_problems(tmp_path / "locked-cert.pem", key)
    assert "MISMATCH" in got.upper(), got
    [got] = certificate_problems(tmp_path / "locked-cert.pem", tmp_path / "locked.pem")
    assert "password" in got, got
    key.write_text("nothing")
    assert len(certificate_problems(certificate, key)) == 1
