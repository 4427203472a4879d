"""A worker's HTTP routes during sessions: health, readiness, metrics."""

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.worker.http.client_scripts import ALOUD, QUIET, chunk
from tests.worker.http.processes import WorkerProcess
from tests.worker.http.scripted_client import ScriptedClient
from tests.worker.http.small_worker import N_SLOTS
from worker.protocol.messages import Result

pytestmark = pytest.mark.usefixtures("all_slots_free")


def counted(worker: WorkerProcess) -> dict[str, float]:
    """All samples of /metrics by name and labels."""
    status, text = worker.ask("/metrics")
    assert status == 200
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "le")
            found[f"{sample.name.removeprefix('duologue_worker_')}{{{labels}}}"] = sample.value
    return found


def test_health_answers_while_units_run(worker: WorkerProcess) -> None:
    idle = worker.health()
    got = idle["worker_status"], idle["state"], idle["slots"], idle["kv"]["used"], idle["sessions"]
    assert got == ("idle", "IDLE", {"total": 3, "free": 3, "paused": 0}, 0, []), f"idle: got {got}"
    assert (idle["status"], idle["model_loaded"]) == ("healthy", True)
    assert idle["kv"]["layout"] == "slots", f"expected what auto means on a CPU, got {idle['kv']}"
    assert idle["model"]["precision_label"] == "bf16"
    assert idle["model"]["converted_to"] is None, "expected a checkpoint as it was published"
    with ScriptedClient(worker, "busy") as client, ScriptedClient(worker, "busy") as other:
        other.prepare(QUIET)
        other.unit(0)
        client.prepare(ALOUD)
        for number in range(4):
            client.send(chunk(number))
        slowest, bodies = 0.0, []
        for _ in range(10):
            begun = time.monotonic()
            bodies.append(worker.health())
            slowest = max(slowest, time.monotonic() - begun)
            time.sleep(0.02)
        results = [client.expect(Result) for _ in range(4)]
        assert slowest < 5, f"expected an answer at once, if the machine is not busy, got one after {slowest:.2f} s"
        for body in bodies:
            got = body["worker_status"], body["state"], body["slots"]["free"], body["current_session_id"]
            assert got == ("duplex_active", "BUSY", 1, "busy"), f"busy: got {got}"
        body = worker.health()
        rows = [one["kv_rows"] for one in body["sessions"]]
        assert body["kv_cache_length"] == max(rows) >= results[-1].kv_cache_length, (
            f"got {body['sessions']}, {results[-1]}"
        )
        assert body["kv"]["used"] == sum(rows) and min(rows) > 0, f"two of one name: expected both counted, got {body}"
        assert sorted(one["units"] for one in body["sessions"]) == [1, 4], f"got {body['sessions']}"


def test_livez_and_readyz(worker: WorkerProcess) -> None:
    assert worker.ask("/livez") == (200, {"alive": True, "error": None})
    assert worker.ask("/readyz") == (200, {"ready": True, "state": "IDLE", "free_slots": 3})
    assert worker.ask("/nothing")[0] == 404


def test_metrics_count_sessions_and_units(worker: WorkerProcess) -> None:
    before = counted(worker)
    with ScriptedClient(worker) as client:
        client.prepare({**QUIET, "force_listen_count": 1})
        client.units(range(3))
        client.send("nonsense")
        client.expect_error("bad_json")
        running_now = counted(worker)
        client.stop()
    worker.wait_free(N_SLOTS)
    after = counted(worker)

    def moved(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    expected = {
        "units_total{decision=listen}": 1,
        "units_total{decision=speak}": 2,
        "unit_seconds_count{decision=speak}": 2,
        "stage_seconds_count{stage=prefill}": 3,
        "lag_seconds_count{}": 3,
        "errors_total{code=bad_json}": 1,
        "sessions_total{}": 1,
        "sessions_ended_total{how=stopped}": 1,
    }
    got = {name: moved(name) for name in expected}
    assert got == expected, f"expected {expected}, got {got}"
    names = ("slots{kind=free}", "state{state=BUSY}", "state{state=IDLE}", "context_rows{kind=total}")
    got = [running_now[name] for name in names]
    assert got[:3] == [2, 1, 0] and got[3] > 0 < running_now["context_rows{kind=used}"], f"while it runs: got {got}"
    assert after["context_rows{kind=used}"] == 0, "expected no tokens after the last session"
    assert after["memory_bytes{kind=resident}"] > 10**8
