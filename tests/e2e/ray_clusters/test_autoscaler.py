"""Ray's autoscaler adds a node for a worker that a session needs, and removes it after the session.

Needs the extra `cluster`: `python -m pytest -m cluster tests/e2e/ray_clusters/test_autoscaler.py`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


def test_nodes_follow_the_number_of_workers(root: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.serve.ray_autoscaler"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert result["nodes at first"] == result["nodes then"] == result["workers then"] == 1, f"got {result}"
    assert result["moved"] == 0, f"expected the session to stay with its worker, got {result}"
