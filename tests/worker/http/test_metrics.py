"""The worker's metrics and their documentation."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from worker.http.metrics import PREFIX, SECONDS, WorkerMetrics
from worker.loop.results import PlaybackGap, StageTimes, UnitResult
from worker.protocol.messages import Result


def health(state: str = "IDLE") -> dict:
    """The part of the /health body that the metrics read."""
    return {
        "state": state,
        "slots": {"total": 2, "free": 1, "paused": 0},
        "admission": {"allocated": 4, "capacity": 2, "excess": 1, "slowdown": 1.5, "p99_ms": 640.0},
        "kv": {"used": 90, "total": 16384},
        "memory": {"resident": 5},
        "kept_sessions": 1,
        "journal_bytes": 4096,
        "models": {
            "speech": {"slots": {"total": 4, "free": 3}, "frames": 12, "late_sounds": 1},
            "conversion": {"slots": {"total": 16, "free": 15}, "batches": 2, "pieces": 5},
        },
        "early_pictures": {"encoded": 7, "used": 6, "fed": 5, "spent_ms": 80.0},
        "model": {"weights": {"bytes": 6e9, "seconds": 2.0, "gb_per_s": 3.0}},
        "compile": {
            "counts": {"graphs": 7},
            "after_warm_up": {"graphs": 0, "recompiles": 2},
            "targets": {"vpm": {"phase": "eager"}, "apm": {"phase": "compiled"}},
            "regions": {"vision": {"n_graphs": 8}, "reset": {"n_graphs": 0}},
            "cache": {"hits": 3, "misses": 1},
        },
        "start_seconds": {"LOADING": 1.5},
    }


def samples(metrics: WorkerMetrics, **given: str) -> dict[tuple[str, tuple], float]:
    families = text_string_to_metric_families(metrics.text(health(**given)).decode())
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


def unit(is_listen: bool, headroom_ms: float, first_sound: float | None = None) -> tuple[UnitResult, Result]:
    times = StageTimes(hear=12.0, decode=30.0, first_sound=first_sound)
    event = UnitResult("me", 1, is_listen, "", False, times=times)
    message = Result(
        is_listen=is_listen,
        current_time=1,
        cost_all_ms=30.0,
        server_send_ts=0.0,
        wall_clock_ms=44.0,
        kv_cache_length=9,
        lag_ms=4.0,
        headroom_ms=headroom_ms,
    )
    return event, message


def test_counts_units_by_decision():
    metrics = WorkerMetrics()
    metrics.unit(*unit(True, 900.0))
    spoken, message = unit(False, 800.0, first_sound=60.0)
    spoken.times.gaps.append(PlaybackGap(0.25, "engine"))
    metrics.unit(spoken, message)
    metrics.unit(*unit(False, -1.0, first_sound=70.0))
    event, message = unit(True, 900.0)
    metrics.unit(replace(event, is_incomplete=True), message)  # a piece of a unit
    got = samples(metrics)
    for name, labels, expected in (
        ("units_total", (("decision", "listen"),), 1),
        ("units_total", (("decision", "speak"),), 2),
        ("deadline_misses_total", (), 1),
        ("first_sound_seconds_count", (), 2),
        ("first_sound_seconds_sum", (), 0.13),
        ("playback_gap_seconds_sum", (("cause", "engine"),), 0.25),
        ("stage_seconds_sum", (("stage", "decode"),), 0.09),
        ("unit_seconds_count", (("decision", "speak"),), 2),
        ("lag_seconds_sum", (), 0.012),
    ):
        value = got[(f"{PREFIX}_{name}", labels)]
        assert value == pytest.approx(expected), f"{name}{labels}: expected {expected}, got {value}"
    early = {"speculations": 0, "committed": 0, "wasted_ms": 0}
    assert metrics.totals == {"requests": 3, "ms": pytest.approx(132.0), **early}


def test_counts_early_pictures():
    got = samples(WorkerMetrics())
    kinds = {kind: got[(f"{PREFIX}_early_pictures", (("kind", kind),))] for kind in ("encoded", "used", "fed")}
    assert kinds == {"encoded": 7, "used": 6, "fed": 5} and got[(f"{PREFIX}_early_pictures_seconds", ())] == 0.08


def test_exactly_one_state_is_set():
    metrics = WorkerMetrics()
    for state in ("LOADING", "IDLE"):
        got = samples(metrics, state=state)
        ones = [labels for (name, labels), value in got.items() if name == f"{PREFIX}_state" and value]
        assert ones == [(("state", state),)], f"expected {state} alone, got {ones}"


def test_shows_target_that_fell_back():
    got = samples(WorkerMetrics())
    assert got[(f"{PREFIX}_compile_target", (("phase", "eager"), ("target", "vpm")))] == 1
    assert got[(f"{PREFIX}_compile_target", (("phase", "eager"), ("target", "apm")))] == 0


def test_shows_graphs_cache_and_weights():
    got = samples(WorkerMetrics())
    for name, labels, expected in (
        ("region_graphs", (("region", "vision"),), 8),
        ("region_graphs", (("region", "reset"),), 0),
        ("kept_sessions", (), 1),
        ("journal_bytes", (), 4096),
        ("compile_cache", (("what", "hits"),), 3),
        ("compile_cache", (("what", "misses"),), 1),
        ("compiled_after_warm_up", (("what", "recompiles"),), 2),
        ("weights_load", (("what", "bytes"),), 6e9),
        ("weights_load", (("what", "seconds"),), 2.0),
        ("weights_load", (("what", "gb_per_s"),), 3.0),
    ):
        value = got[(f"{PREFIX}_{name}", labels)]
        assert value == expected, f"{name}{labels}: expected {expected}, got {value}"


def test_documentation_lists_exactly_all_metrics(root: Path):
    text = (root / "docs" / "metrics.md").read_text(encoding="utf-8").split("\n## The gateway")[0]
    documented = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    metrics = WorkerMetrics()
    registered = {family.name.removeprefix(f"{PREFIX}_") for family in metrics.registry.collect()}
    kinds = {family.name.removeprefix(f"{PREFIX}_"): family.type for family in metrics.registry.collect()}
    expected = {f"{name}_total" if kinds[name] == "counter" else name for name in registered}
    assert documented == expected, f"expected {sorted(expected)}, got {sorted(documented)}"
    buckets = text.split("in seconds:")[1].split(".\n")[0].replace("\n", " ").rstrip(".")
    assert [float(one) for one in buckets.split(",")] == list(SECONDS)


def test_shows_how_many_sessions_are_admitted() -> None:
    found = samples(WorkerMetrics())
    got = [found[f"{PREFIX}_admission", (("kind", kind),)] for kind in ("allocated", "capacity", "excess")]
    assert got == [4, 2, 1], got
    assert found[f"{PREFIX}_admission_slowdown", ()] == 1.5
    assert found[f"{PREFIX}_recent_unit_p99_seconds", ()] == 0.64
