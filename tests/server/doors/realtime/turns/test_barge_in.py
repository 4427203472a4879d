from server.doors.realtime.turns.barge_in import BargeIn


def hear(barge_in: BargeIn, speech_ms: float, at_ms: float, *, is_responding: bool = True) -> int | None:
    barge_in.hear(speech_ms, at_ms)
    return barge_in.due(speech_ms, at_ms, is_responding=is_responding)


def test_speech_is_announced_at_once_while_nothing_is_spoken() -> None:
    barge_in = BargeIn()
    barge_in.begin_turn(340)
    assert hear(barge_in, 96, 736, is_responding=False) == 340
    assert hear(barge_in, 128, 768, is_responding=False) is None, "expected one announcement"


def test_a_short_noise_beside_a_response_is_not_announced() -> None:
    barge_in = BargeIn()
    barge_in.begin_response(0)
    barge_in.begin_turn(340)
    assert hear(barge_in, 96, 736) is None
    barge_in.end_turn()
    barge_in.begin_turn(900)
    assert hear(barge_in, 192, 1400) is None
    assert hear(barge_in, 224, 1432) == 900 and barge_in.is_confirmed(224)


def test_speech_before_the_response_does_not_interrupt_it() -> None:
    barge_in = BargeIn()
    barge_in.begin_turn(0)
    hear(barge_in, 640, 640, is_responding=False)
    barge_in.begin_response(1500)
    for speech_ms in (800, 1000, 1500):
        hear(barge_in, speech_ms, speech_ms)
        assert not barge_in.is_confirmed(speech_ms), "expected sound that was sent before to be ignored"
    hear(barge_in, 1600, 1600)
    assert not barge_in.is_confirmed(1600)
    hear(barge_in, 1700, 1700)
    assert barge_in.is_confirmed(1700)


def test_speech_that_goes_on_interrupts_after_its_time() -> None:
    barge_in = BargeIn()
    barge_in.begin_turn(0)
    hear(barge_in, 1000, 1000, is_responding=False)
    barge_in.begin_response(1000)
    for speech_ms, expected in ((1032, False), (1184, False), (1216, True)):
        hear(barge_in, speech_ms, speech_ms)
        assert barge_in.is_confirmed(speech_ms) is expected, f"{speech_ms}: expected {expected}"


def test_a_turn_that_ended_before_the_response_is_answered() -> None:
    barge_in = BargeIn()
    barge_in.begin_response(1500)
    assert barge_in.is_answered(1400) and not barge_in.is_answered(1600)


def test_committed_speech_is_no_turn_and_what_follows_it_is_another() -> None:
    barge_in = BargeIn()

    def heard(speech_ms: float, at_ms: float) -> int | None:
        barge_in.hear(speech_ms, at_ms, committed_ms=1000)
        return barge_in.due(speech_ms, at_ms, is_responding=False)

    barge_in.begin_turn(300)
    assert [heard(96, 500), heard(596, 1000), heard(740, 1144)] == [None] * 3
    assert heard(820, 1224) == 1000, "expected a turn that begins at the commit"
    assert heard(852, 1256) is None
    barge_in.end_turn()
    barge_in.begin_turn(2000)
    assert heard(96, 2400) == 2000


def test_a_turn_that_was_reported_goes_on_as_another_after_a_commit() -> None:
    barge_in = BargeIn()
    barge_in.begin_turn(300)
    assert hear(barge_in, 96, 500, is_responding=False) == 300
    barge_in.hear(128, 532, committed_ms=510)
    assert barge_in.due(128, 532, is_responding=False) is None
    barge_in.hear(320, 724, committed_ms=510)
    assert barge_in.due(320, 724, is_responding=False) == 510
