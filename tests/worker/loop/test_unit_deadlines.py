"""What other work may take of the engine thread while units are in flight, on a clock of the test."""

import pytest

from worker.loop.order.unit_deadlines import DUE_S, MARGIN_S, UNMEASURED_S, UnitDeadlines

FREE_S = DUE_S - MARGIN_S


def test_without_units_other_work_takes_any_time() -> None:
    deadlines = UnitDeadlines()
    deadlines.watch({}, 5.0)
    assert deadlines.slack_s(5.0) == float("inf")


def test_slack_keeps_the_time_of_the_slowest_recent_unit() -> None:
    deadlines = UnitDeadlines()
    deadlines.watch({"first": 0.0}, 0.0)
    assert deadlines.slack_s(0.0) == pytest.approx(FREE_S - UNMEASURED_S)
    deadlines.count_other(0.1)
    assert deadlines.slack_s(0.2) == pytest.approx(FREE_S - UNMEASURED_S - 0.1), "what was taken is gone"
    deadlines.watch({}, 0.4)  # it took 0.4 s, 0.1 s of it for others
    deadlines.watch({"second": 1.0, "third": 1.2}, 1.2)
    assert deadlines.slack_s(1.2) == pytest.approx(FREE_S - 0.3)
    deadlines.count_other(0.5)
    assert deadlines.slack_s(1.8) == pytest.approx(FREE_S - 0.3 - 0.5)
    assert deadlines.slack_s(2.1) == pytest.approx(FREE_S - 0.6 - 0.5), "a slow unit counts while it runs"


def test_slow_units_are_forgotten() -> None:
    deadlines = UnitDeadlines()
    for arrived, seconds in ((0.0, 0.8), (20.0, 0.2)):
        deadlines.watch({"unit": arrived}, arrived)
        deadlines.watch({}, arrived + seconds)
    deadlines.watch({"unit": 21.0}, 21.0)
    assert deadlines.slack_s(21.0) == pytest.approx(FREE_S - 0.2)
