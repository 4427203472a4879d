"""Rounds in the context, compared with labelled rows to which the evictions are applied."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.loop.rounds import Rounds
from worker.loop.window import Drop

Row = tuple[int, int]  # number of the round it belongs to, place in the round; negative numbers are system messages


def apply(rows: list[Row], drops: list[Drop]) -> list[Row]:
    """Apply drops to a list of rows, in order."""
    for keep, n in drops:
        assert n > 0 and keep + n <= len(rows), f"expected rows that are there, got {keep} and {n} of {len(rows)}"
        rows = rows[:keep] + rows[keep + n :]
    return rows


def whole_rounds(rows: list[Row]) -> dict[int, int]:
    """Row counts per round; a round's rows must be adjacent and in order."""
    sizes: dict[int, int] = {}
    for number, place in rows:
        assert place == sizes.get(number, 0), f"round {number}: expected row {sizes.get(number, 0)} next, got {place}"
        sizes[number] = place + 1
    return sizes


def test_evicts_the_oldest_rounds_after_the_system_message() -> None:
    rounds = Rounds(high=100, low=60)
    rounds.add_system(10)
    assert [rounds.close(n, "stop") for n in (30, 30, 30)] == [[], [], []], "expected no eviction at 100 rows"
    assert rounds.close(5, "length") == [Drop(10, 60)]
    assert (rounds.length, rounds.prefix, len(rounds.rounds)) == (45, 10, 3)
    assert rounds.stopped == "length"


def test_keeps_a_later_system_message() -> None:
    rounds = Rounds(high=100, low=20)
    rounds.add_system(10)
    rounds.close(20, "stop")
    rounds.close(20, "stop")
    rounds.add_system(30)
    rounds.close(20, "stop")
    assert rounds.close(7, "stop") == [Drop(10, 40), Drop(40, 20)]
    assert (rounds.length, rounds.prefix) == (47, 40), "expected both messages and the newest round"


def test_keeps_the_newest_round_of_any_length() -> None:
    rounds = Rounds(high=50, low=40)
    rounds.add_system(10)
    rounds.close(10, "stop")
    assert rounds.close(500, "stop") == [Drop(10, 10)]
    assert rounds.length == 510
    assert rounds.close(5, "stop") == [Drop(10, 500)]


def test_closing_rows_belong_to_the_round_before() -> None:
    rounds = Rounds(high=50, low=30)
    rounds.add_system(10)
    rounds.close(20, "stop")
    assert rounds.stopped == "stop"
    assert rounds.close(25, "stop", n_closing=2) == [Drop(10, 22)]
    assert rounds.length == 33


def test_refuses_inconsistent_marks_and_closing_rows() -> None:
    with pytest.raises(AssertionError, match="marks"):
        Rounds(high=5, low=6)
    with pytest.raises(AssertionError, match="closing rows"):
        Rounds(high=5, low=5).close(3, "stop", n_closing=3)


moves = st.lists(st.tuples(st.sampled_from(["round", "round", "round", "system"]), st.integers(4, 30)), max_size=25)


@given(moves, st.integers(0, 120), st.integers(0, 120), st.integers(0, 3))
def test_any_conversation_equals_labelled_rows(
    moves: list[tuple[str, int]], one: int, other: int, n_closing: int
) -> None:
    high, low = max(one, other), min(one, other)
    rounds, rows, newest = Rounds(high=high, low=low), [], None
    for number, (what, n) in enumerate(moves):
        before = whole_rounds(rows)
        if what == "system":
            rounds.add_system(n)
            rows += [(-number - 1, place) for place in range(n)]
            newest = None
            continue
        closing = 0 if newest is None else n_closing
        if closing:
            rows += [(newest, before[newest] + place) for place in range(closing)]
        rows += [(number, place) for place in range(n - closing)]
        newest, full = number, whole_rounds(rows)
        drops = rounds.close(n, "stop", n_closing=closing)
        rows = apply(rows, drops)
        kept = whole_rounds(rows)
        assert len(rows) == rounds.length, f"expected {rounds.length} rows, got {len(rows)}"
        assert kept == {name: full[name] for name in kept}, "expected whole rounds"
        evicted = [name for name in full if name not in kept]
        droppable = [name for name in full if name >= 0 and name != number]
        assert evicted == droppable[: len(evicted)], f"expected the oldest of {droppable} to be evicted, got {evicted}"
        if sum(full.values()) <= high:
            assert not evicted, f"expected nothing to be evicted, got {evicted}"
        else:
            assert len(rows) <= low or evicted == droppable, f"expected at most {low} rows, got {len(rows)}"
            assert not evicted or len(rows) + full[evicted[-1]] > low, "expected no more evictions than needed"
        assert all(a.keep < b.keep for a, b in pairwise(drops)), f"expected gaps apart, got {drops}"
