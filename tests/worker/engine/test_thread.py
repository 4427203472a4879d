"""The engine thread: commands run in order, every future is done, and invalid input never reaches the thread."""

import io
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from models.errors import AudioError, ImageError, ModelError, SettingsError, SlotError
from tests.worker.engine.engine_callers import PATIENCE_S, TIGHT, Talker, Turnstile, make_engine
from tests.worker.loop.engines import (
    N_SLOTS,
    QUIET,
    Director,
    SmallEngine,
    assert_same_events,
    make_config,
    make_image,
    make_prompt,
    make_sound,
)
from worker.engine import Engine
from worker.loop.results import Event, Failure, PartialResult, UnitResult
from worker.loop.session import OrderError
from worker.loop.session_handle import SessionHandle

pytestmark = pytest.mark.usefixtures("short_units")


@pytest.fixture(scope="module")
def turnstile() -> Turnstile:
    return Turnstile()


@pytest.fixture(scope="module")
def engine(turnstile: Turnstile) -> Iterator[Engine]:
    with make_engine(turnstile) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _no_session_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        n_free = engine.n_free()
        engine.submit(engine._sessions.close_all).result(PATIENCE_S)  # a failing test must not affect the next one
        assert n_free == N_SLOTS, f"expected all slots free afterwards, got {n_free}"


# --- order ---------------------------------------------------------------------------------------


def test_events_come_in_order(engine: Engine) -> None:
    """Units in order, partial results before their result, and their sum equals the result."""
    talker = Talker(engine, "talker", TIGHT, speaker=0)
    for number in range(6):
        talker.send(number, frames=[make_image(1)] if number == 3 else [])
    events = talker.wait(6)
    talker.leave()
    text, sounds, n_done = "", [], 0
    for event in events:
        if isinstance(event, PartialResult):
            assert event.unit == n_done + 1, f"expected a part of unit {n_done + 1}, got one of {event.unit}"
            text += event.text
            sounds += [] if event.pcm is None else [event.pcm]
            continue
        assert isinstance(event, UnitResult), event
        n_done += 1
        assert (event.index, event.text) == (n_done, text), f"expected ({n_done}, {text!r}), got {event}"
        n_samples = sum(map(len, sounds))
        assert (event.pcm is None) == (not sounds) and n_samples == len(event.pcm if sounds else ()), event
        assert not sounds or np.array_equal(np.concatenate(sounds), event.pcm), (
            f"unit {n_done}: expected the partial results to add up to the result"
        )
        text, sounds = "", []
    assert not text and not sounds, "expected nothing after the last result"
    assert talker.events.empty(), "expected one outcome per unit"


def test_commands_run_in_order(engine: Engine, turnstile: Turnstile) -> None:
    """A unit queued before a pause runs, one sent during the pause is refused, and one sent after `resume` runs."""
    talker = Talker(engine, "talker")
    with turnstile.holding("talker", lambda: talker.send(0)):
        kept = talker.send(1)
        commands = [
            talker.handle.pause(),
            talker.send(2),
            talker.handle.pause(),
            talker.handle.resume(),
            talker.send(3),
        ]
    assert kept.result(PATIENCE_S) is None
    kinds = [type(one.exception(PATIENCE_S)) for one in commands]
    assert kinds == [type(None), OrderError, OrderError, type(None), type(None)], f"got {kinds}"
    indexes = [event.index for event in talker.wait(3) if isinstance(event, UnitResult)]
    assert indexes == [1, 2, 3], f"expected units 1 to 3, got {indexes}"
    talker.leave()


def test_stop_drops_waiting_units(engine: Engine, turnstile: Turnstile) -> None:
    talker = Talker(engine, "talker")
    with turnstile.holding("talker", lambda: talker.send(0)):
        waiting, stopped, refused = talker.send(1), talker.handle.stop(), talker.send(2)
    assert waiting.result(PATIENCE_S) is None and stopped.result(PATIENCE_S) is None
    assert isinstance(refused.exception(PATIENCE_S), OrderError)
    dropped = [event for event in talker.wait(2) if isinstance(event, Failure)]
    assert len(dropped) == 1 and isinstance(dropped[0].error, OrderError), f"expected one dropped, got {dropped}"
    talker.handle.clear_stop().result(PATIENCE_S)
    talker.send(3)
    (result,) = [event for event in talker.wait(1) if isinstance(event, UnitResult)]
    assert result.index == 2, f"expected the waiting unit to be dropped, got unit {result.index}"
    talker.leave()


