"""The unit benchmark's command: written results, resumed runs, tables. No times are checked."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.compile_options import WAYS
from benchmarks.duplex import __main__ as duplex
from benchmarks.duplex import live_sessions as live_sessions
from benchmarks.duplex.bench_sessions import (
    LISTEN,
)
from benchmarks.duplex.engine import EngineSpec
from benchmarks.duplex.process import JobRunner
from benchmarks.duplex.tables import SUMMARY, format_process, kept_summary, summary, toggle_table
from benchmarks.duplex.utilization import UtilizationMeter
from worker.config.compile import CompileConfig


def test_run_writes_results_and_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, figures = tmp_path / "out.json", tmp_path / "figures.json"
    options = [
        "--device",
        "cpu",
        "--units",
        "1",
        "--context",
        "10",
        "--frames",
        "0",
        "--llm-len",
        "512",
        "--no-warm-up",
    ]
    duplex.main([*options, "--parts", "latency", "--json", str(file), "--summary", str(figures)])
    figures_read, result = json.loads(figures.read_text()), json.loads(file.read_text())
    assert tuple(figures_read) == SUMMARY
    assert figures_read["listen_p95_ms"] > 0 and figures_read["speak_p95_ms"] > figures_read["first_sound_p95_ms"] > 0
    missing = {"sessions_ok", "cold_start_s", "cached_start_s", "peak_gb", "first_sound_32_p95_ms"}
    assert {name for name, value in figures_read.items() if value is None} == missing
    assert (figures_read["recompiles"], figures_read["cudagraph_skips"]) == (0, 0) and "--units 1" in figures_read[
        "command"
    ]
    found = result["processes"]["latency"]
    assert found["is_complete"] and found["process"]["status"] == 0 and found["latency"]["rows"][1]["floor_ms"] > 0
    assert found["start"]["total_s"] > found["start"]["seconds"]["process"] and result["environment"]["torch"]
    assert found["start"]["bytes_of_1000_rows"] > 0 and found["start"]["bytes_of_a_voice_second"] > 0
    assert result["verdicts"][0]["figure"] == figures_read["listen_p95_ms"]
    assert "listen_p95_ms" in capsys.readouterr().out


def test_resume_runs_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    options: list[dict[str, Any]] = []

    def run(processes: Any, job: Any, cache: Path, limit_s: float, tell: Any) -> dict[str, Any]:
        ran.append(job["part"])
        options.append(job["options"])
        is_cut = job["part"] == "correctness" and limit_s < 100
        found = {"process": {"seconds": 1.0, "status": 0, "killed": "killed" if is_cut else ""}, "transcript": {}}
        found |= {"against_eager": against_eager} if is_cut else {}
        tell(dict(found))
        return found

    against_eager = {"n_differ": 0, "n_choices": 1, "n_units": 1, "first": None, "median_gap_of_best_two": None}
    monkeypatch.setattr(JobRunner, "run", run)
    file = tmp_path / "out.json"
    shared = ["--device", "cpu", "--json", str(file), "--folder", str(tmp_path / "folder")]
    duplex.main([*shared, "--parts", "latency,correctness", "--budget-s", "50"])
    assert ran == ["latency", "reference", "correctness", "regions"]
    resumed = [*shared, "--resume", str(file)]
    result = duplex.main([*resumed, "--parts", "latency,correctness"])
    assert ran[4:] == ["correctness"], "expected only the killed process to run again"
    assert options[4]["done"] == {"against_eager": against_eager}, "expected its finished steps to be kept"
    assert result["processes"]["correctness"]["against_eager"] == against_eager
    assert len(result["resumed"]) == 1 and " && " in summary(result)["command"] and result["left_out"] == []
    with pytest.raises(SystemExit):
        duplex.main([*resumed, "--units", "3"])
    duplex.main([*resumed, "--parts", "latency,start"])
    message = "expected the part after its cold start"
    assert ran[5:] == ["start", "latency", "start", "start"], message
    result = duplex.main([*resumed, "--parts", "sessions"])
    assert ran[9:] == ["sessions"] and result["settings"]["parts"] == ["latency", "sessions", "correctness", "start"]


def test_process_is_killed_at_its_limit(tmp_path: Path) -> None:
    job = {"part": "start", "options": {}, "spec": {"way": "eager"}}
    found = JobRunner(tmp_path).run(job, tmp_path / "cache", 0.2, lambda found: None)
    assert "limit" in found["process"]["killed"] and found["process"]["status"] == -9
    assert "killed" in format_process("x", found)[-1]


def test_summary_prefers_starts_with_all_sessions() -> None:
    def started(seconds: float) -> dict[str, Any]:
        return {"start": {"total_s": seconds}}

    processes = {"cold latency": started(1.0), "latency": started(2.0)}
    result = {"processes": processes, "command": ["x"], "environment": {"date": "d", "torch": "t"}}
    assert (summary(result)["cold_start_s"], summary(result)["cached_start_s"]) == (1.0, 2.0)
    processes |= {"cold sessions": started(3.0), "sessions": started(4.0)}
    assert (summary(result)["cold_start_s"], summary(result)["cached_start_s"]) == (3.0, 4.0)
    del processes["cold sessions"], processes["cold latency"]
    assert (summary(result)["cold_start_s"], summary(result)["cached_start_s"]) == (None, None)


def test_summary_of_quantised_weights_is_added_to_that_of_others() -> None:
    late = ("graphs", "graph_breaks", "graph_skips", "cudagraph_skips")
    row = {"mode": "SPEAK", "total_ms": {"p95": 60.0}, "first_sound_ms": {"p95": 50.0}, "late": dict.fromkeys(late, 0)}
    result = {
        "command": ["python", "-m", "benchmarks.duplex", "--weights", "fp8"],
        "environment": {"date": "2026-11-26", "torch": "2.11.0"},
        "settings": {"weights": "fp8"},
        "processes": {"latency": {"latency": {"rows": [row]}}},
    }
    kept = kept_summary(result, {"speak_p95_ms": 87.7, "sessions_fp8": 96})
    assert kept["speak_p95_ms"] == 87.7 and kept["sessions_fp8"] == 96
    assert (kept["speak_fp8_p95_ms"], kept["first_sound_fp8_p95_ms"]) == (60.0, 50.0)
    assert kept["command_fp8"] == "python -m benchmarks.duplex --weights fp8"
    copied = kept_summary({**result, "settings": {"decode_copy": True}}, kept)
    assert (copied["speak_p95_ms"], copied["speak_copy_p95_ms"], copied["speak_fp8_p95_ms"]) == (87.7, 60.0, 60.0)
    none = kept_summary({**result, "processes": {}}, kept)
    assert none == kept, "expected the command of other figures to stay"
    turn = {"sessions": 32, "units": "spread", "order": "first sound first", **row}
    turns = kept_summary({**result, "processes": {"first_sound": {"first_sound": {"rows": [turn]}}}}, kept)
    assert turns["first_sound_32_fp8_p95_ms"] == 50.0 and "first_sound_32_p95_ms" not in turns
    again = kept_summary({**result, "settings": {}}, kept)
    assert (again["speak_p95_ms"], again["speak_fp8_p95_ms"], again["sessions_fp8"]) == (60.0, 60.0, 96)


def test_ways_use_known_settings_and_appear_in_the_toggle_table() -> None:
    for name, way in WAYS.items():
        assert way.config().enabled is (name != "eager")
        unknown = way.compile.keys() - CompileConfig.model_fields.keys()
        assert not unknown, f"{name}: expected settings of CompileConfig, got {unknown}"
    killed = {"toggle ours": {"process": {"killed": "killed at its limit of 1 s"}}}
    assert "killed" in toggle_table(killed)[1]
    ready = {"counts": dict.fromkeys(("graph_breaks", "graphs", "graph_skips", "cudagraph_skips"), 3), "total_s": 87.5}
    killed["toggle ours"]["start"] = {**ready, "fell_back": [], "peak_memory": {"allocated_bytes": 21e9}}
    line = toggle_table(killed)[1]
    assert "killed" in line and "21.0" in line and "87.5" in line and "6 / -" in line, (
        "expected the figures saved before the kill"
    )
    counts = {"graph_breaks": 1, "graphs": 30, "graph_skips": 2, "cudagraph_skips": 5}
    started = {"start": {"counts": counts, "total_s": 1.0, "fell_back": []}, "is_complete": True}
    started["latency"] = {"rows": [{"mode": LISTEN, "late": dict.fromkeys(counts, 1)}], "memory": {}}
    line = toggle_table({"toggle ours": started})[1]
    assert "1 / 1" in line and "30 / 1" in line and "7 / 2" in line
    places = [toggle_table({"toggle ours": started | kept})[1].index(" 1.0 ") for kept in ({}, {"is_kept": True})]
    assert places[0] < places[1], "expected a start from existing kernels in the column of cached starts"


def test_toggles_reuse_kernels_of_a_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[dict[str, Any]] = []

    def run(self: JobRunner, job: dict[str, Any], cache: Path, limit_s: float, tell: Any) -> dict[str, Any]:
        jobs.append(job)
        assert (cache / "kernel").exists() == (cache.parent == tmp_path)
        return {"process": {"seconds": 1.0, "status": 0, "killed": ""}, "is_complete": True}

    monkeypatch.setattr(JobRunner, "run", run)
    (tmp_path / "toggle-inductor").mkdir()
    (tmp_path / "toggle-inductor/kernel").touch()
    part_options = ["--device", "cpu", "--parts", "toggles", "--toggles", "inductor", "--targets", "apm,vpm"]
    found = duplex.main([*part_options, "--cache-dir", str(tmp_path)])
    assert [name for name, one in found["processes"].items() if one.get("is_kept")] == ["toggle inductor"]
    assert EngineSpec(**jobs[0]["spec"]).engine_config().compile.targets == ("apm", "vpm")
    assert len(jobs) == 1 and (tmp_path / "toggle-inductor/kernel").exists()
    (tmp_path / "folder/toggle-inductor").mkdir(parents=True)
    (tmp_path / "folder/toggle-inductor/kernel").touch()
    found = duplex.main([*part_options[:-2], "--folder", str(tmp_path / "folder"), "--no-cached"])
    assert not found["processes"]["toggle inductor"].get("is_kept") and jobs[1]["spec"]["targets"] is None


def test_utilization_counts_cpu_time_of_the_process() -> None:
    with UtilizationMeter(torch.device("cpu")) as busy:
        values = np.arange(2_000_000, dtype=np.float64)
        for _ in range(20):
            values = np.sqrt(values)
    report = busy.report()
    assert report["process_core_percent"] > 20 and report["gpu_percent"] is None and report["gpu_source"] == "no GPU"


def test_rejects_unknown_parts_and_toggles(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--parts", "latency,speed"], ["--toggles", "fastest"]):
        with pytest.raises(SystemExit):
            duplex.parse(wrong)
        assert "expected some of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        duplex.parse(["--weights", "int8", "--parts", "latency,toggles"])
    assert "expected others, got toggles" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        duplex.parse(["--parts", "first_sound", "--seconds", "7"])
    assert "--seconds: expected at least 8, a turn and the silence after it, got 7" in capsys.readouterr().err
    assert duplex.parse(["--weights", "int8", "--device", "cpu"]).parts == duplex.PARTS[:4]
    assert duplex.parse(["--parts", "all", "--device", "cpu"]).parts == duplex.PARTS
    assert SimpleNamespace(way=duplex.parse(["--device", "cpu"]).way).way == "eager"
