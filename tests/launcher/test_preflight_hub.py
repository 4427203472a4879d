"""The launcher does not refuse a model id of the Hugging Face hub as a missing folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.__main__ import main
from launcher.plan import LaunchPlan
from tests.launcher.processes import free_ports
from tests.worker.assembly.fake_hub import NAME, fill_cache, use_cache


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[LaunchPlan]:
    """The plans that the launcher would have started."""
    plans: list[LaunchPlan] = []
    monkeypatch.setattr("worker.log.set_up", lambda level: None)
    monkeypatch.setattr("launcher.__main__.launch", lambda plan: plans.append(plan) or 0)
    return plans


def launch(folder: Path) -> int:
    gateway, worker = free_ports(2)
    service = {"gateway_port": gateway, "worker_base_port": worker}
    (folder / "c.json").write_text(json.dumps({"model": {"device": "cpu"}, "service": service}))
    return main(["--config", str(folder / "c.json"), "--log-dir", str(folder / "logs"), "--model-path", NAME])


def test_a_cached_model_starts(
    started: list[LaunchPlan], tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fill_cache(use_cache(tmp_path / "hub", monkeypatch), tiny)
    assert launch(tmp_path) == 0
    assert "model" not in capsys.readouterr().err
    command = started[0].workers[0].command
    assert command[command.index("--model-path") + 1] == NAME, "expected workers to be given the id"


def test_a_model_to_be_downloaded_is_one_note(
    started: list[LaunchPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    use_cache(tmp_path / "hub", monkeypatch, offline=False)
    assert launch(tmp_path) == 0 and len(started) == 1
    [note] = [line for line in capsys.readouterr().err.splitlines() if "Hugging Face" in line]
    assert f"{NAME} is not in the Hugging Face cache; workers download it when they start" in note


def test_offline_without_the_model_is_refused(
    started: list[LaunchPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    use_cache(tmp_path / "hub", monkeypatch)
    assert launch(tmp_path) == 2 and not started
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert f"model {NAME}: expected a folder" in line and "HF_HUB_OFFLINE is set" in line
    assert line.count("model.model_path") == 1, f"expected one remedy, got {line}"
