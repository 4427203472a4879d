"""`python -m benchmarks.tts` with tiny networks on the CPU: rows of every part, figures, budget, errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.tts import models, s3gen
from benchmarks.tts.__main__ import TtsBench, main, parse
from benchmarks.tts.toggles import S3GEN_SERVED, TOGGLES
from models.token2wav.s3gen.region_table import S3Regions, S3Shapes
from models.token2wav.s3gen.synthesizer import S3Synthesizer

SMALL = "--size tiny --device cpu --batch 1 --rates 1000 --seconds 0.001 --requests 2 --frames 2 --tokens 4 --repeats 1"


def run(folder: Path, flags: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    files = [folder / name for name in ("result.json", "summary.json")]
    status = main(["--label", "x", *SMALL.split(), *flags.split(), "--json", str(files[0]), "--summary", str(files[1])])
    result, summary = (json.loads(file.read_text()) for file in files)
    return status, result, summary


def test_parts_have_rows_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = "streams,s3gen,toggles_s3gen,toggles_qwen3_tts"
    status, result, figures = run(tmp_path, f"--parts {parts} --toggles eager")
    assert status == 0 and list(result["parts"]) == parts.split(","), result["parts"]
    streams, s3gen = result["parts"]["streams"], result["parts"]["s3gen"]
    assert (streams["loads"][0]["requests"], streams["loads"][0]["without_sound"]) == (2, 0)
    assert streams["full_slots"]["audio_s_per_s"] == pytest.approx(figures["audio_s_per_s"], abs=0.05)
    (spoken,) = s3gen["ten_steps_speedup"]["utterances"]
    assert (spoken["tokens"], spoken["batch"]) == (4, 1)
    assert figures["s3gen_speedup"] == spoken["speedup"] > 0
    assert {row["component"] for row in s3gen["mean_flow_speedup"]["components"]} == {
        "s3_tokens",
        "s3_speaker",
        "s3_encode",
        "s3_solve",
        "s3_pitch",
        "s3_decode",
    }
    assert figures["frame_ms_1"] > 0 and figures["first_audio_p95_ms_1000rps"] > 0
    for system in ("toggles_s3gen", "toggles_qwen3_tts"):
        row = result["parts"][system]["eager"]
        assert row["rtf"] > 0 and row["latency_ms"] > 0 and row["peak_memory"]["host_bytes"] > 0
    assert "S3Gen eager" in capsys.readouterr().out


def test_budget_and_errors_leave_the_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no device memory")

    monkeypatch.setattr(S3Synthesizer, "speak", fail)
    status, result, _ = run(tmp_path, "--parts equivalence,toggles_s3gen --toggles eager,bf16 --budget-s 1000")
    assert status == 1 and result["parts"]["equivalence"]["error"] == "RuntimeError: no device memory"
    toggles = result["parts"]["toggles_s3gen"]
    assert [row["error"] for row in (toggles["eager"], toggles["bf16"])] == ["RuntimeError: no device memory"] * 2
    status, _, _ = run(tmp_path, "--parts toggles_s3gen --toggles eager")
    assert status == 1, "the row of a toggle fails"
    (tmp_path / "summary.json").write_text('{"s3gen_speedup": 4.0, "command_s3gen": "earlier"}')
    status, result, figures = run(tmp_path, "--parts toggles_s3gen --toggles eager --budget-s 1")
    assert (figures["s3gen_speedup"], figures["command_s3gen"]) == (4.0, "earlier"), "of another command"
    (tmp_path / "summary.json").unlink()
    status, result, figures = run(tmp_path, "--parts streams,s3gen --budget-s 1")
    skipped = [part["skipped"] for part in result["parts"].values()]
    assert skipped == ["budget of 1 s"] * 2, "each part has a share of the budget"
    status, result, _ = run(tmp_path, "--parts streams,s3gen,equivalence --budget-s 14")
    assert [part["skipped"] for part in result["parts"].values()] == [f"budget of {n} s" for n in (8, 13, 14)]
    assert status == 0 and "frame_ms_1" not in figures


def test_s3gen_has_kernels_where_its_components_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(s3gen, "compile_components", lambda *_, kernels, **__: chosen.append(kernels))
    monkeypatch.setattr(S3Regions, "capture", lambda *_: 0)
    model, shapes = models.s3gen("tiny", torch.device("cpu"), torch.float32), S3Shapes((1,), (4,), (12,), (60,))
    for toggle in (S3GEN_SERVED, TOGGLES["kernels_compile"], TOGGLES["all"]):
        s3gen.built(model, shapes, toggle)
    assert chosen == ["fused", "fused", "plain"]
    options = parse(["--label", "x", *SMALL.split()])
    options.toggles, named = tuple(TOGGLES), list[str]()
    monkeypatch.setattr(TtsBench, "_toggle_rows", lambda self, system, names, *_: named.extend(names))
    TtsBench(options, [])._toggles_s3gen({})
    assert {*TOGGLES} - {*named} == {"kernels"}, "it compiles nothing"


@pytest.mark.parametrize("flags", [["--parts", "all"], ["--toggles", "kernels"], ["--rates", "0"]])
def test_wrong_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--label", "x", "--device", "cpu", *flags])
    assert "expected parts of" in capsys.readouterr().err
