"""Outcomes of an offline run: the time line, turns, transcript and table."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker.loop.results import Failure, StageTimes, UnitResult
from worker.offline.reply import OfflineState, UnitOutcome, sound, starts, to_json, transcript, turns
from worker.offline.table import header, row
from worker.transcript.turns import Turn

RATE = 24_000
SILENT, OPEN, DRAINING = (
    OfflineState(True, False, False),
    OfflineState(True, True, False),
    OfflineState(True, False, True),
)
LENGTHS = st.lists(st.just(0) | st.integers(0, 3 * RATE), max_size=12)


def outcomes(
    *units: tuple[str | None, OfflineState] | Exception, pcm: list[np.ndarray | None] | None = None
) -> list[UnitOutcome]:
    """An outcome for each (text, state after it); a text of None listens."""
    made, before = [], SILENT
    for index, one in enumerate(units):
        if isinstance(one, Exception):
            made.append(UnitOutcome(index, Failure("s", index + 1, one), before, before))
            continue
        text, after = one
        result = UnitResult(
            "s", index + 1, text is None, text or "", not after.is_speaking, pcm[index] if pcm else None
        )
        made.append(UnitOutcome(index, result, before, after))
        before = after
    return made


def with_sound(*lengths: int) -> list[UnitOutcome]:
    pcm = [np.full(n, 0.1 * (k + 1), np.float32) if n else None for k, n in enumerate(lengths)]
    return outcomes(*[("a", OPEN)] * len(lengths), pcm=pcm)


@given(LENGTHS, st.integers(0, 3000))
def test_sound_starts_follow_the_player_model(lengths: list[int], delay_ms: int) -> None:
    begins = starts(lengths, delay_ms)
    assert len(begins) == len(lengths)
    end = 0
    for k, (begin, n) in enumerate(zip(begins, lengths, strict=True)):
        ready = (k + 1) * RATE
        assert begin >= ready, f"unit {k}: expected no sound before {ready}, got {begin}"
        assert begin >= end, f"unit {k}: expected nothing over sound that plays until {end}, got {begin}"
        if end >= ready:
            assert begin == end, f"unit {k}: expected it directly after {end}, got {begin}"
        else:
            assert begin == ready + 24 * delay_ms, f"unit {k}: expected {delay_ms} ms after {ready}, got {begin}"
        end = begin + n if n else end


def test_player_delay_bridges_short_first_second() -> None:
    lengths = [0, 20_160, 24_000, 27_840, 0]
    assert starts(lengths) == [24_000, 48_000, 72_000, 96_000, 123_840]
    # With a delay, the turn's short first sound and the next one are contiguous.
    assert starts(lengths, 200) == [28_800, 52_800, 72_960, 96_960, 124_800]


@given(LENGTHS, st.integers(0, 500))
def test_every_sample_is_placed_once(lengths: list[int], delay_ms: int) -> None:
    made = with_sound(*lengths)
    wave = sound(made, delay_ms)
    assert wave.dtype == np.float32
    expected = np.zeros(len(wave), np.float32)
    for one, begin in zip(made, starts(lengths, delay_ms), strict=True):
        expected[begin : begin + len(one.pcm)] += one.pcm
    np.testing.assert_array_equal(wave, expected)
    assert len(wave) >= RATE * len(lengths), f"expected the whole input, got {len(wave)} samples"
    assert np.count_nonzero(wave) == sum(lengths), "expected silence everywhere else"
    if lengths and lengths[-1]:
        assert wave[-1] != 0, "expected nothing after the last sound"


def test_groups_units_into_turns() -> None:
    got = turns(
        outcomes(
            (None, SILENT),
            ("Hello", OPEN),
            (" there", OPEN),
            (".", DRAINING),
            ("", SILENT),  # the rest of its sound
            (None, SILENT),
            ("Yes.", SILENT),  # text and sound in one unit
            ("No", OPEN),
            RuntimeError("lost"),
            (" way", DRAINING),
            ("Well", OPEN),  # begins while the previous turn's sound ends
            (".", DRAINING),
            ("So.", SILENT),
            (None, SILENT),
        )
    )
    assert got == [
        Turn(1, 4, "Hello there."),
        Turn(6, 6, "Yes."),
        Turn(7, 10, "No way"),
        Turn(10, 12, "Well."),
        Turn(12, 12, "So."),
    ]


def test_interrupted_turn() -> None:
    broken = outcomes(("One", OPEN), (None, SILENT), ("two", OPEN), (None, OPEN), (" three", OPEN))
    assert turns(broken) == [Turn(0, 0, "One"), Turn(2, 4, "two three")]


def test_turn_that_begins_without_text() -> None:
    got = turns(outcomes(("One.", DRAINING), ("", OPEN), ("Two.", SILENT)))
    assert got == [Turn(0, 1, "One."), Turn(1, 2, "Two.")]


def test_turn_without_text() -> None:
    assert turns(outcomes(("", OPEN), ("", SILENT), (None, SILENT))) == [Turn(0, 1, "")]


def test_transcript_lists_turns_and_units() -> None:
    made = outcomes((None, SILENT), ("Hé", OPEN), ValueError("bad"), pcm=[None, np.ones(5, np.float32)])
    document = transcript(made, {"file": "a.mp4"}, delay_ms=100)
    assert list(document) == ["file", "turns", "units"]
    listened, spoke, failed = document["units"]
    assert listened["decision"] == "LISTEN" and listened["sound_start"] is None and listened["n_samples"] == 0
    assert (spoke["decision"], spoke["text"], spoke["n_samples"], spoke["sound_start"]) == ("SPEAK", "Hé", 5, 50_400)
    assert failed == {"index": 2, "decision": "FAILED", "error": "ValueError: bad"}
    written = to_json({**document, "none": [], "some": {"a": [1, 2]}})
    assert json.loads(written) == {**document, "none": [], "some": {"a": [1, 2]}}
    lines = written.decode().splitlines()
    assert '  {"index": 2, "decision": "FAILED", "error": "ValueError: bad"}' in lines
    assert ' "some": {"a": [1, 2]}' in lines
    assert "Hé" in written.decode(), "expected letters as they are"


def test_rows_align_with_the_header() -> None:
    times = StageTimes(wait=0.25, decode=12.34, sound=5.0, total=123.456)
    result = UnitResult("s", 8, False, 'a\n\x1b"b', True, np.zeros(840 * 24, np.float32), 3, 25, 99, times=times)
    stages = "total wait see hear prefill decode condition speech sound finalize"
    assert header().split("|")[1].split() == stages.split()
    names, cells = header().split(), row(UnitOutcome(7, result, OPEN, SILENT)).split()
    shown = dict(zip(names, cells, strict=False))
    assert {name: shown[name] for name in ("unit", "decision", "tokens", "codes", "sound_ms", "rows")} == {
        **{"unit": "7", "decision": "SPEAK", "tokens": "3", "codes": "25", "sound_ms": "840", "rows": "99"}
    }
    assert (shown["total"], shown["wait"], shown["decode"], shown["sound"]) == ("123.5", "0.2", "12.3", "5.0")
    assert row(UnitOutcome(7, result, OPEN, SILENT)).endswith(r""" | 'a\n\x1b"b' (end of turn)""")
    bars = {
        tuple(i for i, letter in enumerate(line) if letter == "|")
        for line in (header(), *map(row, outcomes((None, SILENT), KeyError("x"))))
    }
    assert len(bars) == 1, f"expected columns to line up, got bars at {bars}"
    assert row(outcomes(KeyError("x"))[0]).endswith("| KeyError: 'x'")
