"""The parity runner on the omni model's committed golden data, and its detection of wrong values."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.golden_copies import change, moved, without
from tests.parity.__main__ import main
from tests.parity.golden import GoldenDir, read_tensors
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


@pytest.fixture(scope="module")
def whole(golden: Path) -> tuple[Report, list[str]]:
    """The run over the committed directory."""
    return run_parity(str(golden))


def test_stages_match_golden_data(whole):
    report, stages = whole
    assert set(stages) == STAGES
    assert not report.misses, f"{len(report.misses)} of {len(report.checks)}:\n" + "\n".join(
        f"{miss.case} {miss.name}: {miss.detail}" for miss in report.misses
    )
    assert len(report.checks) > 450, "stages ran but compared little"


@pytest.mark.parametrize(
    ("stem", "tensor", "stage"),
    [
        ("llm", "step_logits", "llm"),
        ("vpm", "c1.last_hidden_state", "vpm"),
        ("resampler", "c1.output", "resampler"),
        ("apm_stream_duplex", "chunk1.embeds", "apm_stream_duplex"),
        ("apm_stream_duplex", "chunk30.embeds", "apm_stream_duplex"),
        ("mel_stream_duplex", "chunk30.mel", "mel"),
        ("mel_offline", "off0.mel", "mel"),
        ("tts", "duplex.unit1.new_ids", "tts"),
        ("tts", "raw.processed_top25_vals", "code_sampling"),
        ("chat_text", "logits", "chat_text"),
        ("chat_mixed", "generated_ids", "chat_mixed"),
    ],
)
def test_wrong_value_fails(golden, tmp_path, stem, tensor, stage):
    report, _ = run_parity(str(change(golden, tmp_path / "golden", stem, moved(tensor, 0.01))), only=stage)
    assert report.misses


def test_failing_stage_does_not_stop_the_others(golden, tmp_path):
    changed = change(golden, tmp_path / "golden", "llm", lambda t: t | {"prompt_ids": t["prompt_ids"] + 10**6})
    report, stages = run_parity(str(changed), only="l")
    assert stages == ["llm"]
    assert [(miss.case, miss.name) for miss in report.misses] == [("llm", "stage")]


TRIMMED = {
    "tts": ("cond.normalized", "cond.duplex_empty", "duplex.unit1.*", "raw.logits", "stream.reindex.call1.state"),
    "llm": ("prefill_logits", "greedy_ids", "step_logits", "embeds_logits_part2"),
    "chat_text": ("scores", "hidden", "logits", "input_ids"),
    "chat_mixed": ("generated_ids", "inputs_embeds", "image_bound"),
    "vpm": ("c1.last_hidden_state", "c1.patch_attention_mask"),
    "vision_e2e": ("b.tgt_sizes",),
    "audio_projection": ("projected",),
    "apm_full": ("c2.embeds1",),
}


def test_trimmed_tensors_are_not_compared(golden, whole, tmp_path):
    for stem, patterns in TRIMMED.items():
        change(golden, tmp_path / "golden", stem, without(*patterns))
    manifest = json.loads((golden / "manifest.json").read_text())
    for about in manifest["image_preprocess"]["meta"].values():
        del about["image_sha256"], about["num_slices"]
    (tmp_path / "golden" / "manifest.json").write_text(json.dumps(manifest))
    (full, all_stages), (report, stages) = whole, run_parity(str(tmp_path / "golden"))
    assert not report.misses, "\n".join(f"{miss.case} {miss.name}: {miss.detail}" for miss in report.misses)
    assert stages == all_stages
    kept = {(check.case, check.name) for check in report.checks}
    gone = {(check.case, check.name) for check in full.checks} - kept
    assert {("tts condition", "normalized"), ("llm prefill", "logits"), ("chat_text", "scores")} <= gone
    assert {case for case, _ in gone if "duplex" in case} == {"tts duplex unit1", "tts duplex unit2"}
    assert {("resampler c1", "rows"), ("vpm c1", "hidden"), ("image img0", "input sha256")} <= gone
    assert ("chat_mixed", "logits") in kept and ("tts duplex eosstop", "codes") in kept


@pytest.mark.parametrize("gone", ["mel_stream_duplex.packed", "manifest.json"])
def test_stage_without_sound_compares_nothing(golden, tmp_path, gone):
    shutil.copytree(
        golden, tmp_path / "golden", ignore=shutil.ignore_patterns(gone, "duplex", "token2wav", "qwen3_tts")
    )
    report, stages = run_parity(str(tmp_path / "golden"), only="apm_stream")
    assert (report.checks, stages) == ([], [])
    assert "nothing to compare in: apm_stream_duplex, apm_stream_halfduplex" in str(report)


@pytest.mark.parametrize(
    ("stem", "gone", "stage", "case", "name"),
    [
        ("chat_media", "wave_2.3_700", "chat_mixed", "chat_mixed", "chat_media.wave_2.3_700"),
        ("llm", "prompt_ids", "llm", "llm", "prompt_ids"),
        ("apm_full", "c2.audio_features", "apm_full", "apm_full c2", "c2.audio_features"),
    ],
)
def test_missing_input_fails_with_its_name(golden, tmp_path, stem, gone, stage, case, name):
    report, _ = run_parity(str(change(golden, tmp_path / "golden", stem, without(gone))), only=stage)
    assert [(miss.case, miss.detail) for miss in report.misses] == [(case, f"missing: {name}")]


@pytest.mark.parametrize("wrong", [False, True])
def test_speech_stream_matches_speech_by_turn(golden, tmp_path, wrong):
    """`cases/tts_stream`, laid out from what `tts` holds of the same turns."""
    (tmp_path / "cases").mkdir()
    (tmp_path / "tiny").symlink_to(golden / "tiny")
    tensors, cases, rows = GoldenDir(golden).tensors("tts"), [], {}
    kinds = ("full_attention", "sliding_window", "sliding_recompute", "reindex")[: 1 if wrong else None]
    for kind in kinds:
        states, yields, left = [], [], tensors[f"stream.{kind}.all_tokens"].tolist()
        everything, spoken = list(left), 0
        for call in range(3):
            rows[f"{kind}.0.cond.{call}"] = tensors[f"stream.condition{call}"].clone()
            n_batches, n_buffer, next_pos, kv_len = tensors[f"stream.{kind}.call{call}.state"].tolist()
            yields.append([[left[25 * i : 25 * i + 25], False] for i in range(n_batches)])
            spoken += 25 * n_batches
            left = left[25 * n_batches :]
            buffer = everything[spoken : spoken + n_buffer]
            state = {"kv_len": kv_len, "next_pos": next_pos, "buffer": buffer, "codes_total": spoken + n_buffer}
            states.append(state)
        states[1]["next_pos"] += wrong
        settings = {"attention_type": kind, "case": 0, "chunk_size": 25, "max_new_token": 32}
        cases.append(settings | {"yields": yields, "state_after_chunk": states})
    sampling = json.loads((golden / "manifest.json").read_text())["tts"]["meta"]["sampling"]
    (tmp_path / "cases" / "tts_stream.json").write_text(
        json.dumps(sampling | {"token_window_size": 40, "cases": cases})
    )
    save_file(rows, tmp_path / "cases" / "tts_stream.safetensors")
    report, stages = run_parity(str(tmp_path))
    assert stages == ["speech_stream"] and len(report.checks) == 6 * len(kinds)
    assert [miss.name for miss in report.misses] == ["chunk 1 state"] * wrong, str(report)


@pytest.mark.parametrize("wrong", [False, True])
def test_moved_keys_match_float64(tmp_path, wrong):
    """`cases/rope`: keys turned to both places in float64."""
    (tmp_path / "cases").mkdir()
    torch.manual_seed(0)
    rows, head_dim, old, new, theta = 6, 8, 40, 7, 1e4
    plain = torch.randn(2, rows, head_dim // 2, dtype=torch.complex128)
    frequencies = theta ** -(torch.arange(0, head_dim, 2).double() / head_dim)

    def at(start: int) -> torch.Tensor:
        turned = plain * torch.exp(1j * (start + torch.arange(rows))[:, None] * frequencies)
        return torch.cat((turned.real, turned.imag), dim=-1)[None].float()

    tensors = {"r0.key": at(old), "r0.out": at(new + wrong), "r0.spec": torch.tensor([old, new, rows, theta])}
    protected = torch.randn(1, 2, 3, head_dim)
    for part, turn in (("key", at), ("value", lambda start: at(0))):
        gap = torch.randn(1, 2, 5, head_dim)
        tensors[f"drop.{part}_before.0"] = torch.cat((protected, gap, turn(8)), dim=2)
        tensors[f"drop.{part}_after.0"] = torch.cat((protected, turn(3)), dim=2)
    save_file(tensors, tmp_path / "cases" / "rope.safetensors")
    drop = {"drop": {"preserve": 3, "length": 5, "rope_theta": theta}}
    (tmp_path / "cases" / "rope.json").write_text(json.dumps(drop))
    report, stages = run_parity(str(tmp_path))
    assert stages == ["rope"] and len(report.checks) == 3
    assert [miss.case for miss in report.misses] == ["rope r0"] * wrong, str(report)


def test_command_prints_cases_and_returns_a_status(golden, tmp_path, root, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    only = ["--stage", "audio_projection"]
    for folder, code in ((golden, 0), (tmp_path / "empty", 1)):  # a run without comparisons fails
        monkeypatch.setattr(sys, "argv", ["parity", str(folder), *only])
        assert main() == code
    shown = capsys.readouterr().out
    assert "max abs" in shown and "2 passed, 0 failed" in shown
    changed = change(golden, tmp_path / "golden", "audio_projection", moved("pooled", 1))
    monkeypatch.setattr(sys, "argv", ["parity", str(changed), *only])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(root / "tests" / "parity" / "__main__.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert ended.value.code == 1 and "MISS" in shown and "1 passed, 1 failed" in shown, shown


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


def test_tolerance_can_be_set():
    report, one = Report(), torch.ones(3)
    report.close_if("case", "inside", one + 0.19, one, 0.1)
    report.close_if("case", "outside", one + 0.21, one, 0.1)
    report.close_if("case", "trimmed", one, None, 0.1)
    assert [(check.name, check.ok) for check in report.checks] == [("inside", True), ("outside", False)]


def test_trimmed_tables_are_completed(golden):
    opened = GoldenDir(golden)
    trimmed = json.loads((golden / "tiny" / "trimmed.json").read_text())
    stored, _ = read_tensors(golden / "tiny", "model")
    full = load_file(opened.checkpoint / "model.safetensors")
    assert stored.keys() == full.keys()
    for name, table in trimmed.items():
        assert len(full[name]) == table["rows"]
        assert torch.equal(full[name][table["kept"]], stored[name])
        assert opened.kept_rows(name) == table["kept"]
        others = torch.ones(table["rows"], dtype=torch.bool)
        others[table["kept"]] = False
        assert (full[name][others] == table.get("fill", 0)).all()
    assert opened.kept_rows("llm.model.norm.weight") == slice(None)
