"""Failures of one session do not affect others, and the session continues from its state before the failure."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from models.errors import ContextOverflowError, NumericsError
from tests.models.stages.slot_copies import assert_fresh
from tests.worker.engine.failing_regions import Broken, Touches, When, broken, instead, of_slot, poisoned
from tests.worker.engine.three_sessions import (
    AT,
    NAMES,
    SOUND,
    TIGHT,
    Fault,
    assert_neighbours_unchanged,
    assert_never_sent,
    assert_only_speech_failed,
    breaking,
    engine,
    outcomes,
    play,
    table_of,
    touching,
    undisturbed,
)
from tests.worker.loop.engines import (
    ALOUD,
    QUIET,
    UNIT_TOKENS,
    SmallEngine,
    assert_mirrors,
    assert_same_events,
    make_prompt,
)
from worker.config.session import SessionConfig
from worker.loop.results import Event, Failure, UnitResult
from worker.loop.session import OrderError, Session, SessionPhase

TEXT = ("mel_unit", "audio_unit", "audio_overlap", "vision", "unit_prefill", "unit_step")
SPEECH = ("spoken_rows", "speech_begin", "speech_step")

pytestmark = pytest.mark.usefixtures("short_units")


@pytest.fixture(autouse=True)
def close_all_sessions() -> Iterator[None]:
    yield
    engine().close_all()


def test_scene_uses_every_region() -> None:
    """All three sessions call every region that the tests make fail, in the unit with the failure."""
    for name in NAMES:
        result = outcomes(undisturbed().events[name])[AT]
        assert result.n_speech_tokens >= UNIT_TOKENS and result.pcm is not None and result.n_slices == 1, (
            f"{name}: {result}"
        )
    assert outcomes(undisturbed().events["victim"])[AT].text, "expected text from the victim"
    idle = [name for name in TEXT + SPEECH + SOUND if not undisturbed().calls[name]]
    assert not idle, f"expected calls of every region in the unit with the failure, got none of {idle}"
    assert undisturbed().rows["left"][-1] < 60, f"expected evictions, got {undisturbed().rows['left']} rows"


@pytest.mark.parametrize(("name", "when"), [*((name, "after") for name in TEXT), ("mel_unit", "before")])
def test_failure_of_a_text_stage(name: str, when: When) -> None:
    speaks = name == "unit_step"  # the other regions run before any speech
    scene = play(breaking(name, when), speaks=speaks)
    assert_neighbours_unchanged(scene, speaks)
    assert_never_sent(scene, Broken, speaks)


@pytest.mark.parametrize(
    ("name", "when"), [*((name, "after") for name in SPEECH + SOUND), ("speech_begin", "before"), ("hift", "before")]
)
def test_failure_of_a_speech_stage(name: str, when: When) -> None:
    scene = play(breaking(name, when))
    assert_neighbours_unchanged(scene)
    assert_only_speech_failed(scene, Broken)


def test_transient_failures_have_no_effect() -> None:
    """A failed stage is rolled back and run again: all events equal those of a run without failures."""

    @contextmanager
    def twice(session: Session) -> Iterator[None]:
        with breaking("unit_step", "once")(session) as first, breaking("speech_step", "once")(session) as second:
            yield
        assert (first, second) == ([1], [1]), f"expected one failure each, got {first} and {second}"

    scene = play(twice)
    for session in NAMES:
        assert_same_events(session, scene.events[session], undisturbed().events[session])


def test_nan_in_the_context() -> None:
    """A NaN in a context row makes the logits NaN; the test repairs it afterwards."""

    @contextmanager
    def bad_row(session: Session) -> Iterator[None]:
        keys = engine().unit_steps.state.llm.k[0][session.slot, 0]
        kept = keys[3].clone()
        keys[3] = torch.nan
        yield
        keys[3] = kept

    scene = play(bad_row, speaks=False)
    assert_neighbours_unchanged(scene, speaks=False)
    assert_never_sent(scene, NumericsError, speaks=False)


@pytest.mark.parametrize("name", ["spoken_rows", "flow", "hift"])
def test_nan_in_speech(name: str) -> None:
    def spoil(session: Session) -> AbstractContextManager[None]:
        touches = touching(name, session)
        return poisoned(table_of(name), name, lambda tensors: row_where(tensors, touches))

    scene = play(spoil)
    assert_neighbours_unchanged(scene)
    assert_only_speech_failed(scene, NumericsError)


def test_nan_in_the_middle_of_a_call() -> None:
    """Tokens drawn before the NaN are not counted."""

    @contextmanager
    def bad_row(session: Session) -> Iterator[None]:
        n_calls, keys = [0], engine().unit_steps.state.speech.cache.k[0]

        def spoil(run: Callable[..., Any], bound: tuple[Any, ...], tensors: tuple[Any, ...], static: Any) -> Any:
            n_calls[0] += session.slot in tensors[0].tolist()
            if n_calls[0] == 3:
                keys[session.slot, :, 0] = torch.nan
            return run(*bound, *tensors, **static)

        with instead(table_of("speech_step"), "speech_step", spoil):
            yield
        assert n_calls[0] > 3, f"expected more draws, got {n_calls[0]}"

    scene = play(bad_row)
    assert_neighbours_unchanged(scene)
    assert_only_speech_failed(scene, NumericsError)


def row_where(tensors: tuple[torch.Tensor, ...], touches: Touches) -> int | None:
    rows = [row for row in range(len(tensors[0])) if touches((tensors[0][row : row + 1],))]
    return rows[0] if rows else None


def test_ignores_nan_in_states_that_are_not_spoken() -> None:
    """Hidden states of tokens that are not spoken may hold any value."""

    def spoil(session: Session) -> AbstractContextManager[None]:
        engine().unit_steps.state.hidden[session.slot] = torch.nan
        return nullcontext()

    scene = play(spoil)
    for name in NAMES:
        assert_same_events(name, scene.events[name], undisturbed().events[name])


# --- closing a unit ------------------------------------------------------------------------------


def three(config: SessionConfig, fault: Fault | None = None) -> tuple[list[list[Event]], Session]:
    """Two units of three sessions, the second under a fault, then one more of the neighbours.

    Returns: the neighbours' events, and the victim, which is still open.
    """
    small = engine()
    small.close_all()
    sessions = {name: small.open(name, config, make_prompt(name)) for name in NAMES}
    for session in sessions.values():
        small.run_unit(session, 0)
    for session in sessions.values():
        small.send(session, 1)
    with fault(sessions["victim"]) if fault else nullcontext():
        small.settle()
    for name in ("left", "right"):
        small.send(sessions[name], 2)
    small.settle()
    for session in sessions.values():
        assert_mirrors(small.unit_steps, session.slot)
    return [small.take(name) for name in ("left", "right")], sessions["victim"]


def closing(session: Session) -> Callable[[tuple[torch.Tensor, ...]], bool]:
    """Whether a forward has at most two rows, as the one that closes a unit in reference mode has."""
    return lambda tensors: session.slot in tensors[0].tolist() and int(tensors[4].max()) <= 2


CLOSING = {
    "llm_evict": QUIET.model_copy(update={"window": TIGHT}),
    "unit_prefill": QUIET.model_copy(update={"compat": "reference"}),
}


@cache
def undisturbed_three(name: str) -> list[list[Event]]:
    return three(CLOSING[name])[0]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CLOSING)
def test_failure_while_a_unit_is_closed(name: str, when: When) -> None:
    """The result is already sent and the context is incomplete. The session must be prepared again, even if paused, and
    waiting units fail.
    """
    config = CLOSING[name]

    def fault(session: Session) -> AbstractContextManager[Any]:
        engine().send(session, 7)
        engine().sessions.pause(session)
        touches = closing(session) if name == "unit_prefill" else of_slot(session.slot)
        return broken(table_of(name), name, touches, when)

    expected = undisturbed_three(name)
    got, victim = three(config, fault)
    for name, one, other in zip(("left", "right"), got, expected, strict=True):
        assert_same_events(name, one, other)
    small = engine()
    kinds = [type(getattr(event, "error", event)) for event in outcomes(small.take("victim"))]
    assert kinds == [UnitResult, Broken, OrderError], f"expected a result and two failures, got {kinds}"
    assert (victim.phase, len(victim.waiting)) == (SessionPhase.NEW, 0), (
        f"got {victim.phase}, {len(victim.waiting)} waiting"
    )
    assert_fresh(small.unit_steps.state, [victim.slot])
    with pytest.raises(OrderError):
        small.send(victim, 2)
    small.sessions.prepare(victim, make_prompt("victim"))
    again = [small.run_unit(victim, number) for number in range(2)]
    small.sessions.close(victim)
    fresh = small.open("victim", config, make_prompt("victim"))
    assert_same_events("victim", again, [small.run_unit(fresh, number) for number in range(2)])


# --- state after a failed unit --------------------------------------------------------


def after_failure(history: list[dict[str, Any]], failing: dict[str, Any], breaks: bool = False) -> None:
    """A failed unit changes neither the buffered sound nor the next units."""
    small, runs = engine(), []
    for sent in (False, True):
        session = small.open("one", QUIET, make_prompt(ref=2))
        for unit in history:
            small.run_unit(session, **unit)
        if breaks:
            small.sessions.break_speech(session)
        if sent:
            with broken(table_of("unit_prefill"), "unit_prefill", of_slot(session.slot), "after"):
                outcome = small.run_unit(session, **failing)
            assert isinstance(outcome, Failure) and isinstance(outcome.error, Broken), outcome
        small.loop.observer.logits.clear()
        events = [small.run_unit(session, number) for number in (11, 12, 13)]
        runs.append((events, small.loop.observer.logits.pop("one", [])))
        assert_mirrors(small.unit_steps, session.slot)
        small.sessions.close(session)
    (expected, logits), (got, got_logits) = runs
    assert_same_events("one", got, expected)
    assert got_logits == logits, "expected the same logits to the last bit"


LISTENED = [{"seed": number, "force_listen": True} for number in range(3)]


def test_failure_of_the_first_unit() -> None:
    after_failure([], {"seed": 5})


def test_failure_with_buffered_sound() -> None:
    after_failure([{"seed": 4, "n": 20_000}], {"seed": 5, "n": 15_000})


def test_failure_of_a_backlog() -> None:
    after_failure(LISTENED, {"seed": 5, "n": 64_000})


def test_failure_of_images_without_sound() -> None:
    after_failure(LISTENED, {"seed": None, "pictures": [2]})


def test_interrupt_request_survives_a_failed_unit() -> None:
    after_failure([{"seed": 1}], {"seed": 5}, breaks=True)


def test_incomplete_character_of_a_failed_unit_is_dropped() -> None:
    """Bytes of an incomplete character in a failed unit do not appear in the next one."""
    small, language = engine(), engine().parts.language
    pieces = language.tokenizer.encode("\N{JAPANESE OGRE}")
    assert len(pieces) > 1 and not language.stream().push(pieces[:1]), "expected a character of several tokens"
    session = small.open("one", QUIET.model_copy(update={"compat": "fixed"}), make_prompt())
    speak = language.special.speak
    with mock.patch.object(small.loop.observer, "token_sampled", scripted([speak, pieces[0], pieces[1]])):
        small.send(session, 1)
        while len(session_tokens(small, session)) < 3:
            small.step()
        with broken(table_of("unit_step"), "unit_step", of_slot(session.slot), "before"):
            small.settle()
    assert isinstance(small.take("one")[-1], Failure)
    word = language.tokenizer.encode("so")
    with mock.patch.object(small.loop.observer, "token_sampled", scripted([speak, *word, language.special.chunk_eos])):
        result = small.run_unit(session, 2)
    assert result.text == "so", f"expected 'so', got {result.text!r}"


def session_tokens(small: SmallEngine, session: Session) -> list[int]:
    (job,) = [job for job in small.loop.jobs if job.session is session] or [None]
    return job.decoder.all_ids if job is not None and job.decoder is not None else []


def scripted(tokens: list[int]) -> Callable[..., int]:
    left = iter(tokens)
    return lambda session, job, token: next(left)


# --- limits, receivers -----------------------------------------------------------------------------


def test_refuses_a_unit_beyond_the_context() -> None:
    """Without a window a unit that does not fit fails with ContextOverflowError; a smaller one still fits."""
    small = engine()
    session, other = small.open("full", QUIET), small.open("other", QUIET)
    rows, outcome = 0, None
    while not isinstance(outcome, Failure):
        rows = small.unit_steps.context_len(session.slot)
        outcome = small.run_unit(session, 1, pictures=[0])
        assert rows < small.config.llm_len, "expected a failure before the context is full"
    assert isinstance(outcome.error, ContextOverflowError), outcome
    assert small.unit_steps.context_len(session.slot) == rows, "expected an unchanged context"
    assert_mirrors(small.unit_steps, session.slot)
    assert isinstance(small.run_unit(other, 1, pictures=[0]), UnitResult)
    if rows + 25 < small.config.llm_len:
        assert isinstance(small.run_unit(session, 2), UnitResult), "expected a result for a unit that fits"


def test_exception_of_a_receiver_is_contained() -> None:
    """An exception in `emit` affects neither its own session nor others."""
    small, received = engine(), []

    def refuse(event: Event) -> None:
        received.append(event)
        raise ValueError("receiver")

    config = ALOUD.model_copy(update={"window": TIGHT})
    failing = small.sessions.open("left", config, refuse)
    small.sessions.prepare(failing, make_prompt("left", ref=1, speaker=0))
    for number in range(2):
        small.send(failing, number, force_listen=True)
        small.settle()
    small.send(failing, 2)
    small.settle()
    expected = undisturbed().events["left"]
    assert_same_events("left", received, expected[: len(received)])
    assert len(outcomes(received)) == 3, f"expected three results, got {outcomes(received)}"
