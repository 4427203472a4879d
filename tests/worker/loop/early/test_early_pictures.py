"""Pictures encoded before their unit: results equal those of pictures encoded with it, and nothing is left behind."""

import gc
import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple
from unittest import mock

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from models.errors import ImageError
from models.inputs.image import ImagePatches, image_patches, open_image, plan
from tests.worker.engine.failing_regions import broken, counted, of_slot, poisoned
from tests.worker.loop.engines import (
    ALOUD,
    QUIET,
    Director,
    SmallEngine,
    assert_mirrors,
    assert_same_events,
    make_config,
    make_image,
    make_prompt,
    make_sound,
    make_unit,
    short_speech,
)
from worker.config.session import SessionConfig, WindowConfig
from worker.early.trial import EarlyTrial
from worker.loop.duplex_job import MAX_WAITING_FRAMES
from worker.loop.early.edge_forecast import EdgeForecast
from worker.loop.early.headroom import Headroom
from worker.loop.prompt.system_prompt import Adjustment
from worker.loop.results import Event, Failure, FedRows, InsertedText, UnitResult
from worker.loop.session import Session, TextInput

CONFIGS = (
    ALOUD.model_copy(update={"window": WindowConfig(mode="basic", high_tokens=90, low_tokens=60)}),
    QUIET.model_copy(update={"window": WindowConfig(mode="context", max_units=2, previous_max_tokens=12)}),
    QUIET,  # its context overflows
    QUIET.model_copy(update={"compat": "reference"}),
)
NAMES = ("a", "b")


@dataclass(frozen=True)
class Step:
    """What a client does until the end of a unit or of a piece of it.

    Args:
        ahead: pictures that it sends before the sound.
        has_time: the engine is idle between these and the sound.
        beside: pictures in the message of the sound.
        n: samples.
        settles: the engine ends all units before the next step.
        event: what happens between pictures and sound.
    """

    name: str
    ahead: int = 0
    has_time: bool = True
    beside: int = 0
    n: int = 16_000
    settles: bool = True
    event: str = ""


class Run(NamedTuple):
    """Events and digests of logits, by session."""

    events: dict[str, list[Event]]
    logits: dict[str, list[str]]


@cache
def engine(is_early: bool, *, feeds: bool | Literal["auto"] = False) -> SmallEngine:
    """One engine for all runs, so that state left by one of them affects the next."""
    config = make_config(early_pictures=is_early, early_prefill=feeds)
    return SmallEngine(config, Director(listen=0.4, turn_end=0.3, unit_end=0.3))


def director(small: SmallEngine) -> Director:
    assert isinstance(small.loop.observer, Director)
    return small.loop.observer


def picture(seed: int, max_slices: int = 1) -> list[ImagePatches]:
    """A new object each time: what is encoded for one does not serve another."""
    image = open_image(make_image(seed, 560 if seed % 5 == 0 else 112, 420 if seed % 5 == 0 else 84))
    return image_patches(image, plan(*image.size, max_slices))


def play(small: SmallEngine, config: SessionConfig, steps: Sequence[Step]) -> Run:
    small.close_all()
    director(small).logits.clear()
    speaker = 0 if config.generate_audio else None
    sessions = {name: small.open(name, config, make_prompt(speaker=speaker)) for name in NAMES}
    for number, step in enumerate(steps):
        sessions[step.name] = _play_step(small, sessions[step.name], number, step)
    small.settle()
    for session in sessions.values():
        if session.is_live:
            assert_mirrors(small.unit_steps, session.slot)
    events = {name: [untimed(one) for one in small.take(name) if not isinstance(one, InsertedText)] for name in NAMES}
    return Run(events, dict(director(small).logits))


def untimed(event: Event) -> Event:
    if not isinstance(event, UnitResult) or event.early is None:
        return event
    return replace(event, early=replace(event.early, spent_ms=0.0))


