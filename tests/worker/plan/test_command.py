"""`python -m worker.plan`: what it answers, refuses, and returns as its exit status."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from assets.build_tiny_speech import build
from models.checkpoint.config import load_config
from tests.worker.doctor.machines import settings
from worker.doctor.model_memory import other_models
from worker.doctor.speech_facts import speech_facts
from worker.plan.__main__ import main

Plan = Callable[..., tuple[int, str]]


@pytest.fixture
def plan(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Runs the command with the released model, without a vocoder. Returns: exit status, output and errors."""
    shutil.copy(root / "tests" / "data" / "released_config.json", tmp_path / "config.json")
    assert load_config(tmp_path).num_hidden_layers == 36

    def run(*flags: str, **model: object) -> tuple[int, str]:
        file = tmp_path / "settings.json"
        file.write_text(json.dumps({"model": {"model_path": str(tmp_path), "device": "cpu", **model}}))
        status = main(["--config", str(file), *flags])
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


def expect(answer: tuple[int, str], status: int, *said: str) -> None:
    assert answer[0] == status, f"expected the exit status {status}, got {answer[0]}:\n{answer[1]}"
    for part in said:
        assert part in answer[1], f"expected {part!r}, got:\n{answer[1]}"


@pytest.mark.parametrize(
    ("gpu", "weights", "fits"),
    [
        ("7GB", "int4", False),
        ("8GB", "int4", False),
        ("12GB", "int4", True),
        ("12GB", "bf16", False),
        ("20GB", "bf16", False),
        ("24GB", "bf16", True),
    ],
)
def test_a_session_fits_with_what_its_work_needs(plan: Plan, gpu: str, weights: str, fits: bool) -> None:
    answer = plan("--gpu", gpu, "--weights", weights)
    expect(answer, 0 if fits else 1, "1 session of any kind fit;" if fits else "no session fits: one needs 5.41 GiB")
    status, text = plan("--gpu", gpu, "--weights", weights, "--max-sessions", "1", "--json")
    assert (status, json.loads(text)["n_slots"]) == ((0, 1) if fits else (1, 0)), text


def test_says_that_fewer_sessions_fit_than_the_settings_name(plan: Plan) -> None:
    flags = "--gpu", "24GB", "--weights", "int4", "--max-sessions"
    expect(plan(*flags, "100"), 1, "100 sessions do not fit, only 14\n", "14 sessions with default settings fit;")
    status, text = plan(*flags, "14")
    assert status == 0 and "do not fit" not in text, text


def test_refuses_what_it_does_not_do(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    expect(plan("--json", "--measure", "--gpu", "24GB"), 2, "--json: expected no --measure beside it")
    alone = {"omni": False, "speech_path": "assets/tiny"}
    expect(plan("--measure", "--gpu", "24GB", **alone), 2, "--measure: expected an omni model")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device in ("cuda", "cuda:1"):
        expect(plan("--device", device), 2, f"error: device: expected one of 0 GPUs or cpu, got {device}")
    expect(plan("--device", "cuda", "--gpu", "24GB"), 0, "1 session of any kind fit")


def test_counts_the_speech_model_and_voice_conversion(plan: Plan, tmp_path: Path) -> None:
    voices, s3gen = build(tmp_path / "voices"), tmp_path / "s3gen.safetensors"
    s3gen.touch()
    os.truncate(s3gen, 8 * 10**9)  # without blocks on the disk
    engine = settings(model={"speech_path": voices, "s3gen_path": s3gen}).engine()
    others = other_models(engine, speech_facts(voices), on_gpu=True)
    assert others["voice conversion"] == 4 * 10**9 and len(others) == 2, others
    given = {"speech_path": str(voices), "s3gen_path": str(s3gen)}
    alone, beside = (json.loads(plan("--gpu", "80GB", "--json", **one)[1]) for one in ({}, given))
    assert (alone["others"], beside["others"]) == ({}, others)
    with_models, without = (one["n_slots"] for one in (beside, alone))
    assert with_models < without, f"expected fewer than {without} sessions beside other models, got {with_models}"
    text = plan("--gpu", "80GB", **given)[1]
    assert "the speech model with its slots" in text and "voice conversion" in text, text


def test_plans_no_sessions_without_the_omni_model(plan: Plan, tmp_path: Path) -> None:
    alone = {"omni": False, "speech_path": str(build(tmp_path / "voices")), "model_path": "nowhere"}
    no_sessions = "no duplex sessions are planned: model.omni is false"
    answer = plan("--gpu", "24GB", **alone)
    expect(answer, 0, "the speech model with its slots", no_sessions)
    assert "slot " not in answer[1] and "rows" not in answer[1], f"expected no omni model, got:\n{answer[1]}"
    expect(plan("--gpu", "1GB", **alone), 1, no_sessions, "too few for")


def test_names_another_model_that_is_incomplete(plan: Plan, root: Path, tmp_path: Path) -> None:
    expect(
        plan("--gpu", "24GB", omni=False, speech_path=str(root / "assets" / "tiny")),
        2,
        "model.speech_path: expected a complete Qwen3-TTS folder",
        "assets/tiny: config.json: expected every key valid",
    )
    expect(plan("--gpu", "24GB", s3gen_path=str(tmp_path / "none")), 2, "model.s3gen_path: expected a file, got ")
