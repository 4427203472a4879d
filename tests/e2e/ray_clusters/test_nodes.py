"""A cluster with Ray on this machine: a node is killed under live sessions, workers are added and removed.

Needs the extra `cluster`: `python -m pytest -m cluster tests/e2e/ray_clusters/test_nodes.py`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]


def test_sessions_outlive_a_node_and_the_number_of_workers_follows_them(root: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.serve.ray_cluster", "--pace-s", "3"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    parts = {
        one["part"]: one for one in map(json.loads, filter(lambda line: line[:1] == "{", done.stdout.splitlines()))
    }
    death, scaling = parts["node killed"], parts["scaling"]
    assert death["moved"] >= death["of the killed worker"] > 0, f"expected its sessions to move, got {death}"
    assert death["ended"] == 0, f"expected no session to end, got {death}"
    assert scaling["moved or ended"] == 0, f"expected the first sessions to stay with their worker, got {scaling}"