def _play_step(small: SmallEngine, session: Session, number: int, step: Step) -> Session:
    frames = [picture(10 * number + i, max_slices=1 + 2 * (i == 1)) for i in range(step.ahead + step.beside)]
    for slices in frames[: step.ahead]:
        small.sessions.expect_picture(session, slices)
    if step.has_time:
        small.settle()
    if step.event == "break":
        small.sessions.break_speech(session)
    elif step.event == "prepare":
        small.settle()
        small.sessions.prepare(session, make_prompt())
        frames = frames[step.ahead :]  # pictures of the old context
    elif step.event == "text":
        small.sessions.insert_text(session, TextInput((5, 6, 7), 0.0))
    elif step.event == "adjust":
        small.settle()
        small.sessions.adjust(session, Adjustment(config=config_with(session, temperature=0.5 + number % 2)))
    trial = EarlyTrial() if step.event == "trial" else None
    unit = make_unit(number, step.n, force_listen=step.event == "listen")
    small.sessions.unit(session, replace(unit, frames=frames, early=trial))
    del frames, unit
    if step.event == "fails":
        with broken(small.unit_steps.regions, "unit_prefill", of_slot(session.slot), "before"):
            small.settle()
    elif step.settles:
        small.settle()
    return session


def config_with(session: Session, **settings: float) -> SessionConfig:
    return session.config.model_copy(update=settings)


def check_equal_runs(config: SessionConfig, steps: Sequence[Step]) -> None:
    early, plain = (play(engine(is_early), config, steps) for is_early in (True, False))
    for name in NAMES:
        assert_same_events(name, early.events[name], plain.events[name])
    assert early.logits == plain.logits, "expected the same logits to the last bit"
    assert engine(False).loop.pictures.counts == (0, 0, 0, 0.0)
    # A forward of other rows rounds differently, so that only ids and sound are equal.
    fed = play(engine(True, feeds=True), config, steps)
    for name in NAMES:
        assert_same_events(name, fed.events[name], plain.events[name])


def held(small: SmallEngine) -> int:
    """Slices whose rows are kept, or that are left to encode."""
    images = small.unit_steps.early_images
    kept = [one for places in images._held for one in places if one is not None and one.part() is not None]
    return len(kept) + images.has_expected


@pytest.fixture(autouse=True)
def empty_engines() -> Iterator[None]:
    yield
    for small in (engine(True), engine(False), engine(True, feeds=True)):
        small.close_all()
        assert held(small) == 0, "expected nothing that is left of closed sessions"


@pytest.fixture(scope="module", autouse=True)
def little_speech() -> Iterator[None]:
    with short_speech(), mock.patch.object(Headroom, "allows", return_value=True):
        yield


EVENTS = ("break", "listen", "prepare", "text", "adjust", "fails", "trial")
STEPS = st.builds(
    Step,
    st.sampled_from(NAMES),
    ahead=st.sampled_from((0, 1, 1, 2)),
    has_time=st.booleans(),
    beside=st.sampled_from((0, 0, 1)),
    n=st.sampled_from((3_000, 16_000, 16_000, 35_000)),
    settles=st.booleans(),
    event=st.sampled_from(("", "", "", *EVENTS)),
)
MANY = (
    Step("a", ahead=1),
    Step("b", ahead=2, has_time=False, settles=False),
    Step("a", ahead=1, beside=1, n=3_000),
    Step("a", ahead=2),
    Step("b", beside=1, n=3_000),
    Step("b", ahead=1, event="break"),
    Step("a", ahead=1, event="prepare"),
    Step("a", ahead=1, n=35_000, settles=False),
    Step("b", ahead=1),
)


@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
@given(config=st.sampled_from(CONFIGS), steps=st.lists(STEPS, min_size=2, max_size=5))
@example(config=CONFIGS[0], steps=list(MANY))
def test_arrival_does_not_change_results(config: SessionConfig, steps: list[Step]) -> None:
    check_equal_runs(config, steps)


def test_unit_gathers_rows_that_are_there() -> None:
    small = engine(True)
    session, before = small.open("a"), small.loop.pictures.counts
    slices = picture(1, max_slices=3)
    small.sessions.expect_picture(session, slices[:1])
    small.settle()
    small.sessions.unit(session, replace(make_unit(0), frames=[slices[:1]]))
    small.settle()
    after = small.loop.pictures.counts
    assert (after.encoded - before.encoded, after.used - before.used) == (1, 1)
    assert after.spent_ms > before.spent_ms


def test_pictures_wait_until_no_unit_is_in_flight() -> None:
    small = engine(True)
    a, b = (small.open(name) for name in NAMES)
    before = small.loop.pictures.counts.encoded
    slices = [picture(number) for number in range(3)]
    small.send(b, 0)
    for one in slices:
        small.sessions.expect_picture(a, one)
    n_iterations = 0
    while small.loop.jobs or not n_iterations:
        assert small.loop.pictures.counts.encoded == before, "expected no picture beside a unit"
        small.step()
        n_iterations += 1
    # The last iteration ended the unit; each further one encodes two slices at most.
    small.settle()
    assert small.loop.pictures.counts.encoded == before + 3
    assert isinstance(small.take("b")[-1], UnitResult)


