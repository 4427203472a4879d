"""Expected units, and the work before them, on a clock of their own."""

from types import SimpleNamespace
from typing import Any

from worker.loop.early.early_pictures import EarlyPictures
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


def test_one_slow_call_does_not_hold_back_later_pictures() -> None:
    """Units of one session each second, pictures half a second before them; work that would end too late waits."""
    now, encoded = [0.0], []

    def encode() -> None:
        encoded.append(now[0])
        now[0] += 5.0 if len(encoded) == 1 else 0.06

    images: Any = SimpleNamespace(has_expected=True, is_busy=False, encode_next=encode)
    pictures = EarlyPictures(images, lambda: now[0])
    job: Any = SimpleNamespace(is_background=False, layout=SimpleNamespace(ids=[0]), session=SimpleNamespace(id="a"))
    for second in range(20):
        now[0] = max(now[0], float(second))
        job.arrived = now[0]
        pictures.count_units([job])
        now[0] += 0.5
        pictures.run([])
    assert len(encoded) == 20, f"expected a picture each second, got {len(encoded)}"
    now[0] = job.arrived + 0.95
    pictures.run([])
    assert len(encoded) == 20 and pictures.is_waiting, "expected no work of 60 ms within the last 50"
