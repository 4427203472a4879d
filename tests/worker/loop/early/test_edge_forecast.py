"""Expected units, on a clock of their own."""

from worker.loop.early.edge_forecast import MARGIN_S, UNIT_S, EdgeForecast


def test_units_are_expected_a_second_after_the_last_one() -> None:
    forecast = EdgeForecast()
    assert not forecast.is_near(5.0)
    forecast.count("a", 5.0)
    due = 5.0 + UNIT_S
    near = [forecast.is_near(now) for now in (5.0, due - 2 * MARGIN_S, due - MARGIN_S / 2, due, due + 0.001)]
    assert near == [False, False, True, True, False]
    forecast.count("a", 5.5)
    assert not forecast.is_near(due - MARGIN_S / 2) and forecast.is_near(due + 0.5 - MARGIN_S / 2)
    forecast.forget("a")
    assert not forecast.is_near(due + 0.5 - MARGIN_S / 2)