def test_pictures_wait_for_an_expected_unit() -> None:
    """Only units count, not pieces of them, and only those of open sessions."""
    small, counted_units = engine(True), {}
    a, b = (small.open(name) for name in NAMES)
    before = small.loop.pictures.counts.encoded
    with mock.patch.object(EdgeForecast, "count", lambda self, session, at: counted_units.update({session: at})):
        small.send(a, 0, 3_000)
        small.send(b, 1)
        small.settle()
    assert counted_units == {"b": 0.0}
    slices = picture(1)
    with mock.patch.object(EdgeForecast, "is_near", return_value=True):
        small.sessions.expect_picture(a, slices)
        for _ in range(3):
            assert small.step() and small.loop.pictures.is_waiting
    assert small.loop.pictures.counts.encoded == before
    small.settle()
    assert small.loop.pictures.counts.encoded == before + 1


@pytest.mark.parametrize("has_time", [True, False])
@pytest.mark.parametrize("closes", [True, False])
def test_closed_session_and_refused_unit_free_their_pictures(closes: bool, has_time: bool) -> None:
    small = engine(True)
    session = small.open("a")
    small.sessions.expect_picture(session, picture(1))
    if has_time:
        small.settle()
    assert held(small) == 1
    if closes:
        small.sessions.close(session)
    else:
        small.sessions.forget_pictures_ahead(session)
    assert held(small) == 0 and small.loop.is_idle


def test_pictures_that_fail_are_encoded_with_their_unit() -> None:
    small = engine(True)
    session, before, slices = small.open("a"), small.loop.pictures.counts.encoded, picture(1)
    with broken(small.unit_steps.regions, "vision", lambda tensors: True, "before"):
        small.sessions.expect_picture(session, slices)
        small.settle()
    assert small.loop.pictures.counts.encoded == before
    small.sessions.unit(session, replace(make_unit(0), frames=[slices]))
    small.settle()
    (result,) = small.take("a")
    assert isinstance(result, UnitResult) and result.n_slices == 1, f"expected a result, got {result}"


def test_too_many_waiting_pictures_are_refused_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    small = engine(False)
    session, slices = small.open("a"), picture(1)
    small.sessions.unit(session, replace(make_unit(0, 3_000), frames=[slices] * (MAX_WAITING_FRAMES + 1)))
    small.settle()
    (failure,) = small.take("a")
    assert isinstance(failure, Failure) and isinstance(failure.error, ImageError), f"expected a refusal, got {failure}"
    loud = [one for one in caplog.records if one.levelno >= logging.WARNING or one.exc_info]
    assert not loud and not session.frames_waiting, f"expected no warning, got {caplog.text}"


def test_pictures_beyond_the_room_of_a_slot_are_encoded_with_their_unit() -> None:
    small = engine(True)
    session, before = small.open("a"), small.loop.pictures.counts.encoded
    capacity = small.loop.pictures.capacity
    frames = [picture(number) for number in range(capacity + 2)]
    for slices in frames:
        small.sessions.expect_picture(session, slices)
    small.settle()
    assert small.loop.pictures.counts.encoded == before + capacity
    small.sessions.unit(session, replace(make_unit(0, 3_000), frames=frames))
    small.settle()
    assert small.loop.pictures.counts.encoded == before + capacity, "expected no more for pictures that wait for sound"
    assert len(session.frames_waiting) == capacity + 2 and not session.frames_ahead


def fed_ahead(small: SmallEngine, session: Session, frames: Sequence[list[ImagePatches]]) -> int:
    """Send pictures ahead and let the engine rest. Returns: context rows that it has fed for them."""
    before = small.unit_steps.context_len(session.slot)
    for slices in frames:
        small.sessions.expect_picture(session, slices)
    small.settle()
    assert_mirrors(small.unit_steps, session.slot)
    return small.unit_steps.context_len(session.slot) - before


