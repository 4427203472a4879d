"""Units that run before their seconds are full: taken back without a trace, or kept as a unit that is closed early."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from tests.worker.loop.early.trial_engine import (
    CONFIGS,
    EVENTS,
    PIECES,
    TRIALS,
    Piece,
    TrialDirector,
    check_equal_runs,
    engine,
)
from tests.worker.loop.engines import (
    QUIET,
    make_unit,
    short_speech,
)
from worker.config.session import SessionConfig
from worker.early.trial import EarlyEnd, EarlyOutcome, EarlyTrial
from worker.loop.early.headroom import Headroom


@pytest.fixture(autouse=True)
def empty_engine() -> Iterator[None]:
    yield
    engine().close_all()


@pytest.fixture(scope="module", autouse=True)
def much_time() -> Iterator[None]:
    """Units are short, and there is always time for a trial."""
    with short_speech(), mock.patch.object(Headroom, "allows", return_value=True):
        yield


def trial_of(kind: str, event: str = "") -> Piece:
    return Piece(4_000, kind, other=16_000, event=event)


WHOLE = Piece(16_000, "plain", other=16_000)
# Past the fourth unit, where the audio encoder starts over, and beyond five seconds of sound.
LONG = (
    WHOLE,
    WHOLE,
    WHOLE,
    trial_of("listens", "adjust"),
    trial_of("resumes", "ahead"),
    trial_of("listens", "queued break"),
    WHOLE,
    trial_of("speaks", "text"),
    trial_of("nan", "break"),
    trial_of("listens", "prompt"),
    WHOLE,
)


@settings(max_examples=5, phases=[Phase.explicit, Phase.generate])
@given(
    config=st.sampled_from(CONFIGS),
    pieces=st.lists(
        st.builds(
            Piece,
            st.sampled_from(PIECES),
            st.sampled_from(TRIALS),
            st.sampled_from((False, False, True)),
            st.sampled_from((0, 16_000)),
            st.sampled_from(EVENTS),
        ),
        min_size=3,
        max_size=8,
    ),
)
@example(config=CONFIGS[2], pieces=list(LONG))
@example(config=CONFIGS[2], pieces=[Piece(4_000, "speaks"), Piece(7_000, "nan", event="ahead"), Piece(16_000, "fails")])
def test_trials_leave_no_trace(config: SessionConfig, pieces: list[Piece]) -> None:
    check_equal_runs(config, pieces)


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("speaks", EarlyEnd.COMMITTED),
        ("listens", EarlyEnd.TAKEN_BACK),
        ("resumes", EarlyEnd.TAKEN_BACK),
        ("fails", EarlyEnd.TAKEN_BACK),
        ("nan", EarlyEnd.TAKEN_BACK),
    ],
)
def test_how_trials_end(kind: str, end: EarlyEnd) -> None:
    pieces = [Piece(4_000, kind, picture=True, other=16_000), Piece(16_000, "plain")]
    assert check_equal_runs(CONFIGS[0], pieces) == [end, None]


def test_kept_unit_shifts_the_clock() -> None:
    """After a unit that was kept, the next one takes a whole second of sound again."""
    small = engine()
    session = small.open("a", CONFIGS[3].model_copy(update={"force_listen_count": 0}))
    small.director.trial = "speaks"
    trial = EarlyTrial()
    small.sessions.unit(session, replace(make_unit(0, 6_000), early=trial))
    small.settle()
    kept = small.take("a")[-1]
    assert (trial.outcome.end, trial.outcome.shift_ms, kept.early) == (EarlyEnd.COMMITTED, 625.0, trial.outcome)
    results = [small.run_unit(session, number, 8_000) for number in (1, 2)]
    assert [bool(one.tokens) for one in (kept, *results)] == [True, False, True], results


@pytest.mark.parametrize(
    ("change", "unit"),
    [
        ({"compat": "reference"}, {}),
        ({"force_listen_count": 1}, {}),
        ({}, {"force_listen": True}),
        ({}, {"force_speak": True}),
        ({}, {"close_early": True}),
        ({}, {"n": 14_500}),
        ({}, {"n": 20_000}),
        ({}, {"seed": None, "pictures": (1,)}),
    ],
    ids=str,
)
def test_units_that_are_not_tried(change: dict[str, Any], unit: dict[str, Any]) -> None:
    small, trial = engine(), EarlyTrial()
    session = small.open("a", CONFIGS[3].model_copy(update={"force_listen_count": 0, **change}))
    small.sessions.unit(session, replace(make_unit(**{"seed": 0, "n": 4_000, **unit}), early=trial))
    small.settle()
    assert trial.outcome == EarlyOutcome(), f"expected no trial, got {trial.outcome}"


def test_speaking_session_is_not_tried() -> None:
    small, trials = engine(), [EarlyTrial(), EarlyTrial()]
    session = small.open("a", QUIET)
    small.director.trial = "speaks"
    with mock.patch.object(small.director, "turn_end", 0.0):
        for number, trial in enumerate(trials):
            small.sessions.unit(session, replace(make_unit(number, 4_000), early=trial))
            small.settle()
    assert [trial.outcome.end for trial in trials] == [EarlyEnd.COMMITTED, EarlyEnd.SKIPPED]


def test_trial_waits_for_units_whose_time_has_come() -> None:
    """Both sessions send in the same moment: the neighbour is prefilled before the trial runs."""
    small = engine()
    early, other = (small.open(name, QUIET) for name in ("a", "b"))
    small.director.trial = "speaks"
    order: list[str] = []
    with mock.patch.object(TrialDirector, "audio_encoded", lambda self, session, rows: order.append(session)):
        small.sessions.unit(early, replace(make_unit(0, 4_000), early=EarlyTrial()))
        small.send(other, 1)
        small.settle()
    assert order == ["b", "a"], f"expected the neighbour first, got {order}"


def test_no_time_no_trial() -> None:
    small, trial = engine(), EarlyTrial()
    session = small.open("a", QUIET)
    with mock.patch.object(Headroom, "allows", return_value=False):
        small.sessions.unit(session, replace(make_unit(0, 4_000), early=trial))
        small.settle()
    assert trial.outcome == EarlyOutcome(), f"expected no trial, got {trial.outcome}"
