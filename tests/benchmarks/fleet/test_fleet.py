"""The fleet benchmark: its arithmetic, and its clients through a gateway."""

import asyncio

import pytest

from benchmarks.fleet.__main__ import (
    Used,
    check_limits,
    displacement,
    lines_of,
    on_paper,
    parse,
    ports_in,
    row_of,
    sessions_of_a_core,
)
from benchmarks.fleet.clients import PHASES, FleetLoad, FleetOutcome, run
from benchmarks.fleet.workers import MEASURED, FleetWorker, unit_s
from tests.server.live_gateway import running_gateway


def test_costs_of_phases_are_separated() -> None:
    """A gateway that uses 10 ms a second, 2 ms an admission, 1 ms an idle session-second and 3 ms a unit."""
    load = FleetLoad(("ws://one",), sessions=10, waiting=2, units=4, interval_s=1.0, idle_s=5.0, at_once=2)
    at_s = dict(zip(PHASES, (0, 5, 7, 12, 16, 17, 18), strict=True))
    spent_ms = (0, 50, 20 + 20, 50 + 50, 40 + 40 + 120, 0, 0)
    used, total = {}, 0.0
    for phase, ms in zip(PHASES, spent_ms, strict=True):
        total += ms / 1000
        used[phase] = {"gateway 0": Used(total, 1000 * len(used)), "authority": Used(at_s[phase] / 100, 0)}
    outcome = FleetOutcome([5.0] * 10, [1.0] * 10, [100.0, 1100.0], [1.0, 2.0], [1, 0], 2.0)
    row = row_of(load, 5, used, at_s, outcome)
    got = row["gateway_ms"]
    expected = {"empty_second": 10, "idle_second": 1, "unit": 3}
    assert {name: got[name] for name in expected} == pytest.approx(expected), f"expected {expected}, got {got}"
    assert got["admission"] == pytest.approx(4), "expected 20 ms of admissions and 20 ms of two seconds for 10 sessions"
    assert row["authority_ms"] == pytest.approx({"lease": 0, "idle_second": 10}), f"got {row['authority_ms']}"
    assert row["late"] == 0.5 and row["admissions_per_s"] == 5 and row["gateway_bytes_per_session"] == 300
    assert row["queue"]["displaced"] == {"share": 1, "max": 1} and row["full"] == []
    assert row["sessions_of_a_core"] == pytest.approx((700 - 10) / 4)
    small = {"sessions": 100, "empty_core": 0.1, "gateways": 1, "gateway_gb": 3e-5, "authority_core": 0.1}
    assert on_paper(row, 100) == pytest.approx(small)
    assert on_paper(row, 600)["gateways"] == 4, "expected 600 of 700 ms for 2400 ms of sessions, with 50 polls"
    assert row["paper"][0]["gateways"] is None, "expected no room beside the health of 5000 workers"
    assert "admission 4.00, unit 3.000, idle session-second 1.000, second without sessions 10" in "\n".join(
        lines_of(row)
    )


def test_units_take_the_measured_times() -> None:
    for n, (listen, speak) in MEASURED.items():
        assert unit_s(n) == pytest.approx((listen + speak) / 2)
    assert unit_s(0) == unit_s(1) and unit_s(1000) == unit_s(64)
    assert unit_s(48) == pytest.approx((unit_s(32) + unit_s(64)) / 2)


def test_order_of_the_queue_is_compared_with_the_arrivals() -> None:
    assert displacement([0, 1, 2]) == {"share": 0, "max": 0} and displacement([]) == {"share": 0, "max": 0}
    assert displacement([2, 0, 1]) == {"share": 1, "max": 2}


def test_ports_and_free_gateways() -> None:
    assert ports_in("INFO ports: 1,22\nlistening") == ["127.0.0.1:1", "127.0.0.1:22"]
    assert sessions_of_a_core({"idle_second": 0.0, "unit": 0.0, "empty_second": 0.0}) == 0


def test_more_than_the_machine_holds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"error: (open files|memory): expected .* or more"):
        check_limits(10**9, 1)
    with pytest.raises(SystemExit):
        parse(["--sessions", "4", "--waiting", "5"])
    assert "--waiting: expected at most --sessions (4), got 5" in capsys.readouterr().err


def test_sessions_pass_all_phases(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.fleet.workers.MEASURED", {1: (0.0, 0.0)})

    async def scenario() -> FleetOutcome:
        async with FleetWorker(2, n_listen=1, n_speak=1) as worker, running_gateway(worker) as running:
            url = f"ws://127.0.0.1:{running.port}"
            load = FleetLoad((url,), sessions=2, waiting=2, units=2, interval_s=0.01, idle_s=0.0, at_once=2)
            outcome = await run(load)
            await running.wait_idle()
            assert worker.total_requests == 4, f"expected two units of two sessions, got {worker.total_requests}"
            return outcome

    outcome = asyncio.run(scenario())
    counts = [len(one) for one in (outcome.admission, outcome.prepared, outcome.replies, outcome.waits)]
    assert counts == [2, 2, 4, 2] and outcome.order == [0, 1], f"got {outcome}"
    assert tuple(capsys.readouterr().out.split()) == PHASES