def test_first_rows_of_a_unit_are_fed_before_it() -> None:
    """<unit> and two pictures; the unit feeds its sound, and counts all of them."""
    small = engine(True, feeds=True)
    session, frames = small.open("a"), [picture(1), picture(2)]
    n_prompt = small.unit_steps.context_len(session.slot)
    assert fed_ahead(small, session, frames) == 1 + 2 * 66
    small.send(session, 0, 3_000)
    small.settle()
    (piece,) = small.take("a")
    assert isinstance(piece, UnitResult) and piece.context_len == n_prompt, (
        "expected no rows of a unit that is not full"
    )
    with counted(small.unit_steps.regions) as calls:
        small.sessions.unit(session, replace(make_unit(0), frames=frames, force_listen=True))
        small.settle()
    (result,) = small.take("a")
    assert isinstance(result, UnitResult) and (calls["vision"], calls["unit_prefill"]) == (0, 1), calls
    assert (result.context_len, result.rows) == (n_prompt + 1 + 2 * 66 + 10, FedRows(5, 10, 128))
    assert session.window.length == result.context_len + len(session.pending)


def test_auto_feeds_pictures_ahead_while_few_sessions_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.loop.early.early_prefill.FED_SESSIONS", 1)
    small = engine(True, feeds="auto")
    session, frames = small.open("a"), [picture(1), picture(2), picture(3)]
    assert fed_ahead(small, session, frames[:1]) == 1 + 66
    other = small.open("b")
    n_prompt = small.unit_steps.context_len(other.slot)
    assert fed_ahead(small, other, frames[1:2]) == 0, "expected no rows with two open sessions"
    small.sessions.close(session)
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None, "expected a closed session to be forgotten"
    fed_ahead(small, other, frames[2:])
    n_fed = small.unit_steps.context_len(other.slot) - n_prompt
    assert n_fed == 1 + 2 * 66, f"expected the rows of the two pictures that waited, got {n_fed}"
    small.close_all()


@pytest.mark.parametrize("change", ["text", "adjust", "other pictures", "backlog", "fails"])
def test_rows_are_removed_when_the_unit_begins_otherwise(change: str) -> None:
    small = engine(True, feeds=True)
    session, frames = small.open("a"), [picture(1)]
    n_prompt = small.unit_steps.context_len(session.slot)
    assert fed_ahead(small, session, frames) == 67
    unit = replace(make_unit(0), frames=frames, force_listen=True)
    expected = n_prompt + 67 + 10
    if change == "text":
        small.sessions.insert_text(session, TextInput((5, 6, 7), 0.0))
        expected += 3
    elif change == "adjust":
        small.sessions.adjust(session, Adjustment(config=config_with(session, temperature=0.5)))
        assert small.unit_steps.context_len(session.slot) == n_prompt
    elif change == "other pictures":
        unit = replace(unit, frames=[picture(2), *frames])
        expected += 66
    elif change == "backlog":
        unit = replace(unit, sound=make_sound(0, 33_000))
        expected += 1 + 10 + 2
    elif change == "fails":
        with broken(small.unit_steps.regions, "unit_prefill", of_slot(session.slot), "before"):
            small.sessions.unit(session, unit)
            small.settle()
        assert small.unit_steps.context_len(session.slot) == n_prompt and session.early_rows is None
    small.sessions.unit(session, unit)
    small.settle()
    result = small.take("a")[-1]
    assert isinstance(result, UnitResult) and result.context_len == expected, f"expected {expected} rows, got {result}"


@pytest.mark.parametrize("how", ["raises", "nan"])
def test_rows_that_cannot_be_fed_are_fed_with_their_unit(how: str) -> None:
    """NaN fails the unit that has the picture, and no other one."""
    small = engine(True, feeds=True)
    session, frames, before = small.open("a"), [picture(1)], small.loop.pictures.counts.fed
    table = small.unit_steps.regions
    fails = broken(table, "unit_prefill", of_slot(session.slot), "before") if how == "raises" else None
    with fails or poisoned(table, "vision", lambda tensors: 0):
        assert fed_ahead(small, session, frames) == 0 and small.loop.pictures.counts.fed == before
    small.sessions.unit(session, replace(make_unit(0), frames=frames))
    small.send(session, 1)
    small.settle()
    kinds = [type(one) for one in small.take("a") if isinstance(one, UnitResult | Failure)]
    assert kinds == [UnitResult if how == "raises" else Failure, UnitResult], kinds
    assert_mirrors(small.unit_steps, session.slot)
