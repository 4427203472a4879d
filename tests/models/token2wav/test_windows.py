"""Codes cut into windows: everything voiced once, the look-ahead always there, sound as early as allowed."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import SettingsError
from models.token2wav.settings import SILENCE_CODE
from models.token2wav.windows import CodeWindows, Window

SILENCE = (SILENCE_CODE,) * 3


def run(windows: CodeWindows, pushes: list[list[int]]) -> list[Window]:
    """The last push ends the turn."""
    return [w for i, codes in enumerate(pushes) for w in windows.push(codes, last=i == len(pushes) - 1)]


def voiced(windows: list[Window], lookahead: int = 3) -> list[int]:
    return [code for w in windows for code in (w.codes if w.last else w.codes[:-lookahead])]


@st.composite
def pushes(draw: st.DrawFn) -> list[list[int]]:
    sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=6))
    codes = iter(range(sum(sizes)))
    return [[next(codes) for _ in range(n)] for n in sizes]


@given(
    pushes=pushes(),
    lookahead=st.integers(1, 5),
    chunk=st.integers(1, 25),
    least=st.integers(1, 25),
    silence=st.booleans(),
)
def test_every_code_is_voiced_once_and_in_order(pushes, lookahead, chunk, least, silence):
    least = min(least, chunk)
    windows = CodeWindows(lookahead=lookahead, chunk=chunk, least=least, silence=silence)
    got = run(windows, pushes)
    codes = [SILENCE_CODE] * lookahead * silence + [code for push in pushes for code in push]
    assert voiced(got, lookahead) == codes
    assert [w.last for w in got] == [False] * (len(got) - 1) + [True] * bool(codes)
    assert windows.n_waiting == 0
    for window, following in pairwise(got):
        assert window.codes[-lookahead:] == following.codes[:lookahead], "what was looked at comes next"
    for window in got[:-1]:
        assert lookahead + least <= len(window.codes) <= lookahead + chunk
    if codes:
        assert 1 <= len(got[-1].codes) < lookahead + least


@given(pushes=pushes(), least=st.integers(1, 25))
def test_nothing_waits_that_could_be_voiced(pushes, least):
    windows = CodeWindows(least=least)
    for codes in pushes:
        windows.push(codes)
        assert windows.n_waiting < 3 + least


@given(pushes=pushes())
def test_how_codes_arrive_does_not_matter_to_full_chunks(pushes):
    whole = [code for push in pushes for code in push]
    assert run(CodeWindows(), pushes) == run(CodeWindows(), [whole])


def test_released_cut():
    """25 codes a second: the first window holds the silence, the rest goes out at the end."""
    windows = CodeWindows()
    codes = tuple(range(100, 160))
    assert windows.push(list(codes[:25])) == [Window(SILENCE + codes[:25], False)]
    assert windows.push(list(codes[25:50])) == [Window(codes[22:50], False)]
    assert windows.push(list(codes[50:]), last=True) == [Window(codes[47:], True)]


def test_a_full_window_at_the_end_leaves_its_look_ahead_for_the_last():
    codes = tuple(range(25))
    assert CodeWindows().push(list(codes), last=True) == [Window(SILENCE + codes, False), Window(codes[-3:], True)]


def test_few_codes_are_enough_where_sound_should_leave_early():
    windows = CodeWindows(least=5)
    assert windows.push([1, 2, 3, 4]) == []
    assert windows.push([5]) == [Window((*SILENCE, 1, 2, 3, 4, 5), False)]
    assert windows.push([6, 7], last=True) == [Window((3, 4, 5, 6, 7), True)]


def test_a_unit_in_two_pushes_is_two_windows():
    """A few codes as soon as they are there, then the rest of the second; or all at once where nobody waits."""
    windows, codes = CodeWindows(least=5), tuple(range(100, 185))
    pushes = [codes[:5], codes[5:25], codes[25:30], codes[30:50], codes[50:75]]
    expected = [(*SILENCE, *codes[:5]), codes[2:25], codes[22:30], codes[27:50], codes[47:75]]
    for push, window in zip(pushes, expected, strict=True):
        assert windows.push(list(push)) == [Window(window, False)]
        assert windows.n_waiting == 3
    assert windows.push(list(codes[75:]), last=True) == [Window(codes[72:], False), Window(codes[82:], True)]


def test_a_turn_without_codes():
    assert CodeWindows().push([], last=True) == [Window(SILENCE, True)]
    assert CodeWindows(silence=False).push([], last=True) == []


def test_reference_ends_with_its_look_ahead_twice():
    """Only windows that the end itself completes are last; those of earlier pushes are not."""
    codes = tuple(range(200, 275))
    windows = CodeWindows(silence=False, compat="reference")
    assert windows.push(list(codes[:28])) == [Window(codes[:28], False)]
    got = windows.push(list(codes[28:]), last=True)
    assert got == [Window(codes[25:53], True), Window(codes[50:], True)]
    assert len(voiced([Window(codes[:28], False), *got])) == len(codes) + 3


@pytest.mark.parametrize(("options", "what"), [({"least": 0}, "least"), ({"least": 26}, "1 to 25, got 26")])
def test_least_is_checked(options, what):
    with pytest.raises(SettingsError, match=what):
        CodeWindows(**options)
