"""Division of tokens into windows: every token synthesized once, complete lookaheads, chunks as early as allowed."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import SettingsError
from models.token2wav.settings import SILENCE_TOKEN
from models.token2wav.stream.windows import TokenWindows, Window

SILENCE = (SILENCE_TOKEN,) * 3


def run(windows: TokenWindows, pushes: list[list[int]]) -> list[Window]:
    """The windows of a turn; the last push ends it."""
    return [w for i, speech_tokens in enumerate(pushes) for w in windows.push(speech_tokens, last=i == len(pushes) - 1)]


def synthesized(windows: list[Window], lookahead: int = 3) -> list[int]:
    return [token for w in windows for token in (w.speech_tokens if w.last else w.speech_tokens[:-lookahead])]


@st.composite
def pushes(draw: st.DrawFn) -> list[list[int]]:
    sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=6))
    speech_tokens = iter(range(sum(sizes)))
    return [[next(speech_tokens) for _ in range(n)] for n in sizes]


@given(
    pushes=pushes(),
    lookahead=st.integers(1, 5),
    max_chunk=st.integers(1, 25),
    min_chunk=st.integers(1, 25),
    silence=st.booleans(),
    joins_end=st.booleans(),
)
def test_every_token_is_synthesized_once_and_in_order(pushes, lookahead, max_chunk, min_chunk, silence, joins_end):
    min_chunk = min(min_chunk, max_chunk)
    windows = TokenWindows(
        lookahead=lookahead, max_chunk=max_chunk, min_chunk=min_chunk, silence=silence, joins_end=joins_end
    )
    got = run(windows, pushes)
    speech_tokens = [SILENCE_TOKEN] * lookahead * silence + [token for push in pushes for token in push]
    assert synthesized(got, lookahead) == speech_tokens
    assert [w.last for w in got] == [False] * (len(got) - 1) + [True] * bool(speech_tokens)
    assert windows.n_waiting == 0
    for window, following in pairwise(got):
        assert window.speech_tokens[-lookahead:] == following.speech_tokens[:lookahead], (
            "expected the lookahead to start the next window"
        )
    for window in got[:-1]:
        assert lookahead + min_chunk <= len(window.speech_tokens) <= lookahead + max_chunk
    if speech_tokens:
        most = lookahead + max_chunk if joins_end else lookahead + min_chunk - 1
        assert 1 <= len(got[-1].speech_tokens) <= most


@given(pushes=pushes(), min_chunk=st.integers(1, 25))
def test_returns_all_complete_windows(pushes, min_chunk):
    windows = TokenWindows(min_chunk=min_chunk)
    for speech_tokens in pushes:
        windows.push(speech_tokens)
        assert windows.n_waiting < 3 + min_chunk


@given(pushes=pushes())
def test_full_chunks_do_not_depend_on_the_division_into_pushes(pushes):
    whole = [token for push in pushes for token in push]
    assert run(TokenWindows(), pushes) == run(TokenWindows(), [whole])


def test_released_division():
    """25 tokens per second: the first window contains the silence, the last window the rest."""
    windows = TokenWindows()
    speech_tokens = tuple(range(100, 160))
    assert windows.push(list(speech_tokens[:25])) == [Window(SILENCE + speech_tokens[:25], False)]
    assert windows.push(list(speech_tokens[25:50])) == [Window(speech_tokens[22:50], False)]
    assert windows.push(list(speech_tokens[50:]), last=True) == [Window(speech_tokens[47:], True)]


def test_full_window_at_the_end_leaves_its_look_ahead_to_the_last_window():
    speech_tokens = tuple(range(25))
    assert TokenWindows().push(list(speech_tokens), last=True) == [
        Window(SILENCE + speech_tokens, False),
        Window(speech_tokens[-3:], True),
    ]


@pytest.mark.parametrize("n", [0, 4, 5, 24, 25])
def test_end_that_fits_one_window_is_one_window(n):
    """The rest of a turn after a full chunk, as long as it has at most a chunk and its lookahead."""
    windows, speech_tokens = TokenWindows(min_chunk=5, joins_end=True), tuple(range(100, 125 + n))
    windows.push(list(speech_tokens[:25]))
    assert windows.push(list(speech_tokens[25:]), last=True) == [Window(speech_tokens[22:], True)]


def test_end_that_does_not_fit_one_window_is_two():
    windows, speech_tokens = TokenWindows(min_chunk=5, joins_end=True), tuple(range(100, 126))
    got = windows.push(list(speech_tokens), last=True)
    assert got == [Window(SILENCE + speech_tokens[:25], False), Window(speech_tokens[22:], True)]


def test_small_min_chunk_gives_early_windows():
    windows = TokenWindows(min_chunk=5)
    assert windows.push([1, 2, 3, 4]) == []
    assert windows.push([5]) == [Window((*SILENCE, 1, 2, 3, 4, 5), False)]
    assert windows.push([6, 7], last=True) == [Window((3, 4, 5, 6, 7), True)]


def test_grow_doubles_min_chunk_up_to_a_whole_chunk():
    windows = TokenWindows(min_chunk=10)
    sizes = [windows.min_chunk]
    for _ in range(3):
        windows.grow()
        sizes.append(windows.min_chunk)
    assert sizes == [10, 20, 25, 25]
    assert windows.push(list(range(24))) == []
    assert windows.push([24]) == [Window((*SILENCE, *range(25)), False)]


def test_unit_in_two_pushes_is_two_windows():
    """A few early tokens and then the rest of the second, or all tokens of a second at once."""
    windows, speech_tokens = TokenWindows(min_chunk=5), tuple(range(100, 185))
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


def test_turn_without_tokens():
    assert TokenWindows().push([], last=True) == [Window(SILENCE, True)]
    assert TokenWindows(silence=False).push([], last=True) == []


def test_reference_repeats_the_look_ahead_at_the_end():
    """Windows completed by the last push are marked as last; windows of earlier pushes are not."""
    speech_tokens = tuple(range(200, 275))
    windows = TokenWindows(silence=False, compat="reference")
    assert windows.push(list(speech_tokens[:28])) == [Window(speech_tokens[:28], False)]
    got = windows.push(list(speech_tokens[28:]), last=True)
    assert got == [Window(speech_tokens[25:53], True), Window(speech_tokens[50:], True)]
    assert len(synthesized([Window(speech_tokens[:28], False), *got])) == len(speech_tokens) + 3


@pytest.mark.parametrize(("options", "what"), [({"min_chunk": 0}, "min_chunk"), ({"min_chunk": 26}, "1 to 25, got 26")])
def test_refuses_min_chunk_out_of_range(options, what):
    with pytest.raises(SettingsError, match=what):
        TokenWindows(**options)
