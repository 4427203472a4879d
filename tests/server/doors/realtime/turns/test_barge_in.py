from server.doors.realtime.turns.barge_in import BargeIn


def test_speech_is_announced_at_once_while_nothing_is_spoken() -> None:
    barge_in = BargeIn()
    barge_in.begin_turn(340)
    assert barge_in.due(96, is_responding=False) == 340
    assert barge_in.due(128, is_responding=False) is None, "expected one announcement"


def test_a_short_noise_beside_a_response_is_not_announced() -> None:
    barge_in = BargeIn()
    barge_in.begin_response()
    barge_in.begin_turn(340)
    assert barge_in.due(96, is_responding=True) is None
    barge_in.end_turn()
    barge_in.begin_turn(900)
    assert barge_in.due(192, is_responding=True) is None
    assert barge_in.due(224, is_responding=True) == 900 and barge_in.is_confirmed(224)


def test_speech_before_the_response_does_not_interrupt_it() -> None:
    barge_in = BargeIn()
    barge_in.begin_turn(0)
    barge_in.due(640, is_responding=False)
    barge_in.begin_response()
    assert not barge_in.is_confirmed(800)
    assert barge_in.is_confirmed(840)
