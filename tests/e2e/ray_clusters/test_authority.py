"""The authority of a cluster with Ray ends in three ways under live sessions, and keeps its leases and its queue.

Needs the extra `cluster`: `python -m pytest -m cluster tests/e2e/ray_clusters/test_authority.py`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.processes import free_ports

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


def test_leases_and_queue_outlive_every_death_of_the_authority(root: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "benchmarks.serve.ray_authority", "--pace-s", "3", "--port", str(port)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    deaths = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["started again by"] for one in deaths] == ["the controller", "Ray", "Ray"], f"got {deaths}"
    for one in deaths:
        assert one["terms"][1] == one["terms"][0] + 1, f"expected one start, got {one}"
        assert one["leases"] == [2, 2] and one["queue_length"] == [1, 1], f"expected the same tickets, got {one}"
        assert one["moved or ended"] == 0, f"expected the sessions to stay where they are, got {one}"
