"""`python -m benchmarks.tts.frames` on the CPU: one row, and the sizes of the released models."""

import json
from pathlib import Path

import pytest

from benchmarks.tts.frames import main
from tests.parity.golden import GoldenDir


def test_rows(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = GoldenDir(root / "tests" / "golden" / "qwen3_tts")
    folder = golden.model("tiny_b")
    flags = {"config": folder, "device": "cpu", "batch": 1, "rows": 20, "first-rows": 20, "max-len": 30, "repeats": 1}
    flags["json"] = tmp_path / "frames.json"
    main([part for name, value in flags.items() for part in (f"--{name}", str(value))])
    (row,) = json.loads((tmp_path / "frames.json").read_text())["rows"]
    assert (row["mode"], row["batch"], row["frame"]["n"]) == ("eager", 1, 1)
    assert row["frame"]["p50_ms"] > 0 and row["first_codes"]["p50_ms"] > 0 and row["audio_s_per_s"] > 0
    assert capsys.readouterr().out.startswith("mode")


@pytest.mark.parametrize("flags", [["--modes", "kernels_graph"], ["--modes", "fast"], ["--rows", "1000"]])
def test_wrong_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", *flags])
    assert "expected known modes, a device that exists and rows that fit" in capsys.readouterr().err
