"""`scripts/setup_env.sh` installs only what a folder does not have."""

import hashlib
import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("installed", "wanted", "installs"),
    [("run", "", False), ("dev", "dev", False), ("dev", "", False), ("run", "dev", True), (None, "", True)],
)
def test_installs_nothing_twice(root: Path, tmp_path: Path, installed: str | None, wanted: str, installs: bool) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    python = tmp_path / ".venv" / "base" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ncat >/dev/null\necho "$@" >>calls\n')
    python.chmod(0o755)
    if installed is not None:
        digest = hashlib.sha256((tmp_path / "pyproject.toml").read_bytes()).hexdigest()[:16]
        (tmp_path / ".venv" / "base" / f".installed-{installed}-{digest}").touch()
    program = f"set -euo pipefail; source {root}/scripts/setup_env.sh; setup_env {wanted}"
    subprocess.run(["bash", "-c", program], cwd=tmp_path, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    assert (tmp_path / "calls").exists() == installs
