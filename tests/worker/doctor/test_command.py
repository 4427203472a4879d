"""The doctor's command: its output and exit status, also with packages that do not import."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.doctor.__main__ import CHECKS, main


def doctor(root: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "worker.doctor", *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, timeout=240)


def test_prints_every_finding(root: Path) -> None:
    done = doctor(root, "--json")
    findings = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert list(findings) == list(CHECKS) and done.returncode == (0 if json.loads(done.stdout)["ok"] else 1)
    for name in ("python", "dependencies", "config", "torch", "ffmpeg", "model", "tokenizer", "vocoder", "voice"):
        assert findings[name]["level"] == "ok", findings[name]
    assert not done.stderr, done.stderr


def test_broken_settings_exit_with_1(root: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"service": {"compiel": true}}')
    done = doctor(root, "--config", str(tmp_path / "config.json"), "--only", "config", "--only", "python")
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and lines[0].startswith("problem  config  setting service.compiel: expected "), done
    assert lines[-1] == "1 problem, 0 note, 1 ok", lines


def test_bad_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--only", "pyhton"], ["--jsn"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "pyhton" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "said", "names"),
    [
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13", list(CHECKS)),
        ("import os; os.kill(os.getpid(), 11)", "the process exited with -11", ["torch", "model"]),
        ("import sys; sys.exit('gave up')", "SystemExit: gave up", ["torch", "model"]),
    ],
)
def test_reports_a_torch_that_does_not_import(
    root: Path, tmp_path: Path, body: str, said: str, names: list[str]
) -> None:
    (tmp_path / "torch.py").write_text(body)
    done = doctor(root, "--json", *(f"--only={name}" for name in names), PYTHONPATH=str(tmp_path))
    findings = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert findings["torch"]["level"] == "problem" and said in findings["torch"]["found"], findings["torch"]
    assert list(findings) == names and done.returncode == 1
    assert findings["model"]["level"] == "ok" and not done.stderr, "expected the other checks to go on"


@pytest.mark.parametrize("module", ["pydantic", "soundfile", "tokenizers", "imageio_ffmpeg"])
def test_runs_without_dependencies(root: Path, tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("raise ImportError('it is broken')")
    names = ("python", "config", "model", "tokenizer", "voice", "ffmpeg", "files")
    done = doctor(root, "--json", *(f"--only={name}" for name in names), PYTHONPATH=str(tmp_path))
    findings = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert list(findings) == list(names) and findings["files"]["found"] and findings["python"]["level"] == "ok", done
    lost = {"pydantic": "config", "soundfile": "voice", "tokenizers": "tokenizer"}.get(module)
    assert lost is None or "it is broken" in findings[lost]["found"], findings


def test_reports_an_old_python(root: Path) -> None:
    code = (
        "import sys; sys.version_info = (3, 9, 1)\n"
        "sys.argv = ['doctor']; exec(compile(open('worker/doctor/__main__.py').read(), 'doctor', 'exec'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout.startswith("problem  python  3.9\n"), done
    ast.parse((root / "worker" / "doctor" / "__main__.py").read_text(), feature_version=(3, 7))


def test_document_lists_every_check(root: Path) -> None:
    text = (root / "docs" / "doctor.md").read_text(encoding="utf-8")
    got = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert got == list(CHECKS), f"expected {list(CHECKS)}, got {got}"
