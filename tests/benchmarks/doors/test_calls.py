"""The benchmark of WebRTC calls with one short call."""

import json
from pathlib import Path

from benchmarks.doors import calls


def test_a_call_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "calls.json"
    calls.main(["--calls", "1", "--seconds", "1", "--client-processes", "1", "--json", str(file)])
    [row] = json.loads(file.read_text())["rows"]
    assert row["processes"] == 1 and 0 < row["peer_cpu_ms"] < 1000 and row["gateway_cpu_ms"] > 0, row
    assert row["received"] > 0.5, f"expected most of the packets, got {row}"
