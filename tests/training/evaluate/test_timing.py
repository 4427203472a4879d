"""Times of turns on timelines made by hand: `.` is a silent unit, `x` one that speaks, `e` one that speaks and ends."""

import pytest

from training.evaluate.timing import (
    alert_delay,
    onsets,
    speaks_over,
    start_delay,
    starts_in_time,
    stops_in_time,
)


def units(line: str) -> list[bool]:
    return [unit != "." for unit in line]


@pytest.mark.parametrize(
    ("line", "start", "end", "delay", "in_time", "over"),
    [
        # The sentence is heard in units 3 and 4, and complete in unit 4.
        ("....xxx..", 3.2, 4.6, 0, True, False),
        (".....xx..", 3.2, 4.6, 1, True, False),
        ("......x..", 3.2, 4.6, 2, False, False),
        (".........", 3.2, 4.6, None, False, False),
        ("...xx....", 3.2, 4.6, -1, False, True),
        ("...x.xx..", 3.2, 4.6, -1, False, True),
        # What is said before the sentence is no answer to it.
        (".xx..x...", 3.2, 4.6, 1, True, False),
        # A sentence that ends with its second is complete in that unit.
        ("....x....", 3.2, 5.0, 0, True, False),
        ("....x....", 3.2, 5.01, -1, False, True),
        # A sentence that begins with a second is not heard in the unit before it.
        ("..x..x...", 3.0, 4.6, 1, True, False),
        # A thinking pause from 3.8 to 4.5 does not end the sentence.
        ("....x....", 3.1, 5.4, -1, False, True),
    ],
)
def test_starts(line: str, start: float, end: float, delay: int | None, in_time: bool, over: bool) -> None:
    got = (
        start_delay(units(line), start, end),
        starts_in_time(units(line), start, end),
        speaks_over(units(line), start, end),
    )
    assert got == (delay, in_time, over), f"{line}: expected {(delay, in_time, over)}, got {got}"


@pytest.mark.parametrize(
    ("line", "start", "end", "is_stop", "in_time"),
    [
        # "Stop" is complete in unit 4: silence from unit 5 on.
        ("xxxx.....", 4.1, 4.7, True, True),
        ("xxxxx....", 4.1, 4.7, True, True),
        ("xxxxxx...", 4.1, 4.7, True, False),
        ("xxxx.x...", 4.1, 4.7, True, False),
        ("xxxx....x", 4.1, 4.7, True, False),
        # Another sentence, from 4.1 to 6.7: after 0.3 s the turn ends in unit 4, or unit 5 is silent.
        ("xxxx...xx", 4.1, 6.7, False, True),
        ("xxxxx..xx", 4.1, 6.7, False, True),
        ("xxxxxx.xx", 4.1, 6.7, False, False),
        ("xxxx.x.xx", 4.1, 6.7, False, False),
        ("xxxxxxxxx", 4.1, 6.7, False, False),
        # At 4.8 s, 0.3 s of it are heard in unit 5.
        ("xxxxxx..x", 4.8, 6.7, False, True),
        # A short sentence is complete in unit 5 and answered there: the old turn has to end before.
        ("xxxxexxx.", 4.1, 5.2, False, True),
        ("xxxx.xxx.", 4.1, 5.2, False, True),
        ("xxxxxxxx.", 4.1, 5.2, False, False),
    ],
)
def test_stops(line: str, start: float, end: float, is_stop: bool, in_time: bool) -> None:
    ends = [unit == "e" for unit in line]
    got = stops_in_time(units(line), ends, start, end, len(line), is_stop=is_stop)
    assert got == in_time, f"{line}: expected {in_time}, got {got}"


def test_onsets_and_alerts() -> None:
    line = units("..x....xx.x")
    assert onsets(line) == [2, 7, 10]
    assert [alert_delay(line, shown, len(line)) for shown in (2, 3, 6, 7)] == [0, 4, 1, 0]
    assert alert_delay(line, 3, 7) is None, "expected no unit that speaks before the end"
