"""Windows over generated units: which are evicted, and which labelled rows remain after the evictions."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import ContextOverflowError
from worker.config.session import WindowConfig
from worker.loop.window import Drop, Rebuild, UnitRecord, UnitWindow

SPECIAL = 100  # ids from here on are special
MARKER = (1, 2, 3)
SUFFIX = (50, 51)
PREFIX = 4


def decode(ids: Sequence[int]) -> str:
    """Decode to lower case. Units carry their text in upper case, which tells decoded text from kept text."""
    return "".join(chr(ord("a") + i % 26) for i in ids if i < SPECIAL)


def unit(
    number: int, length: int, ids: Sequence[int] = (), *, listen: bool = False, text: str | None = None
) -> UnitRecord:
    spoken = decode(ids).upper() if text is None else text
    return UnitRecord(number, length, "audio", tuple(ids), spoken, listen)


def make_window(config: dict[str, Any], prompt: bool = True, **options: Any) -> UnitWindow:
    window = UnitWindow(
        WindowConfig(**config), is_special=lambda i: i >= SPECIAL, decode=decode, marker=MARKER, **options
    )
    if prompt:
        window.protect(PREFIX, SUFFIX)
    return window


def close(window: UnitWindow, lengths: Sequence[int], first: int = 0) -> list[list[Drop | Rebuild]]:
    return [window.close_unit(unit(first + i, length)) for i, length in enumerate(lengths)]


def counters(window: UnitWindow) -> dict[str, int]:
    names = ("events", "dropped_tokens", "dropped_units", "position_offset")
    return {name: getattr(window, name) for name in names}


def assert_equal(got: object, expected: object, what: str) -> None:
    assert got == expected, f"{what}: expected {expected}, got {got}"


class Context:
    """Rows with labels: prompt rows by position, fed ids by value, unit rows by (unit, position)."""

    def __init__(self, prompt: bool):
        self.rows: list[object] = [*(f"prefix {i}" for i in range(PREFIX)), *SUFFIX] if prompt else []

    def feed(self, record: UnitRecord) -> None:
        self.rows += unit_rows(record)

    def apply(self, eviction: Drop | Rebuild) -> None:
        if isinstance(eviction, Drop):
            assert eviction.keep + eviction.n <= len(self.rows), f"{eviction} of {len(self.rows)} rows"
            del self.rows[eviction.keep : eviction.keep + eviction.n]
        else:
            assert eviction.first_kept <= len(self.rows), f"{eviction} of {len(self.rows)} rows"
            self.rows = [*self.rows[: eviction.prefix], *eviction.ids, *self.rows[eviction.first_kept :]]


def unit_rows(record: UnitRecord) -> list[object]:
    return [(record.id, row) for row in range(record.length)]


class Previous(NamedTuple):
    ids: tuple[int, ...]
    text: str


def previous_of(evicted: Sequence[UnitRecord], config: WindowConfig) -> Previous:
    """Expected previous text of evicted units, computed from all of them at once."""
    spoken = [tuple(i for i in u.ids if i < SPECIAL and not u.is_listen) for u in evicted]
    texts = [u.text if u.text.strip() else "" for u in evicted]
    if config.mode != "context" or not any(spoken + texts):
        return Previous((), "")
    ids, limit = sum(spoken, ()), config.previous_max_tokens
    text, n = "", 0
    for own, words in zip(spoken, texts, strict=True):
        n += len(own)
        text = decode(ids[n - limit : n]) if own and n > limit else text + words
    return Previous(MARKER + ids[-limit:], text)


def n_evicted(units: Sequence[UnitRecord], length: Callable[[int], int], config: WindowConfig, options: dict) -> int:
    """Expected number of evicted units, oldest first. length: context rows without the first n units."""
    most = options.get("max_tokens") or math.inf
    goes_on = {
        "off": lambda n: False,
        "basic": lambda n: length(0) > config.high_tokens and length(n) > config.low_tokens,
        "context": lambda n: len(units) - n > config.max_units or length(n) > most,
    }[config.mode]
    n, least = 0, 0 if options.get("evict_newest") else 1
    while len(units) - n > least and goes_on(n):
        n += 1
    return n


@st.composite
def records(draw: st.DrawFn) -> list[UnitRecord]:
    """Units of any length, listening or speaking, with special tokens and blank text."""
    result = []
    for number in range(draw(st.integers(0, 20))):
        ids = draw(st.lists(st.integers(0, 12) | st.integers(SPECIAL, SPECIAL + 2), max_size=8))
        length = draw(st.just(0) | st.integers(1, 12) | st.integers(20, 60))
        text = draw(st.none() | st.sampled_from(["", " \n"]))
        result.append(unit(number, length, ids, listen=draw(st.booleans()), text=text))
    return result


configs = st.one_of(
    st.just({"mode": "off"}),
    st.integers(1, 150).flatmap(
        lambda low: st.fixed_dictionaries(
            {"mode": st.just("basic"), "low_tokens": st.just(low), "high_tokens": st.integers(low, 200)}
        )
    ),
    st.fixed_dictionaries(
        {
            "mode": st.just("context"),
            "max_units": st.integers(1, 10),
            "previous_max_tokens": st.integers(1, 20),
        }
    ),
)
option_sets = st.fixed_dictionaries(
    {}, optional={"max_tokens": st.none() | st.integers(1, 120), "evict_newest": st.booleans()}
)


@settings(max_examples=150)
@given(values=configs, options=option_sets, sequence=records(), prompt=st.booleans())
def test_evictions_keep_exactly_the_rows_of_the_policy(values, options, sequence, prompt):
    window, context, config = make_window(values, prompt, **options), Context(prompt), WindowConfig(**values)
    prefix, suffix = context.rows[:PREFIX], context.rows[PREFIX:]
    units: list[UnitRecord] = []
    evicted: list[UnitRecord] = []
    slides, rows_evicted = 0, 0

    def expected_rows(n: int) -> list[object]:
        previous = previous_of(evicted + units[:n], config).ids
        return [*prefix, *previous, *suffix, *(row for u in units[n:] for row in unit_rows(u))]

    for record in sequence:
        context.feed(record)
        n_rows, units = len(context.rows), units + [record] * (record.length > 0)
        evictions = window.close_unit(record)
        for eviction in evictions:
            end = sum(eviction) if isinstance(eviction, Drop) else eviction.first_kept
            newest = 0 if options.get("evict_newest") else record.length
            assert end <= n_rows - newest, (
                f"{eviction} expected rows before {n_rows - newest}, those of the newest unit"
            )
            context.apply(eviction)
        n = n_evicted(units, lambda n: len(expected_rows(n)), config, options)
        assert_equal(context.rows, expected_rows(n), "rows")
        assert_equal(bool(evictions), n > 0, f"whether something is evicted: {evictions}")
        evicted, units = evicted + units[:n], units[n:]
        slides, rows_evicted = slides + bool(n), rows_evicted + n_rows - len(context.rows)
        assert_equal(window.length, len(context.rows), "length")
        assert_equal(window.preserve + sum(u.length for u in window.units), window.length, "its parts")
        assert_equal([u.id for u in window.units], [u.id for u in units], "units")
        assert_equal((window.previous_ids, window.previous_text), previous_of(evicted, config), "previous")
        offset = rows_evicted if config.mode == "basic" else 0
        assert_equal(tuple(counters(window).values()), (slides, rows_evicted, len(evicted), offset), "counters")


def test_basic_evicts_to_the_low_mark_at_once():
    window = make_window({"mode": "basic", "high_tokens": 50, "low_tokens": 30})
    assert_equal(close(window, [13, 13, 18]), [[], [], []], "50 rows are not above 50")
    assert_equal(close(window, [5], first=3), [[Drop(6, 26)]], "55 rows, 29 after two units")
    assert_equal([(u.id, u.length) for u in window.units], [(2, 18), (3, 5)], "units")
    expected = {"events": 1, "dropped_tokens": 26, "dropped_units": 2, "position_offset": 26}
    assert_equal(counters(window), expected, "counters")
    assert_equal(close(window, [20, 13], first=4), [[], [Drop(6, 43)]], "49, then 62 rows")
    expected = {"events": 2, "dropped_tokens": 69, "dropped_units": 5, "position_offset": 69}
    assert_equal(counters(window), expected, "counters")


@pytest.mark.parametrize("newest, expected", [(False, ([Drop(6, 10)], [1])), (True, ([Drop(6, 70)], []))])
def test_keeps_an_oversized_unit_unless_evict_newest(newest, expected):
    window = make_window({"mode": "basic", "high_tokens": 50, "low_tokens": 30}, evict_newest=newest)
    got = close(window, [10, 60])[-1]
    assert_equal((got, [u.id for u in window.units]), expected, "evictions, units left")


def test_evicts_nothing_if_only_a_long_unit_is_left():
    window = make_window({"mode": "basic", "high_tokens": 50, "low_tokens": 30})
    assert_equal(close(window, [60, 60]), [[], [Drop(6, 60)]], "evictions")
    assert_equal(counters(window)["events"], 1, "events")


def test_off_evicts_nothing_and_keeps_no_text():
    window = make_window({"mode": "off"}, max_tokens=10)
    for number in range(500):
        assert_equal(window.close_unit(unit(number, 20, range(10))), [], "evictions")
    assert_equal(window.length, 6 + 500 * 20, "length")
    assert_equal({(u.ids, u.text) for u in window.units}, {((), "")}, "what is kept of units")


def context_window(max_units: int = 1, previous_max_tokens: int = 6, **options: Any) -> UnitWindow:
    config = {"mode": "context", "max_units": max_units, "previous_max_tokens": previous_max_tokens}
    return make_window(config, **options)


def test_context_moves_spoken_ids_to_the_previous_text():
    window = context_window()
    spoken = [unit(0, 13, (), listen=True), unit(1, 20, (4, 100, 5)), unit(2, 13, listen=True), unit(3, 18, (6, 7))]
    got = [window.close_unit(record) for record in spoken]
    # A silent unit leaves no marker; spoken ids are inserted between prefix and suffix.
    expected = [[], [Drop(6, 13)], [Rebuild(4, 26, (*MARKER, 4, 5, *SUFFIX))], [Drop(11, 13)]]
    assert_equal(got, expected, "evictions")
    assert_equal((window.previous_ids, window.previous_text), ((*MARKER, 4, 5), "EF"), "previous")
    assert_equal((window.length, window.preserve), (29, 11), "length, preserve")
    expected = {"events": 3, "dropped_tokens": 13 + 15 + 13, "dropped_units": 3, "position_offset": 0}
    assert_equal(counters(window), expected, "counters")


def test_context_drops_the_oldest_tokens_and_decodes_the_rest():
    window = context_window(previous_max_tokens=4)
    for record in (unit(0, 13, (4, 5, 6)), unit(1, 13, (7, 8)), unit(2, 13, (9,))):
        window.close_unit(record)
    assert_equal((window.previous_ids, window.previous_text), ((*MARKER, 5, 6, 7, 8), "fghi"), "previous")
    [got] = window.close_unit(unit(3, 13))
    assert_equal(got, Rebuild(4, 6 + 7 + 13, (*MARKER, 6, 7, 8, 9, *SUFFIX)), "eviction")


@pytest.mark.parametrize(
    "record, ids, text",
    [
        (unit(0, 13, (4, 5), listen=True, text=""), (), ""),
        (unit(0, 13, (100, 101)), (), ""),
        (unit(0, 13, (4, 5), text=" \n"), (*MARKER, 4, 5), ""),
        (unit(0, 13, (4, 5), listen=True), MARKER, "EF"),
        (unit(0, 13, (4,), text=" e"), (*MARKER, 4), " e"),
    ],
)
def test_previous_text_contains_spoken_words_only(record, ids, text):
    window = context_window()
    window.close_unit(record)
    window.close_unit(unit(1, 13))
    assert_equal((window.previous_ids, window.previous_text), (ids, text), "previous")


def test_max_tokens_bounds_the_rows_of_context_mode():
    window = context_window(max_units=24, max_tokens=196)
    got = close(window, [90, 90, 90])
    assert_equal(got, [[], [], [Drop(6, 90)]], "evictions at 96, 186, 276 rows")
    [got] = window.close_unit(unit(3, 150, (4, 5)))
    assert_equal(got, Drop(6, 180), "two units at once")
    # 6 + 150 + 40 rows fit exactly.
    assert_equal(window.close_unit(unit(4, 40)), [], "eviction at 196 rows")
    assert_equal(window.close_unit(unit(5, 5)), [Rebuild(4, 156, (*MARKER, 4, 5, *SUFFIX))], "eviction at 201 rows")


def test_previous_text_counts_towards_max_tokens():
    window = context_window(max_units=24, max_tokens=100)
    close(window, [5, 10])
    assert_equal(window.close_unit(unit(2, 80, (4,))), [Drop(6, 5)], "evictions at 101 rows")
    window = context_window(max_units=24, max_tokens=100)
    window.close_unit(unit(0, 4, (4, 5)))
    window.close_unit(unit(1, 10))
    # 98 rows without unit 0, but its spoken ids take five.
    assert_equal(window.close_unit(unit(2, 82)), [Rebuild(4, 20, (*MARKER, 4, 5, *SUFFIX))], "evictions at 102 rows")
    assert_equal([u.id for u in window.units], [2], "units")


def test_bounds_memory():
    for window in (make_window({"mode": "basic", "high_tokens": 400, "low_tokens": 300}), context_window(24, 100)):
        for number in range(1000):
            window.close_unit(unit(number, 20, range(15)))
        got = len(window.units), len(window.previous_ids), len(window.previous_text)
        assert got[0] <= 24 and got[1] <= 103 and got[2] <= 100, f"expected at most (24, 103, 100), got {got}"
        assert_equal(window.dropped_units + len(window.units), 1000, "units evicted and kept")


def test_ignores_a_unit_without_rows():
    window = make_window({"mode": "context", "max_units": 1})
    got = close(window, [13, 0, 13, 0])
    assert_equal(got, [[], [], [Drop(6, 13)], []], "evictions")
    assert_equal([u.id for u in window.units], [2], "units")


def test_basic_counts_stray_rows_from_the_prompt():
    window = make_window({"mode": "basic", "high_tokens": 40, "low_tokens": 25})
    window.add_stray(1)
    assert_equal(close(window, [13, 13, 13]), [[], [], [Drop(6, 26)]], "46 rows with the stray one")
    assert_equal((window.length, window.stray), (20, 1), "length, stray")


def test_context_evicts_stray_rows_with_the_first_unit():
    window = context_window(max_units=2)
    window.add_stray(1)
    assert_equal(close(window, [13, 13, 13]), [[], [], [Drop(6, 14)]], "evictions")
    assert_equal((window.length, window.stray), (32, 0), "length, stray")


def test_protect_requires_an_empty_context():
    window = make_window({"mode": "off"})
    with pytest.raises(AssertionError, match="got 6 rows"):
        window.protect(1, ())


# --- another prompt -------------------------------------------------------------------------------


@given(
    mode=st.sampled_from(["off", "basic", "context"]),
    lengths=st.lists(st.integers(1, 12), max_size=8),
    prefix=st.integers(0, 30),
    suffix=st.lists(st.integers(0, 99), max_size=6),
)
def test_another_prompt_keeps_the_newest_units(mode: str, lengths: list[int], prefix: int, suffix: list[int]) -> None:
    window = make_window({"mode": mode, "high_tokens": 40, "low_tokens": 25, "max_units": 4}, max_tokens=60)
    for number, length in enumerate(lengths):
        window.close_unit(unit(number, length, (1, 2)))
    before = [one.id for one in window.units]
    other = window.copy()
    other.replace_prompt(prefix, suffix, 1000)
    after = [one.id for one in other.units]
    assert [one.id for one in window.units] == before, "expected the original window unchanged"
    assert after == before[len(before) - len(after) :] and bool(after) == bool(before)
    assert other.preserve == prefix + len(other.previous_ids) + len(suffix)
    assert other.length == other.preserve + sum(one.length for one in other.units)
    if mode == "off":
        assert after == before
    if mode == "basic" and other.length > 40:
        assert len(after) <= 1, "expected all but the newest unit evicted"
    again = window.copy()
    if other.length:
        with pytest.raises(ContextOverflowError, match="context with another prompt: expected at most"):
            again.replace_prompt(prefix, suffix, other.length - 1)
    evicted = other.close_unit(unit(99, 3))
    assert other.length >= other.preserve and len(evicted) <= 1
