"""Codes cut into windows: everything voiced once, the look-ahead always there, sound as early as allowed."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import SettingsError
from models.token2wav.settings import SILENCE_TOKEN
from models.token2wav.stream.windows import TokenWindows, Window

SILENCE = (SILENCE_TOKEN,) * 3


def run(windows: TokenWindows, pushes: list[list[int]]) -> list[Window]:
    """The last push ends the turn."""
    return [w for i, speech_tokens in enumerate(pushes) for w in windows.push(speech_tokens, last=i == len(pushes) - 1)]


def voiced(windows: list[Window], lookahead: int = 3) -> list[int]:
    return [code for w in windows for code in (w.speech_tokens if w.last else w.speech_tokens[:-lookahead])]


@st.composite
def pushes(draw: st.DrawFn) -> list[list[int]]:
    sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=6))
    speech_tokens = iter(range(sum(sizes)))
    return [[next(speech_tokens) for _ in range(n)] for n in sizes]


@given(
    pushes=pushes(),
    lookahead=st.integers(1, 5),
    chunk=st.integers(1, 25),
    least=st.integers(1, 25),
    silence=st.booleans(),
)
def test_every_code_is_voiced_once_and_in_order(pushes, lookahead, chunk, least, silence):
    least = min(least, chunk)
    windows = TokenWindows(lookahead=lookahead, chunk=chunk, least=least, silence=silence)
    got = run(windows, pushes)
    speech_tokens = [SILENCE_TOKEN] * lookahead * silence + [code for push in pushes for code in push]
    assert voiced(got, lookahead) == speech_tokens
    assert [w.last for w in got] == [False] * (len(got) - 1) + [True] * bool(speech_tokens)
    assert windows.n_waiting == 0
    for window, following in pairwise(got):
        assert window.speech_tokens[-lookahead:] == following.speech_tokens[:lookahead], "what was looked at comes next"
    for window in got[:-1]:
        assert lookahead + least <= len(window.speech_tokens) <= lookahead + chunk
    if speech_tokens:
        assert 1 <= len(got[-1].speech_tokens) < lookahead + least


@given(pushes=pushes(), least=st.integers(1, 25))
def test_nothing_waits_that_could_be_voiced(pushes, least):
    windows = TokenWindows(least=least)
    for speech_tokens in pushes:
        windows.push(speech_tokens)
        assert windows.n_waiting < 3 + least


@given(pushes=pushes())
def test_how_codes_arrive_does_not_matter_to_full_chunks(pushes):
    whole = [code for push in pushes for code in push]
    assert run(TokenWindows(), pushes) == run(TokenWindows(), [whole])


def test_released_cut():
    """25 codes a second: the first window holds the silence, the rest goes out at the end."""
    windows = TokenWindows()
    speech_tokens = tuple(range(100, 160))
    assert windows.push(list(speech_tokens[:25])) == [Window(SILENCE + speech_tokens[:25], False)]
    assert windows.push(list(speech_tokens[25:50])) == [Window(speech_tokens[22:50], False)]
    assert windows.push(list(speech_tokens[50:]), last=True) == [Window(speech_tokens[47:], True)]


def test_a_full_window_at_the_end_leaves_its_look_ahead_for_the_last():
    speech_tokens = tuple(range(25))
    assert TokenWindows().push(list(speech_tokens), last=True) == [
        Window(SILENCE + speech_tokens, False),
        Window(speech_tokens[-3:], True),
    ]


def test_few_codes_are_enough_where_sound_should_leave_early():
    windows = TokenWindows(least=5)
    assert windows.push([1, 2, 3, 4]) == []
    assert windows.push([5]) == [Window((*SILENCE, 1, 2, 3, 4, 5), False)]
    assert windows.push([6, 7], last=True) == [Window((3, 4, 5, 6, 7), True)]


def test_a_unit_in_two_pushes_is_two_windows():
    """A few codes as soon as they are there, then the rest of the second; or all at once where nobody waits."""
    windows, speech_tokens = TokenWindows(least=5), tuple(range(100, 185))
    pushes = [speech_tokens[:5], speech_tokens[5:25], speech_tokens[25:30], speech_tokens[30:50], speech_tokens[50:75]]
    expected = [
        (*SILENCE, *speech_tokens[:5]),
        speech_tokens[2:25],
        speech_tokens[22:30],
        speech_tokens[27:50],
        speech_tokens[47:75],
    ]
    for push, window in zip(pushes, expected, strict=True):
        assert windows.push(list(push)) == [Window(window, False)]
        assert windows.n_waiting == 3
    assert windows.push(list(speech_tokens[75:]), last=True) == [
        Window(speech_tokens[72:], False),
        Window(speech_tokens[82:], True),
    ]


def test_a_turn_without_codes():
    assert TokenWindows().push([], last=True) == [Window(SILENCE, True)]
    assert TokenWindows(silence=False).push([], last=True) == []


def test_reference_ends_with_its_look_ahead_twice():
    """Only windows that the end itself completes are last; those of earlier pushes are not."""
    speech_tokens = tuple(range(200, 275))
    windows = TokenWindows(silence=False, compat="reference")
    assert windows.push(list(speech_tokens[:28])) == [Window(speech_tokens[:28], False)]
    got = windows.push(list(speech_tokens[28:]), last=True)
    assert got == [Window(speech_tokens[25:53], True), Window(speech_tokens[50:], True)]
    assert len(voiced([Window(speech_tokens[:28], False), *got])) == len(speech_tokens) + 3


@pytest.mark.parametrize(("options", "what"), [({"least": 0}, "least"), ({"least": 26}, "1 to 25, got 26")])
def test_least_is_checked(options, what):
    with pytest.raises(SettingsError, match=what):
        TokenWindows(**options)
