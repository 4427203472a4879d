"""`python -m benchmarks.tts.codec` on the CPU: rows of every chunk size, and the difference between precisions."""

import json
from pathlib import Path

import pytest

from benchmarks.tts.codec import main
from tests.parity.golden import WEIGHTS, read_tensors
from tests.parity.qwen3_tts.codec import checkpoint


def test_rows_and_differences(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = root / "tests" / "golden" / "qwen3_tts" / "speech_tokenizer"
    tensors, config = read_tensors(folder, WEIGHTS)[0], json.loads((folder / "config.json").read_text())
    with checkpoint(tensors, config) as full:
        flags = {"config": full, "device": "cpu", "precision": "float32,bfloat16", "batch": "2", "frames": "4,8"}
        flags |= {"seconds": 1, "repeats": 1, "json": tmp_path / "codec.json"}
        main([part for name, value in flags.items() for part in (f"--{name}", str(value))])
    result = json.loads((tmp_path / "codec.json").read_text())
    sizes = [(row["precision"], row["batch"], row["frames"]) for row in result["rows"]]
    assert sizes == [(precision, 2, n) for precision in ("float32", "bfloat16") for n in (4, 8)]
    assert all(row["p50_ms"] > 0 and row["audio_s_per_s"] > 0 for row in result["rows"])
    assert len(result["references"]) == 2 and result["difference"]["bfloat16"]["snr_db"] > 20
    assert "bfloat16 against float32: SNR" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--modes", "graph"], ["--modes", "fast"], ["--precision", "int8"]])
def test_wrong_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", *flags])
    assert "expected known precisions and modes" in capsys.readouterr().err
