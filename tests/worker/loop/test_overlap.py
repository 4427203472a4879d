"""Loads of units: their time without waits for their own session, and the mean number of jobs beside them."""

from types import SimpleNamespace

import pytest

from worker.loop.batch_runner import Overlap
from worker.loop.results import UnitLoad


class Thing(SimpleNamespace):
    """Stands for a job or a session."""

    __hash__ = object.__hash__


def test_load_is_the_mean_number_of_jobs() -> None:
    overlap, session = Overlap(), Thing()
    first, second = Thing(arrived=1.0, session=session), Thing(arrived=2.0, session=Thing())
    overlap.set_jobs(1, 1.0)
    overlap.begin(first, 1.0)
    overlap.set_jobs(2, 2.0)
    overlap.begin(second, 2.0)
    assert overlap.end(first, 4.0) == UnitLoad(3.0, pytest.approx(5 / 3)), "one job for 1 s, two for 2 s"
    overlap.set_jobs(1, 4.0)
    overlap.free(session, 4.0)
    assert overlap.end(second, 5.0) == UnitLoad(3.0, pytest.approx(5 / 3))
    overlap.set_jobs(0, 5.0)
    # It arrived while its session's former unit ran: that wait is not the engine's.
    later = Thing(arrived=3.0, session=session)
    overlap.set_jobs(1, 5.0)
    overlap.begin(later, 5.0)
    assert overlap.end(later, 5.5) == UnitLoad(1.5, 1.0)
    assert overlap.end(Thing(arrived=0.0, session=session), 6.0) is None, "a job that was not counted"
