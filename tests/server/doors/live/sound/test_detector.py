from hypothesis import given
from hypothesis import strategies as st

from server.doors.live.sound.detector import (
    DetectorSettings,
    Heard,
    SpeechContinues,
    SpeechHeard,
    SpeechOver,
    TurnFinder,
)

SETTINGS = DetectorSettings()


def heard_in(probabilities: list[float], settings: DetectorSettings = SETTINGS) -> list[Heard]:
    finder, found = TurnFinder(), []
    for index, p in enumerate(probabilities, start=1):
        found += finder.push(p, 32.0 * index, settings)
    return found


def test_a_turn_begins_with_padding_and_ends_before_its_silence() -> None:
    found = heard_in([0.0] * 20 + [0.9] * 10 + [0.0] * 20)
    begins, ends = found[0], found[-1]
    assert isinstance(begins, SpeechHeard) and begins.start_ms == 640 - 300
    assert ends == SpeechOver(30 * 32)
    assert all(isinstance(one, SpeechContinues) for one in found[1:-1])
    assert [one.speech_ms for one in found[1:-1]][-1] == 320


def test_a_click_is_no_turn() -> None:
    assert heard_in([0.9] * 2 + [0.0] * 40) == []


def test_a_pause_inside_a_turn_does_not_end_it() -> None:
    found = heard_in([0.9] * 10 + [0.0] * 14 + [0.9] * 5 + [0.0] * 20)
    assert [type(one) for one in found].count(SpeechOver) == 1 and found[-1] == SpeechOver(29 * 32)


def test_padding_stops_at_the_turn_before() -> None:
    settings = DetectorSettings(prefix_padding_ms=5000, silence_duration_ms=64)
    starts = [
        one.start_ms for one in heard_in([0.9] * 5 + [0.0] * 4 + [0.9] * 5, settings) if isinstance(one, SpeechHeard)
    ]
    assert starts == [0, 7 * 32]


@given(st.lists(st.sampled_from([0.0, 0.3, 0.45, 0.6, 1.0]), max_size=120))
def test_turns_begin_and_end_in_turn(probabilities: list[float]) -> None:
    at = 0
    is_open = False
    for one in heard_in(probabilities):
        if isinstance(one, SpeechHeard):
            assert not is_open and one.start_ms >= at
            is_open, at = True, one.start_ms
        elif isinstance(one, SpeechOver):
            assert is_open and one.end_ms >= at
            is_open, at = False, one.end_ms
        else:
            assert is_open
