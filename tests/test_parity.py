"""The parity runner on the committed golden data, and proof that it notices what is wrong."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.report import Report
from tests.parity.run import run_parity

STAGES = {
    *("tokenizer", "image", "mel", "vpm", "resampler", "vision_e2e", "apm_full", "apm_stream_duplex"),
    *("apm_stream_halfduplex", "audio_projection", "llm", "code_sampling", "tts"),
    *("chat_text", "chat_thinking", "chat_mixed", "chat_sliced_two_audio", "chat_omni_stream_input"),
}


@pytest.fixture(scope="module")
def golden(root: Path) -> Path:
    return root / "tests" / "golden"


def test_every_stage_matches_the_golden_data(golden):
    report, stages = run_parity(str(golden))
    assert set(stages) == STAGES
    assert not report.misses, f"{len(report.misses)} of {len(report.checks)}:\n" + "\n".join(
        f"{miss.case} {miss.name}: {miss.detail}" for miss in report.misses
    )
    assert len(report.checks) > 500, "stages ran but compared little"


@pytest.mark.parametrize(
    ("stem", "tensor", "stage"),
    [
        ("llm", "step_logits", "llm"),
        ("vpm", "c0.last_hidden_state", "vpm"),
        ("resampler", "x0.output", "resampler"),
        ("apm_stream_duplex", "chunk1.embeds", "apm_stream_duplex"),
        ("mel_offline", "off0.mel", "mel"),
        ("tts", "duplex.unit1.new_ids", "tts"),
        ("chat_mixed", "generated_ids", "chat_mixed"),
    ],
)
def test_a_wrong_value_is_a_miss(golden, tmp_path, stem, tensor, stage):
    changed = tmp_path / "golden"
    shutil.copytree(golden, changed)
    tensors = load_file(changed / f"{stem}.safetensors")
    wrong = tensors[tensor].flatten()
    wrong[len(wrong) // 2] += 1 if wrong.dtype == torch.int64 else 0.01
    save_file(tensors | {tensor: wrong.view(tensors[tensor].shape)}, changed / f"{stem}.safetensors")
    report, _ = run_parity(str(changed), only=stage)
    assert report.misses


def test_a_stage_that_fails_is_a_miss_and_the_others_still_run(golden, tmp_path):
    changed = tmp_path / "golden"
    shutil.copytree(golden, changed)
    tensors = load_file(changed / "llm.safetensors")
    save_file({name: t for name, t in tensors.items() if name != "prompt_ids"}, changed / "llm.safetensors")
    report, stages = run_parity(str(changed), only="l")
    assert stages == ["llm"]
    assert [(miss.case, miss.name) for miss in report.misses] == [("llm", "stage")]


def test_the_command_prints_each_case_and_tells_by_its_exit_code(golden, tmp_path, root):
    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.parity", str(folder), "--stage", "audio_projection"]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)

    good = run(golden)
    assert good.returncode == 0, good.stderr
    assert "max abs" in good.stdout and "2 passed, 0 failed" in good.stdout
    changed = tmp_path / "golden"
    shutil.copytree(golden, changed)
    tensors = load_file(changed / "audio_projection.safetensors")
    save_file(tensors | {"pooled": tensors["pooled"] + 1}, changed / "audio_projection.safetensors")
    bad = run(changed)
    assert bad.returncode == 1
    assert "MISS" in bad.stdout and "1 passed, 1 failed" in bad.stdout
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty").returncode == 1, "nothing compared is no success"


def test_report_rules():
    report = Report()
    one = torch.ones(3)
    report.close("case", "equal", one, one)
    report.close("case", "inside", one + 1.9e-4, one)
    assert not report.misses
    report.close("case", "outside", one + 2.1e-4, one)
    report.close("case", "nan", one * float("nan"), one)
    report.close("case", "shape", one[None], one)
    report.equal("case", "ids", [1, 2], torch.tensor([1, 3]))
    assert [miss.name for miss in report.misses] == ["outside", "nan", "shape", "ids"]
    assert "expected [1, 3], got [1, 2]" in str(report)


def test_trimmed_tables_are_completed(golden):
    from tests.parity.golden import GoldenDir

    opened = GoldenDir(golden)
    trimmed = json.loads((golden / "tiny" / "trimmed.json").read_text())
    stored, full = load_file(golden / "tiny" / "model.safetensors"), load_file(opened.checkpoint / "model.safetensors")
    assert stored.keys() == full.keys()
    for name, table in trimmed.items():
        assert len(full[name]) == table["rows"]
        assert torch.equal(full[name][table["kept"]], stored[name])
        assert full[name].count_nonzero() == stored[name].count_nonzero()
