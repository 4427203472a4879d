"""The parity runner on the vocoder's committed golden data, and its detection of wrong values."""

from pathlib import Path

import pytest
import torch

from tests.golden_copies import change, moved, without
from tests.parity.golden import GoldenDir
from tests.parity.report import Report
from tests.parity.run import run_parity
from tests.parity.token2wav.noise import hash_noise

STAGES = {
    "features": "features_b",
    "campplus": "campplus_b",
    "s3_tokenizer": "s3tokenizer_a",
    "conformer": "conformer_a",
    "estimator": "estimator_a",
    "cfm": "cfm_a",
    "flow": "e2e_a",
    "hift": "hift_a",
    "vocode": "e2e_a",
    "s3gen": "s3gen_estimator_meanflow_b",
    "s3gen_source": "s3gen_source_a",
}


@pytest.fixture(scope="module")
def golden(root: Path) -> Path:
    return root / "tests" / "golden" / "token2wav"


@pytest.fixture(scope="module")
def whole(golden: Path) -> tuple[Report, list[str]]:
    """The run over the committed directory."""
    return run_parity(str(golden))


def report_text(report: Report) -> str:
    return "\n".join(f"{miss.case} {miss.name}: {miss.detail}" for miss in report.misses)


def test_stages_match_golden_data(whole):
    report, stages = whole
    assert set(stages) == STAGES.keys() and not report.empty
    assert not report.misses, report_text(report)
    assert len(report.checks) > 85, "stages ran but compared little"


def test_golden_sizes_differ_from_released_sizes(golden):
    """A constant hard-coded from the released model fails these cases."""
    shapes = {name: tuple(tensor.shape) for name, tensor in GoldenDir(golden).tensors("e2e_a").items()}
    assert shapes["out.chunk0_mel"] == (1, 20, 50) and shapes["in.spk_emb"] == (1, 12)


@pytest.mark.parametrize(
    ("stage", "tensor", "by"),
    [
        ("features", "out.fbank80", 0.1),
        ("features", "out.logmel128_16k", 1e-3),
        ("campplus", "out.emb0", 5e-4),
        ("campplus", "out.head0", 5e-4),
        ("s3_tokenizer", "out.codes", 1),
        ("conformer", "out.offline", 2e-4),
        ("conformer", "out.chunk3", 2e-4),
        ("conformer", "out.chunk0_att_cache", 2e-4),
        ("estimator", "out.chunk1", 1e-3),
        ("cfm", "out.offline_n10", 1e-3),
        ("cfm", "out.chunk4", 1e-3),
        ("flow", "out.chunk5_mel", 1e-3),
        ("flow", "out.chunk4_mel_fixedtrim", 1e-3),
        ("flow", "out.offline_mel", 1e-3),
        ("hift", "out.f0", 0.5),
        ("hift", "out.wav", 3e-4),
        ("vocode", "out.chunk5_wav", 0.1),
        ("vocode", "out.chunk4_mel", 10.0),
        ("s3gen", "out.estimator", 1e-3),
        ("s3gen", "out.solve_n2", 1e-3),
        ("s3gen_source", "out.source", 5e-3),
    ],
)
def test_wrong_value_fails(golden, tmp_path, stage, tensor, by):
    folder = change(golden, tmp_path / "golden", STAGES[stage], moved(tensor, by))
    report, _ = run_parity(str(folder), only=stage)
    assert report.misses and all(miss.case.startswith(STAGES[stage]) for miss in report.misses), report_text(report)


TRIMMED = {
    "features_b": ("out.prompt_mel24k",),
    "campplus_b": ("out.head0",),
    "s3tokenizer_a": ("out.hidden", "out.codes"),
    "conformer_a": ("out.offline", "out.chunk*_cnn_cache"),
    "estimator_a": ("out.t_embed", "out.chunk0", "out.offline"),
    "cfm_a": ("out.t_span", "out.offline_n4", "out.chunk2"),
    "e2e_a": ("out.base_*", "out.chunk3_mel*", "out.*_estimator_att_mean", "out.offline_mel"),
    "hift_a": ("out.source", "out.uv"),
    "s3gen_estimator_meanflow_b": ("out.estimator",),
    "s3gen_source_a": ("out.uv",),
}


def test_trimmed_tensors_are_not_compared(golden, whole, tmp_path):
    for stem, patterns in TRIMMED.items():
        change(golden, tmp_path / "golden", stem, without(*patterns))
    (full, all_stages), (report, stages) = whole, run_parity(str(tmp_path / "golden"))
    assert not report.misses, report_text(report)
    assert stages == all_stages
    all_checks, kept = ({(check.case, check.name) for check in run.checks} for run in (full, report))
    assert kept < all_checks
    gone = all_checks - kept
    assert {("campplus_b 0", "front end"), ("s3tokenizer_a 1", "codes"), ("cfm_a chunk 2", "mel")} <= gone
    assert {("hift_a", "source"), ("hift_a", "wav"), ("s3gen_source_a", "voiced samples off")} <= gone
    assert {("hift_a", "wav, end to end"), ("e2e_a chunk 4", "mel"), ("cfm_a chunk 4", "mel")} <= kept
    sounds = {case for case, name in kept if name == "sound"}
    assert sounds == {"e2e_a 0"}, "sound builds on the mel before it, chunk 3 has none"


def test_inputs_without_outputs_compare_nothing(golden, tmp_path):
    for stem in set(STAGES.values()):
        change(golden, tmp_path / "golden", stem, without("out.*"))
    report, _ = run_parity(str(tmp_path / "golden"))
    assert not report.misses, report_text(report)
    assert set(report.empty) == STAGES.keys() - {"flow", "s3gen"}  # these check themselves and their settings too


@pytest.mark.parametrize(
    ("stage", "gone"),
    [
        ("features", "in.audio16k"),
        ("campplus", "in.fbank0"),
        ("s3_tokenizer", "in.lens"),
        ("conformer", "in.chunk2"),
        ("conformer", "in.offline_xs"),
        ("estimator", "in.x1"),
        ("cfm", "in.spks"),
        ("cfm", "in.chunk3_mu"),
        ("flow", "in.spk_emb"),
        ("flow", "in.offline_tokens"),
        ("hift", "in.mel"),
        ("hift", "in.cache_source"),
        ("s3gen", "in.z"),
        ("s3gen_source", "in.phase"),
    ],
)
def test_missing_input_fails_with_its_name(golden, tmp_path, stage, gone):
    report, _ = run_parity(str(change(golden, tmp_path / "golden", STAGES[stage], without(gone))), only=stage)
    assert [(miss.case, miss.detail) for miss in report.misses] == [(STAGES[stage], f"missing: {gone}")]


@pytest.mark.parametrize("stage", sorted(STAGES.keys() - {"features"}))
def test_missing_weight_fails(golden, tmp_path, stage):
    stem = STAGES[stage]
    prefix = {"flow": "w.flow.", "vocode": "w.hift."}.get(stage, "w.")
    weights = [name for name in GoldenDir(golden).tensors(stem) if name.startswith(prefix)]
    report, _ = run_parity(str(change(golden, tmp_path / "golden", stem, without(weights[-1]))), only=stage)
    assert report.misses


def test_noise_matches_the_reference():
    expected = torch.tensor([0.9406648, 0.07990704, 0.8282226, 1.34656])
    torch.testing.assert_close(hash_noise((4,), 7), expected, atol=1e-6, rtol=0)
    assert torch.equal(hash_noise((2, 2), 7).flatten(), hash_noise((4,), 7))
