"""The parity runner on the committed golden data of Qwen3-TTS's codec, and its detection of wrong values."""

from pathlib import Path

import pytest
from torch import Tensor

from tests.golden_copies import change, moved, without
from tests.parity.golden import GoldenDir
from tests.parity.run import CODEC, run_parity

STAGES = {name for name, *_ in CODEC}


@pytest.fixture(scope="module")
def golden(root: Path) -> Path:
    return root / "tests" / "golden" / "qwen3_tts"


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_stage_matches_golden_data(golden: Path, stage: str) -> None:
    report, stages = run_parity(str(golden), only=stage)
    assert stages == [stage]
    assert not report.misses, str(report)
    assert len(report.checks) > 5, "the stage ran but compared little"


WRONG = {
    "speech_decoder": {"offline": 1e-5, "n12.pre_transformer": 1e-4},
    "speech_encoder": {"w0.codes": 1, "batch.codes1_alone": 1, "w0.downsample": 1e-3},
    "speaker_encoder": {"w0.mel_every8": 1e-3, "w0.block2": 1e-4, "w0.embedding": 1e-4},
}
MISSES = {
    "speech_decoder": {"sound", "sound in chunks", "pre_transformer"},
    "speech_encoder": {"w0: codes", "w0: codes, in a batch", "batch: codes", "batch: codes, in a batch", "w0: frames"},
    "speaker_encoder": {"log-mel", "blocks.2", "vector", "vector, in a batch"},
}


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_wrong_values_fail(golden: Path, tmp_path: Path, stage: str) -> None:
    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, by in WRONG[stage].items():
            tensors = moved(name, by)(tensors)
        return without("long.*")(tensors)  # the longest part of a run

    report, _ = run_parity(str(change(golden, tmp_path / "golden", stage, edit)), only=stage)
    assert {miss.name for miss in report.misses} == MISSES[stage], str(report)


@pytest.mark.parametrize(
    ("stage", "gone"), [("speech_decoder", "codes"), ("speech_encoder", "w1.wave_q"), ("speaker_encoder", "w0.wave_q")]
)
def test_missing_input_fails_with_its_name(golden: Path, tmp_path: Path, stage: str, gone: str) -> None:
    report, _ = run_parity(str(change(golden, tmp_path / "golden", stage, without(gone))), only=stage)
    assert [(miss.case, miss.detail) for miss in report.misses] == [(stage, f"missing: {gone}")]


def test_golden_sizes_differ_from_released_sizes(golden: Path) -> None:
    """A constant hard-coded from the released model fails these cases."""
    shapes = {name: tuple(tensor.shape) for name, tensor in GoldenDir(golden).tensors("speech_decoder").items()}
    assert shapes["n12.quantized"] == (1, 32, 12) and shapes["n12.pre_transformer"] == (1, 12, 48)
