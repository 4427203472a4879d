"""When a conversation ends because its client sends nothing, on a clock that the test moves."""

from worker.http.idle_clock import IdleClock


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_pause_has_its_own_limit_once_for_each_unit() -> None:
    clock = Clock()
    idle = IdleClock(10.0, clock)
    assert idle.ends_at(is_paused=False) == 10.0
    idle.on_pause(60.0)
    assert idle.ends_at(is_paused=True) == 60.0 and idle.pause_s == 60.0
    clock.now = 5.0
    idle.on_pause(100.0)
    assert idle.ends_at(is_paused=True) == 60.0, "expected a pause that goes on not to be extended"
    idle.on_pause(20.0)
    assert idle.ends_at(is_paused=True) == 25.0, "expected a shorter limit to count"
    idle.on_resume()
    assert idle.ends_at(is_paused=False) == 15.0, "expected to count from the end of the pause"
    idle.on_pause(60.0)
    assert idle.ends_at(is_paused=True) == 15.0, "expected the idle limit to bound a second pause without a unit"
    idle.on_resume()
    clock.now = 7.0
    idle.on_unit()
    idle.on_pause(60.0)
    assert idle.ends_at(is_paused=True) == 67.0


def test_without_a_limit_only_pauses_end() -> None:
    idle = IdleClock(None, Clock())
    assert idle.ends_at(is_paused=False) is None
    idle.on_pause(3.0)
    assert idle.ends_at(is_paused=True) == 3.0
    idle.end_pause()
    idle.on_pause(8.0)
    assert idle.ends_at(is_paused=True) == 8.0, "expected a new context to forget the pause before"
