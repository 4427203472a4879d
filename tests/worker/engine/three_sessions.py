"""Three sessions that speak side by side on one engine; in one unit a failure is injected for the middle one.

The events of each session are compared, sample by sample, with those of a run without the failure. Units are short, see
`short_units`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from tests.worker.engine.failing_regions import When, broken, counted, of_slot
from tests.worker.loop.engines import (
    ALOUD,
    QUIET,
    UNIT_TOKENS,
    Director,
    SmallEngine,
    assert_mirrors,
    assert_same_events,
    make_config,
    make_patches,
    make_prompt,
)
from worker.config.session import WindowConfig
from worker.loop.results import Event, Failure, PartialResult, UnitResult
from worker.loop.session import Session

NAMES = ("left", "victim", "right")
TIGHT = WindowConfig(mode="basic", high_tokens=1, low_tokens=0)  # every unit but the newest is evicted
N_UNITS, AT = 5, 3  # AT: the unit with the failure, the first one in which the audio encoder starts over
SOUND = ("flow", "hift")  # regions of the vocoder


@dataclass
class SceneResult:
    """Outcome of a run by session.

    rows: context rows after each unit. logits: one digest per unit that has begun. calls: calls of each region in the
    unit with the failure.
    """

    events: dict[str, list[Event]]
    logits: dict[str, list[str]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    rows: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in NAMES})


@cache
def engine() -> SmallEngine:
    """One engine for all tests, so that state left by one test affects the next."""
    return SmallEngine(make_config(), Director(listen=0.0, turn_end=0.1, unit_end=0.1))


Fault = Callable[[Session], AbstractContextManager[Any]]


def play(fault: Fault | None = None, *, skip: bool = False, speaks: bool = True) -> SceneResult:
    """Run `N_UNITS` units of three sessions; the victim's unit `AT` runs under `fault`, or is skipped."""
    small = engine()
    small.loop.observer.logits.clear()
    config = (ALOUD if speaks else QUIET).model_copy(update={"window": TIGHT})
    sessions = {name: small.open(name, config, make_prompt(name, ref=1, speaker=0)) for name in NAMES}
    result = SceneResult({})
    for number in range(N_UNITS):
        for name, session in sessions.items():
            if not (skip and name == "victim" and number == AT):
                pictures = [NAMES.index(name)] if number == AT else []
                small.send(session, number, pictures=pictures, force_listen=number < AT - 1)
        with (
            counted(table_of("unit_step")) as calls,
            counted(table_of("flow")) as more,
            fault(sessions["victim"]) if fault and number == AT else nullcontext(),
        ):
            small.settle()
        if number == AT:
            result.calls = calls | more
        for name, session in sessions.items():
            assert_mirrors(small.unit_steps, session.slot)
            result.rows[name].append(small.unit_steps.context_len(session.slot))
    result.events = {name: small.take(name) for name in NAMES}
    result.logits = {name: small.loop.observer.logits.pop(name) for name in NAMES}
    small.close_all()
    return result


@cache
def undisturbed(speaks: bool = True) -> SceneResult:
    return play(speaks=speaks)


@cache
def without(speaks: bool = True) -> SceneResult:
    """A run in which the victim does not send the unit that fails."""
    return play(skip=True, speaks=speaks)


def outcomes(events: list[Event]) -> list[UnitResult | Failure]:
    return [event for event in events if isinstance(event, UnitResult | Failure)]


def table_of(name: str) -> Any:
    small = engine()
    return small.vocoder.regions if name in SOUND else small.unit_steps.regions


def touching(name: str, session: Session) -> Callable[[tuple[torch.Tensor, ...]], bool]:
    """Select a region's calls that concern this session."""
    if name == "vision":
        picture = torch.from_numpy(make_patches(1)[0].pixels)
        return lambda tensors: any(torch.equal(own[: len(picture)], picture) for own in tensors[0])
    if name in SOUND:
        n_sessions = engine().vocoder.sizes.n_sessions
        return lambda tensors: any(
            slot % n_sessions == session.speech.vocoder_slot for slot in tensors[0].tolist() if slot < 2 * n_sessions
        )
    return of_slot(session.slot)


def breaking(name: str, when: When) -> Callable[[Session], AbstractContextManager[Any]]:
    return lambda session: broken(table_of(name), name, touching(name, session), when)


def assert_neighbours_unchanged(result: SceneResult, speaks: bool = True) -> None:
    expected = undisturbed(speaks)
    for name in ("left", "right"):
        assert_same_events(name, result.events[name], expected.events[name])
        assert result.rows[name] == expected.rows[name], f"{name}: expected context rows {expected.rows[name]}"
        assert result.logits[name] == expected.logits[name], f"{name}: expected the same logits to the last bit"


def assert_never_sent(result: SceneResult, error: type[Exception], speaks: bool = True) -> None:
    """The unit ends with a failure, and later units equal those of a run without it."""
    expected = without(speaks)
    events = result.events["victim"]
    failed = [number for number, event in enumerate(events) if isinstance(event, Failure)]
    kinds = [type(events[number].error) for number in failed]
    assert kinds == [error], f"expected one {error.__name__}, got {kinds}"
    assert events[failed[0]].unit == AT + 1, f"expected a failure of unit {AT + 1}, got {events[failed[0]].unit}"
    # Partial results of the unit may precede the failure.
    before = [event for event in events[: failed[0]] if not (isinstance(event, PartialResult) and event.unit == AT + 1)]
    assert_same_events("victim", before + events[failed[0] + 1 :], expected.events["victim"])
    assert result.rows["victim"] == expected.rows["victim"], f"expected context rows {expected.rows['victim']}"
    assert result.logits["victim"][-1] == expected.logits["victim"][-1], "expected the same logits to the last bit"


def assert_only_speech_failed(result: SceneResult, error: type[Exception]) -> None:
    """The unit ends with a failure, its text stands, and the next unit has sound."""
    got, expected = outcomes(result.events["victim"]), outcomes(undisturbed().events["victim"])
    kinds = [type(event.error) if isinstance(event, Failure) else None for event in got]
    assert kinds == [error if number == AT else None for number in range(N_UNITS)], f"got {kinds}"
    assert got[AT].unit == AT + 1, f"expected a failure of unit {AT + 1}, got {got[AT].unit}"
    assert result.rows["victim"] == undisturbed().rows["victim"], "expected context rows as without the fault"
    assert result.logits["victim"] == undisturbed().logits["victim"], "expected the same logits to the last bit"
    for one, other in zip(got, expected, strict=True):
        if isinstance(one, UnitResult):
            assert (one.tokens, one.text) == (other.tokens, other.text), f"unit {one.index}"
    last = got[-1]
    assert last.n_speech_tokens >= UNIT_TOKENS, f"expected speech tokens in the last unit, got {last.n_speech_tokens}"
    assert last.pcm is not None and np.isfinite(last.pcm).all(), "expected finite sound in the last unit"
