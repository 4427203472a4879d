"""Pictures encoded before their unit: results equal those of pictures encoded with it, and nothing is left behind."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from models.inputs.image import ImagePatches, image_patches, open_image, plan
from tests.worker.engine.failing_regions import broken
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
    make_unit,
    short_speech,
)
from worker.config.session import SessionConfig, WindowConfig
from worker.loop.results import Event, UnitResult
from worker.loop.session import Session

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
def engine(is_early: bool) -> SmallEngine:
    """One engine for all runs, so that state left by one of them affects the next."""
    return SmallEngine(make_config(early_pictures=is_early), Director(listen=0.4, turn_end=0.3, unit_end=0.3))


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
    return Run({name: small.take(name) for name in NAMES}, dict(director(small).logits))


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
    unit = replace(make_unit(number, step.n), frames=frames, force_listen=step.event == "listen")
    small.sessions.unit(session, unit)
    del frames, unit
    if step.settles:
        small.settle()
    return session


def check_equal_runs(config: SessionConfig, steps: Sequence[Step]) -> None:
    early, plain = (play(engine(is_early), config, steps) for is_early in (True, False))
    for name in NAMES:
        assert_same_events(name, early.events[name], plain.events[name])
    assert early.logits == plain.logits, "expected the same logits to the last bit"
    assert engine(False).loop.pictures.counts == (0, 0, 0.0)


def held(small: SmallEngine) -> int:
    """Slices whose rows are kept, or that are left to encode."""
    images = small.unit_steps.early_images
    kept = [one for places in images._held for one in places if one is not None and one.part() is not None]
    return len(kept) + images.has_expected


@pytest.fixture(autouse=True)
def empty_engines() -> Iterator[None]:
    yield
    for is_early in (True, False):
        small = engine(is_early)
        small.close_all()
        assert held(small) == 0, "expected nothing that is left of closed sessions"


@pytest.fixture(scope="module", autouse=True)
def little_speech() -> Iterator[None]:
    with short_speech():
        yield


STEPS = st.builds(
    Step,
    st.sampled_from(NAMES),
    ahead=st.sampled_from((0, 1, 1, 2)),
    has_time=st.booleans(),
    beside=st.sampled_from((0, 0, 1)),
    n=st.sampled_from((3_000, 16_000, 16_000, 35_000)),
    settles=st.booleans(),
    event=st.sampled_from(("", "", "", "break", "listen", "prepare")),
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


@pytest.mark.parametrize("has_time", [True, False])
def test_closed_session_frees_its_pictures(has_time: bool) -> None:
    small = engine(True)
    session, slices = small.open("a"), picture(1)
    small.sessions.expect_picture(session, slices)
    if has_time:
        small.settle()
    assert held(small) == 1
    small.sessions.close(session)
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


def test_pictures_beyond_the_room_of_a_slot_are_encoded_with_their_unit() -> None:
    small = engine(True)
    session, before = small.open("a"), small.loop.pictures.counts.encoded
    capacity = small.loop.pictures.capacity
    slices = 3 * picture(0) + [part for number in range(capacity) for part in picture(number)]
    small.sessions.expect_picture(session, slices)
    small.settle()
    assert small.loop.pictures.counts.encoded == before + capacity
