"""The serve benchmark: its arithmetic, and one whole run with a fake worker."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve import __main__ as serve
from benchmarks.serve.processes import ServedProgram, ServeOutcome, Watched


def unit(**given: Any) -> dict[str, Any]:
    """A unit with 10 ms lag, 5 ms engine wait and 85 ms of work, 30 ms of them in the vocoder."""
    stages = {"wait": 5.0, "sound": 30.0, "first_sound": 60.0}
    held = {
        "is_listen": False,
        "reply": 103.0,
        "first": 72.0,
        "n_pieces": 2,
        "lag": 15.0,
        "wall": 90.0,
        "stages": stages,
    }
    return {**held, **given}


def test_unit_time_is_split_by_stage() -> None:
    late = unit(is_listen=True, reply=1500.0, first=None, stages={"wait": 0.0, "sound": 0.0, "first_sound": None})
    outcome = ServeOutcome([unit(), late], 2.0, {"server.main": Watched(0.02, {"rss": 1})})
    row = serve._decision(1, "SPEAK", outcome)
    got = {key: row[key]["p50"] for key in ("waiting_ms", "model_ms", "vocoder_ms", "transport_ms")}
    assert got == {"waiting_ms": 15, "model_ms": 55, "vocoder_ms": 30, "transport_ms": 3}, got
    assert sum(got.values()) == row["reply_ms"]["p50"] and row["n_late"] == 0
    assert serve._decision(1, "LISTEN", outcome)["n_late"] == 1
    assert serve._decision(1, "LISTEN", ServeOutcome([unit()], 2.0, {})) is None
    assert serve._costs(outcome, 2)["cpu_ms_per_session_s"] == {"server.main": 5.0}


def test_first_sound_is_measured_from_the_end_of_speech() -> None:
    first = serve._first_sound(ServeOutcome([unit()], 1.0, {}))
    assert (first["worker_ms"]["p50"], first["transport_ms"]["p50"]) == (70, 2), first
    assert first["from_speech_end_ms"]["p50"] == pytest.approx(500 + 72, abs=1)
    assert first["from_speech_end_ms"]["p95"] == pytest.approx(950 + 72, abs=6)
    assert serve._first_sound(ServeOutcome([unit(first=None)], 1.0, {})) is None


def test_percentiles_of_a_histogram() -> None:
    text = "".join(
        f'duologue_gateway_relay_seconds_bucket{{direction="up",le="{le}"}} {n}\n'
        for le, n in (("0.001", 0), ("0.002", 90), ("0.004", 96), ("+Inf", 100))
    )
    kind = "# TYPE duologue_gateway_relay_seconds histogram\n"
    got = serve._histograms(kind + text)["up"]
    expected = {"p50": 1 + 50 / 90, "p95": 2 + 2 * 5 / 6, "p99": 4}
    assert got == pytest.approx(expected), f"expected {expected}, got {got}"


def test_whole_run_writes_worker_and_gateway_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class FakeWorkerProgram(ServedProgram):
        """Starts the fake worker in place of the worker."""

        def __init__(self, module: str, *arguments: str, **options: Any):
            is_worker = module == serve.WORKER
            super().__init__(
                serve.NULL if is_worker else module, *(("--port", "0") if is_worker else arguments), **options
            )
            self.name = module

    monkeypatch.setattr(serve, "ServedProgram", FakeWorkerProgram)
    file = tmp_path / "serve.json"
    sizes = ["--sessions", "1", "--gateway-sessions", "2", "--recorded-sessions", "2", "--units", "2", "--rounds", "1"]
    serve.main([*sizes, "--json", str(file)])
    result = json.loads(file.read_text())
    listens, whole = result["worker"]
    assert (listens["decision"], listens["n"]) == ("LISTEN", 2) and whole["first_sound"] is None
    assert whole["cpu_ms_per_session_s"].keys() == {"server.main", "worker.main"}
    [row] = result["gateway"]
    assert row["n"] == {"direct": 4, "gateway": 4} and row["sessions"] == 2
    assert row["relay_ms"].keys() == {"up", "down"} and 0 < row["relay_ms"]["up"]["p50"] < 500
    assert row["gateway_memory"]["rss"] > 10e6 and row["gateway_cpu_ms_per_session_s"] >= 0
    assert row["overhead_ms"]["p50"] == row["reply_ms"]["gateway"]["p50"] - row["reply_ms"]["direct"]["p50"]
    without, recorded = result["recorded"]
    assert (without["recorded"], without["n"], recorded["n"]) == (False, 4, 4)
    assert (recorded["lost"], recorded["n_chunks"], recorded["n_unrecorded"]) == (0, 4, 0)
    assert recorded["n_stalls"] >= 0 and recorded["delay_below_ms"] > 0
    out = capsys.readouterr().out
    assert "overhead p50" in out and "LISTEN" in out, out