def test_close_within_a_unit(engine: Engine, turnstile: Turnstile) -> None:
    """The slot is released after the step in flight, no event follows, and the next session finds it empty."""
    fresh = Talker(engine, "talker", TIGHT, speaker=0)
    fresh.send(5)
    expected = fresh.wait()
    fresh.leave()
    talkers = [Talker(engine, f"talker {number}", TIGHT, speaker=0) for number in range(N_SLOTS)]
    with turnstile.holding("talker 1", lambda: [talker.send(number) for number, talker in enumerate(talkers)]):
        closed = talkers[1].handle.close()
        late = talkers[1].send(9), talkers[1].handle.pause(), talkers[1].handle.close()
        again = engine.open("talker", TIGHT, lambda event: None)
    assert closed.result(PATIENCE_S) is None
    while not talkers[1].events.empty():
        assert isinstance(talkers[1].events.get(), PartialResult), "expected no outcome of the unit in flight"
    assert all(isinstance(one.exception(PATIENCE_S), OrderError) for one in late), (
        "expected OrderError from a closed session"
    )
    assert isinstance(again.result(PATIENCE_S), SessionHandle), "expected a released slot"
    again.result().close().result(PATIENCE_S)
    for talker in (talkers[0], talkers[2]):
        talker.wait()
    assert talkers[1].events.empty(), "expected no event of a closed session"
    new = Talker(engine, "talker", TIGHT, speaker=0)
    new.send(5)
    assert_same_events("talker", new.wait(), expected)
    for talker in (talkers[0], talkers[2], new):
        talker.leave()


def test_refuses_more_sessions_than_slots(engine: Engine) -> None:
    talkers = [Talker(engine, f"talker {number}") for number in range(N_SLOTS)]
    error = engine.open("one more", QUIET, lambda event: None).exception(PATIENCE_S)
    assert isinstance(error, SlotError), error
    error = engine.open("talker 0", QUIET, lambda event: None).exception(PATIENCE_S)
    assert isinstance(error, OrderError), error
    for talker in talkers:
        talker.leave()


