"""The parity runner on the committed golden data of Qwen3-TTS, and its detection of wrong values."""

import shutil
from pathlib import Path

import pytest

from tests.golden_copies import change, moved
from tests.parity.run import run_parity

STAGES = {"talker": 11, "code_predictor": 8, "speech_frames": 70}  # comparisons, at least


@pytest.fixture(scope="module")
def golden(root: Path) -> Path:
    return root / "tests" / "golden" / "qwen3_tts"


@pytest.mark.parametrize("stage", STAGES)
def test_stage_matches_golden_data(golden: Path, stage: str) -> None:
    report, stages = run_parity(str(golden), only=stage)
    assert stages == [stage]
    assert not report.misses, str(report)
    assert len(report.checks) >= STAGES[stage], f"expected more comparisons, got {report}"


@pytest.mark.parametrize(
    ("folder", "stem", "tensor", "stage", "name"),
    [
        ("", "talker_b_leftpad", "step_logits", "talker", "step logits"),
        ("", "predictor_b_projection", "codes", "code_predictor", "codes"),
        ("generate", "base_eos_min_two", "codes.0", "speech_frames", "codes"),
        ("generate", "custom_sampled_top_p", "talker_scores", "speech_frames", "scores: number of differing codes"),
        ("generate", "custom_dialect_chinese", "prefill_embeds", "speech_frames", "prompt"),
    ],
)
def test_wrong_value_fails(
    golden: Path, tmp_path: Path, folder: str, stem: str, tensor: str, stage: str, name: str
) -> None:
    copy = tmp_path / "golden"
    shutil.copytree(golden, copy, ignore=shutil.ignore_patterns("*.packed"))
    for model in ("tiny_a", "tiny_b"):
        shutil.copy(golden / model / "model.packed", copy / model)
    shutil.copy(golden / "reference.packed", copy)
    edit = moved(tensor, 0.01)
    if "scores" in tensor:  # excluded codes become allowed
        edit = lambda tensors: tensors | {tensor: tensors[tensor].nan_to_num(neginf=0.0)}  # noqa: E731
    change(golden / folder, copy / folder, stem, edit)
    report, _ = run_parity(str(copy), only=stage)
    assert name in {miss.name for miss in report.misses}, f"expected a miss of {name}, got {report}"
