"""precompile.py: flags, output, report files and errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from models.checkpoint.embedded import DEFAULT
from models.errors import SettingsError
from precompile import FAILED, USAGE, gpu, main, parser, settings
from worker.compile.state import CompileResult, TargetPhase, TargetState
from worker.config.compile import TARGETS
from worker.config.service import INDUCTOR_VARIABLE
from worker.config.settings import SettingError
from worker.report.compile_report import CompileReport

QUICK = ["--no-compile", "--device", "cpu", "--max-sessions", "1", "--max-warmup-chunks", "1"]


def run(root: Path, *words: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith("DUOLOGUE_")}
    command = [sys.executable, "precompile.py", *words]
    environ = {**plain, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1", **(environ or {})}
    return subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=120)


def test_loads_warms_up_and_writes_reports(root: Path, tmp_path: Path) -> None:
    report = tmp_path / "start.json"
    done = run(root, *QUICK, "--report", str(report), environ={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    assert done.returncode == 0, done.stderr
    steps = [int(number) for number in re.findall(r"\[warmup\] \((\d)/6\)", done.stderr)]
    assert steps == [1, 2, 3, 4, 5, 6], done.stderr
    assert len(re.findall(r"\[warmup\] unit=1/1 ", done.stderr)) == 1, done.stderr
    assert "✓ omni duplex warmup complete" in done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"load \d+\.\d s, warm up \d+\.\d s, checksums \d+\.\d s", lines[0]), done.stdout
    assert lines[1] == "compile cache: not used"
    [at] = [number for number, line in enumerate(lines) if line.startswith("target ")]
    assert [line.split()[:2] for line in lines[at + 1 : at + 8]] == [[name, "off"] for name in TARGETS]
    assert lines[-1] == f"report: {report}"
    written = CompileReport.from_json(report.read_text())
    assert [row.name for row in written.rows] == list(TARGETS) and not written.problems(), written
    assert written.header.what.endswith(DEFAULT.name) and written.header.settings["enabled"] is False
    assert (tmp_path / "cache" / "voices").is_dir(), "expected the environment's cache folder to be used"


def test_ends_after_the_exit_functions_without_teardown(root: Path) -> None:
    lines = (
        "import atexit, precompile",
        "class Leaked:",
        "    def __del__(self): print('torn down')",
        "leaked = Leaked()",
        "atexit.register(precompile._end, [3])",
        "atexit.register(print, 'exit function')",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "exit function\n", "")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` changes neither the log nor the threads of this process."""
    monkeypatch.setattr("worker.assembly.backend_flags.limit_threads", lambda device: None)
    monkeypatch.setattr("precompile.log.set_up", lambda level: None)
    monkeypatch.setitem(os.environ, INDUCTOR_VARIABLE, "")


@pytest.mark.usefixtures("in_this_process")
def test_missing_video_fails_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--warmup-video", str(tmp_path / "none.mp4")]) == FAILED
    shown = capsys.readouterr()
    error = shown.err.splitlines()[-1]
    assert str(tmp_path / "none.mp4") in error and "assets/build_warmup.py" in error, error
    assert not shown.out, f"expected nothing but the error, got {shown.out}"


def test_flags_set_settings(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"service": {"compile": False, "max_warmup_chunks": 7}, "model": {"model_path": "m"}}))
    words = "--model-path /m --pt-path /w.pt --ref-audio-path /v.wav --mode max-autotune --max-warmup-chunks 3"
    words += " --warmup-video /v.mp4 --attn-implementation sdpa --max-sessions 2 --gpu-id 1"
    config, _ = settings(parser().parse_args(["--config", str(file), *words.split()]), {})
    model, service = config.model, config.service
    assert (str(model.model_path), str(model.pt_path), str(config.audio.ref_audio_path)) == ("/m", "/w.pt", "/v.wav")
    assert (service.compile.mode, service.max_warmup_chunks, str(service.warmup_video)) == ("max-autotune", 3, "/v.mp4")
    assert (config.compile.attention, config.duplex.max_sessions) == ("sdpa", 2)
    assert service.compile.enabled, "expected compilation on, although the file turns it off"
    config, _ = settings(parser().parse_args(["--config", str(file), "--no-compile"]), {})
    assert (config.service.compile.enabled, config.service.max_warmup_chunks) == (False, 7)
    assert config.model.model_path == tmp_path / "m"
    assert parser().parse_args([]).gpu_id == 0


def test_invalid_flags_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("precompile.log.set_up", lambda level: None)
    for words, expected in (
        (["--max-warmup-chunks", "0"], "service.max_warmup_chunks"),
        (["--config", str(tmp_path / "none.json")], "none.json"),
        (["--gpu-id", "-1"], "--gpu-id"),
        (["--report", str(tmp_path / "no" / "report.json")], "--report"),
        (["--log-level", "LOUD"], "log level"),
    ):
        assert main(words) == USAGE, f"{words}: expected exit status {USAGE}"
        error = capsys.readouterr().err
        assert error.startswith("error: ") and expected in error, f"{words}: expected {expected}, got {error}"
    with pytest.raises(SettingError, match=r"duplex\.max_sessions"):
        settings(parser().parse_args(["--max-sessions", "0"]), {})


@pytest.mark.parametrize(
    ("number", "visible", "expected"),
    [(0, None, "0"), (3, None, "3"), (0, "2,3", "2"), (1, "2,3", "3"), (0, "", ""), (1, "GPU-a,GPU-b", "GPU-b")],
)
def test_selected_gpu_becomes_visible(number: int, visible: str | None, expected: str) -> None:
    assert gpu(number, visible) == expected


@pytest.mark.parametrize(("number", "visible"), [(2, "2,3"), (-1, None)])
def test_invisible_gpu_is_refused(number: int, visible: str | None) -> None:
    with pytest.raises(SettingsError, match="--gpu-id"):
        gpu(number, visible)


def test_settings_are_checked_before_torch_loads(root: Path) -> None:
    code = "import sys, precompile; precompile.parser(); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"expected torch unloaded, got {done.stderr or 'it loaded'}"


@pytest.mark.parametrize(
    ("phase", "error", "lost", "status"),
    [
        (TargetPhase.KERNELS, None, [], 0),
        (TargetPhase.KERNELS, "no code", [], FAILED),
        (TargetPhase.FELL_BACK, "no code", [], FAILED),
        (TargetPhase.COMPILED, None, ["vocoder"], FAILED),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_fallback_is_printed_and_fails(
    capsys: pytest.CaptureFixture[str],
    monkeypatch,
    phase: TargetPhase,
    error: str | None,
    lost: list[str],
    status: int,
) -> None:
    compile_result = CompileResult(
        {"apm": TargetState("apm", phase, error=error)}, notes=["something to know"], failed_kernels=lost
    )
    report = SimpleNamespace(table=lambda: "a table")
    engine = SimpleNamespace(close=lambda: None)
    started = SimpleNamespace(
        targets=compile_result.targets,
        compile_result=compile_result,
        report=report,
        engine=engine,
        seconds={},
        cache=None,
    )
    monkeypatch.setattr("worker.start.starting.start_engine", lambda *_, **__: started)
    assert main(["--no-compile", "--device", "cpu"]) == status
    lines = capsys.readouterr().err.splitlines()
    assert "note: something to know" in lines
    assert ("error: apm fell back: no code" in lines) == (error is not None)