def test_many_calling_threads(engine: Engine) -> None:
    """More calling threads than slots, each with its own session: all get the same events."""
    received: dict[int, list[Event]] = {}
    turns = threading.Semaphore(N_SLOTS)

    def live(number: int) -> None:
        with turns:
            talker = Talker(engine, f"caller {number}", QUIET, ref=1)
            for seed in range(3):
                talker.send(seed, force_listen=seed == 0)
            received[number] = talker.wait(3)
            talker.leave()

    threads = [threading.Thread(target=live, args=(number,)) for number in range(2 * N_SLOTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(received) == len(threads), f"expected {len(threads)} callers with results, got {sorted(received)}"
    kinds = {type(event).__name__ for events in received.values() for event in events}
    assert "Failure" not in kinds, received


def test_receiver_may_submit_commands(engine: Engine) -> None:
    """A command submitted from the engine thread, within an event, runs like any other."""
    done, commands = threading.Event(), []

    def emit(event: Event) -> None:
        if isinstance(event, UnitResult) and event.index < 3:
            commands.append(handle.send(make_sound(event.index)))
        elif isinstance(event, UnitResult):
            done.set()

    handle = engine.open("asker", QUIET, emit).result(PATIENCE_S)
    handle.prepare(make_prompt()).result(PATIENCE_S)
    handle.send(make_sound(0))
    assert done.wait(PATIENCE_S), "expected three units"
    assert [one.result(PATIENCE_S) for one in commands] == [None, None]
    handle.close().result(PATIENCE_S)


def test_cancelled_command_has_no_effect(engine: Engine, turnstile: Turnstile) -> None:
    talker = Talker(engine, "talker")
    with turnstile.holding("talker", lambda: talker.send(0)):
        unit, pause = talker.send(1), talker.handle.pause()
        assert unit.cancel() and not pause.done()
    assert pause.result(PATIENCE_S) is None
    with pytest.raises(CancelledError):
        unit.result(PATIENCE_S)
    talker.wait()
    talker.leave()
    assert talker.events.empty(), "expected no outcome of the cancelled unit"


def test_thread_gives_the_same_events_as_the_small_engine(engine: Engine) -> None:
    """Tests that drive the loop themselves cover what the engine thread runs."""
    small = SmallEngine(make_config(), Director(listen=0.0))
    session = small.open("talker", TIGHT, make_prompt(speaker=0))
    talker = Talker(engine, "talker", TIGHT, speaker=0)
    for seed in range(3):
        small.send(session, seed)
        small.settle()
        talker.send(seed)
        assert_same_events("talker", talker.wait(), small.take("talker"))
    talker.leave()


# --- invalid input -----------------------------------------------------------------------------------


def a_gif() -> bytes:
    buffer = io.BytesIO()
    make_image(1).save(buffer, "PNG")
    return buffer.getvalue()[:200]


BAD_UNITS: list[tuple[str, dict[str, Any], type[Exception]]] = [
    ("sound with NaN", {"sound": np.array([0.1, np.nan], np.float32)}, AudioError),
    ("sound with infinity", {"sound": np.full(16_000, np.inf, np.float32)}, AudioError),
    ("whole numbers", {"sound": np.zeros(16_000, np.int16)}, AudioError),
    ("two channels", {"sound": np.zeros((16_000, 2), np.float32)}, AudioError),
    ("no samples", {"sound": np.zeros(0, np.float32)}, AudioError),
    ("far too loud", {"sound": np.full(16_000, 30_000.0, np.float32)}, AudioError),
    ("a list", {"sound": [0.0] * 16_000}, AudioError),
    ("nothing", {}, SettingsError),
    ("bytes that are no picture", {"frames": [b"no picture"]}, ImageError),
    ("half a picture", {"sound": make_sound(1), "frames": [a_gif()]}, ImageError),
    ("a good and a bad picture", {"frames": [make_image(1), b""]}, ImageError),
    ("no slices", {"frames": [make_image(1)], "max_slice_nums": 0}, SettingsError),
    ("too many slices", {"frames": [make_image(1)], "max_slice_nums": 10}, SettingsError),
    ("slice limits without images", {"frames": [make_image(1)], "max_slice_nums": [1, 2]}, SettingsError),
    ("slices that are no number", {"frames": [make_image(1)], "max_slice_nums": [True]}, SettingsError),
]


def test_refuses_invalid_units_on_the_calling_thread(engine: Engine) -> None:
    """`send` raises the typed error, and the session's next unit is unaffected."""
    expected, got = [], []
    for received, bad_units in ((expected, []), (got, BAD_UNITS)):
        talker = Talker(engine, "talker", TIGHT, ref=1, speaker=0)
        for seed in range(2):
            for what, unit, error in bad_units:
                with pytest.raises(ModelError) as caught:
                    talker.handle.send(**unit)
                assert type(caught.value) is error, f"{what}: expected {error.__name__}, got {caught.value!r}"
            talker.send(seed)
            received += talker.wait()
        assert talker.events.empty(), "expected no events of invalid units"
        talker.leave()
    assert_same_events("talker", got, expected)


@pytest.mark.parametrize("ref_audio", [np.zeros(0, np.float32), np.full(16_000, np.nan, np.float32)])
def test_refuses_invalid_prompts_on_the_calling_thread(engine: Engine, ref_audio: np.ndarray) -> None:
    talker = Talker(engine, "talker")
    with pytest.raises(AudioError):
        talker.handle.prepare(make_prompt().__class__("a", "b", ref_audio))
    talker.send(0)
    assert isinstance(talker.wait()[-1], UnitResult), "expected the session still prepared"
    talker.leave()
