"""Verdicts of the unit benchmark's figures."""

import math
from typing import Any

from benchmarks.duplex.bench_sessions import LISTEN, SPEAK
from benchmarks.duplex.verdicts import format_verdicts, verdicts


def test_verdicts_follow_the_bounds() -> None:
    def row(p95: float) -> dict[str, Any]:
        none = dict.fromkeys(("graphs", "graph_breaks", "graph_skips", "cudagraph_skips"), 0)
        return {"total_ms": {"p95": p95}, "first_sound_ms": {"p95": p95}, "late": none}

    def region(relative: float, n_alike: int = 2) -> dict[str, Any]:
        error = {"alike_relative": relative, "alike_mean": relative, "alike_largest": relative, "error": ""}
        return {"n": 2, "n_alike": n_alike, **error}

    rows = [{"mode": LISTEN, **row(20.0)}, {"mode": SPEAK, **row(100.0)}]
    first = {"ids": None, "codes": None, "sound": 3}
    served, unordered = ({"sessions": 32, "units": "spread", "order": one} for one in ("first sound first", "none"))
    turns = [{**unordered, **row(150.0)}, {**served, **row(170.0)}]
    processes = {
        "first_sound": {"first_sound": {"rows": turns}},
        "latency": {"latency": {"rows": rows, "memory": {}}},
        "correctness": {
            "identity": {"two_runs": {"first": first}, "with_neighbours": {"first": first}},
            "regions": {"1": {"omni": {"a": region(0.01), "b": region(math.nan), "c": region(1.0, n_alike=0)}}},
        },
        "float32": {"regions": {"1": {"omni": {"a": region(2e-6)}}}},
    }
    result = {"processes": processes, "command": ["x"], "environment": {"date": "d", "torch": "t"}}
    judged = {one["what"]: (one["passes"], one["reaches_aim"]) for one in verdicts(result)}
    assert judged["LISTEN unit, p95"] == (True, False) and judged["first sound, p95"] == (False, False)
    assert judged["live sessions, below 0.1 % misses"] == (None, None)
    assert judged["first sound, p95, 32 sessions, half speaking"] == (False, None), "expected the ordered row's 170"
    assert judged["two runs: of ids, codes, sound differ"] == (False, None)
    assert judged["with neighbours: of ids differ"] == (True, None), "expected no verdict on sound beside neighbours"
    assert judged["region a: |d|/|ref|"] == (True, None) and judged["region b: |d|/|ref|"] == (False, None)
    assert judged["region c: |d|/|ref|"] == (None, None), "expected no verdict without a call alike"
    assert judged["float32, against eager: mean |d|"] == (False, None)
    assert judged["float32, against eager: largest |d|"] == (True, None)
    lines = format_verdicts({**result, "settings": {}})
    assert any("first sound" in line and "FAIL" in line for line in lines)
