"""Slopes over hours and their verdicts."""

import numpy as np
import pytest

from benchmarks.soak.__main__ import Soak, parse
from benchmarks.soak.clients import UnitTime
from benchmarks.soak.sampler import left_over, note_other_programs
from benchmarks.soak.slopes import BoundVerdict, Slope, _student

SECONDS = np.arange(0, 7200, 15.0)


def samples(per_hour: float, noise: float) -> np.ndarray:
    return 500 + per_hour * SECONDS / 3600 + np.random.default_rng(3).normal(0, noise, len(SECONDS))


@pytest.mark.parametrize(
    ("per_hour", "noise", "expected"),
    [
        (0.2, 0.5, BoundVerdict.HOLDS),
        (3.0, 0.5, BoundVerdict.FAILS),
        (0.9, 5.0, BoundVerdict.UNCLEAR),  # the interval is wider than the bound
        (-4.0, 0.5, BoundVerdict.HOLDS),
    ],
)
def test_a_slope_is_judged_by_its_interval(per_hour: float, noise: float, expected: BoundVerdict) -> None:
    slope = Slope.of(SECONDS, samples(per_hour, noise))
    assert slope.low < per_hour < slope.high, f"expected {per_hour} within the interval, got {slope}"
    assert slope.verdict(1.0) is expected, f"expected {expected}, got {slope}"


def test_too_few_samples_have_no_slope() -> None:
    assert Slope.of([], []) is None
    assert Slope.of([0, 1, 2, 3], [1, 2, 3, 4]) is None


@pytest.mark.parametrize(("free", "expected"), [(3, 3.182), (5, 2.571), (18, 2.101), (1000, 1.962)])
def test_quantiles_of_student(free: int, expected: float) -> None:
    assert _student(free) == pytest.approx(expected, rel=0.01)


def test_windows_know_the_load_of_other_programs() -> None:
    windows = [{"s": 5.0}, {"s": 15.0}, {"s": 25.0}]
    samples = [{"s": 1.0, "other_cpu": None}, {"s": 6.0, "other_cpu": 0.5}, {"s": 9.0, "other_cpu": 0.1}]
    note_other_programs(windows, [*samples, {"s": 12.0, "other_cpu": 0.0}], 10.0)
    assert [window["other_cpu"] for window in windows] == [pytest.approx(0.3), 0.0, None]


def test_disturbed_windows_have_no_say_in_slopes_of_unit_times() -> None:
    soak = Soak(parse(["--minutes", "20", "--warm", "0"]), [])
    disturbed = range(300, 600)
    soak._began = 0.0
    soak._units = [UnitTime(float(at), 500.0 if at in disturbed else 1.0, False, True) for at in range(1200)]
    loads = [{"s": float(at), "other_cpu": 1.5 if at in disturbed else 0.0} for at in range(0, 1200, 15)]
    soak.result["samples"] = [{**row, "gateway": {}, "worker": {}} for row in loads]
    soak._judge()
    assert soak.result["n_disturbed"] == 5, soak.result["windows"]
    [p99] = [row for row in soak.result["verdicts"] if row["name"] == "unit listen p99"]
    assert (p99["mean"], p99["verdict"]) == (1.0, BoundVerdict.HOLDS), p99


def test_what_is_left_over() -> None:
    before = {"gateway": {"fds": 9, "slots_free": 2, "queue": 0}, "worker": {"fds": 11, "slots_free": 2}}
    after = {"gateway": {"fds": 8, "slots_free": 1, "queue": 0}, "worker": {"fds": 12, "slots_free": 2}}
    assert left_over(before, before) == []
    assert left_over(before, after) == [
        "gateway slots_free: expected 2, got 1",
        "worker fds: expected 11, got 12",
    ]
