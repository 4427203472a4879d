"""The delay that a player of a turn needs."""

import pytest

from benchmarks.playback import needed_delay


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([], 0.0),
        ([(5.0, 0.3)], 0.0),
        ([(5.0, 0.04), (5.1, 0.8), (6.0, 1.0)], 0.16),  # the second unit comes a second later, 840 ms are there
        ([(5.0, 1.0), (5.5, 1.0), (6.9, 1.0)], 0.0),
        ([(5.0, 0.2), (5.1, 0.2), (6.0, 0.2), (6.1, 0.2)], 0.6),  # the worst piece counts, not the last one
    ],
)
def test_needed_delay(pieces: list[tuple[float, float]], expected: float) -> None:
    assert needed_delay(pieces) == pytest.approx(expected), pieces
