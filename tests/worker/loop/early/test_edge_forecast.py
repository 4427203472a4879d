"""Expected units, on a clock of their own."""

from worker.loop.early.edge_forecast import GRACE_S, MARGIN_S, MAX_MARGIN_S, UNIT_S, EdgeForecast


def test_units_are_expected_a_second_after_the_last_one() -> None:
    forecast = EdgeForecast()
    assert not forecast.is_near(5.0)
    forecast.count("a", 5.0)
    due = 5.0 + UNIT_S
    times = (5.0, due - 2 * MARGIN_S, due - MARGIN_S / 2, due, due + GRACE_S / 2, due + 2 * GRACE_S)
    assert [forecast.is_near(now) for now in times] == [False, False, True, True, True, False]
    forecast.count("a", 5.5)
    assert not forecast.is_near(due - MARGIN_S / 2) and forecast.is_near(due + 0.5 - MARGIN_S / 2)
    forecast.forget("a")
    assert not forecast.is_near(due + 0.5 - MARGIN_S / 2)


def test_work_has_to_be_done_before_the_unit_but_gets_most_of_a_second() -> None:
    forecast = EdgeForecast()
    forecast.count("a", 5.0)
    due = 5.0 + UNIT_S
    for work_s, margin_s in ((0.0, MARGIN_S), (0.06, 0.06), (5.0, MAX_MARGIN_S)):
        assert not forecast.is_near(due - margin_s - 0.001, work_s) and forecast.is_near(due - margin_s + 0.001, work_s)
