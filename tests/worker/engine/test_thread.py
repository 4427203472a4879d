"""The engine's thread: what is asked happens in order, every question is answered, and bad input never gets there."""

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
    assert_told,
    make_config,
    make_picture,
    make_prompt,
    make_sound,
)
from worker.engine import Engine, Handle
from worker.loop.results import Event, Failure, PartialResult, UnitResult
from worker.loop.session import OrderError
from worker.loop.sessions import Sessions

pytestmark = pytest.mark.usefixtures("short_units")


@pytest.fixture(scope="module")
def turnstile() -> Turnstile:
    return Turnstile()


@pytest.fixture(scope="module")
def engine(turnstile: Turnstile) -> Iterator[Engine]:
    with make_engine(turnstile) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _nobody_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        n_free = engine.n_free()
        engine.ask(Sessions.close_all).result(PATIENCE_S)  # so that one test that fails fails alone
        assert n_free == N_SLOTS, f"expected all slots free afterwards, got {n_free}"


# --- order ---------------------------------------------------------------------------------------


def test_events_come_in_order(engine: Engine) -> None:
    """Units one by one, parts before the whole, and the parts make the whole."""
    talker = Talker(engine, "talker", TIGHT, speaker=0)
    for number in range(6):
        talker.send(number, frames=[make_picture(1)] if number == 3 else [])
    events = talker.hear(6)
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
        assert not sounds or np.array_equal(np.concatenate(sounds), event.pcm), f"unit {n_done}: parts are not the sum"
        text, sounds = "", []
    assert not text and not sounds, "expected nothing behind the last result"
    assert talker.events.empty(), "expected one outcome a unit"


def test_what_is_asked_happens_in_order(engine: Engine, turnstile: Turnstile) -> None:
    """A unit taken before a pause is run, one after it is refused, and one after the end of the pause is run."""
    talker = Talker(engine, "talker")
    with turnstile.holding("talker", lambda: talker.send(0)):
        kept = talker.send(1)
        asked = [talker.handle.pause(), talker.send(2), talker.handle.pause(), talker.handle.resume(), talker.send(3)]
    assert kept.result(PATIENCE_S) is None
    kinds = [type(one.exception(PATIENCE_S)) for one in asked]
    assert kinds == [type(None), OrderError, OrderError, type(None), type(None)], f"got {kinds}"
    indexes = [event.index for event in talker.hear(3) if isinstance(event, UnitResult)]
    assert indexes == [1, 2, 3], f"expected units 1 to 3, got {indexes}"
    talker.leave()


def test_stop_drops_what_waits(engine: Engine, turnstile: Turnstile) -> None:
    talker = Talker(engine, "talker")
    with turnstile.holding("talker", lambda: talker.send(0)):
        waiting, stopped, refused = talker.send(1), talker.handle.stop(), talker.send(2)
    assert waiting.result(PATIENCE_S) is None and stopped.result(PATIENCE_S) is None
    assert isinstance(refused.exception(PATIENCE_S), OrderError)
    dropped = [event for event in talker.hear(2) if isinstance(event, Failure)]
    assert len(dropped) == 1 and isinstance(dropped[0].error, OrderError), f"expected one dropped, got {dropped}"
    talker.handle.clear_stop().result(PATIENCE_S)
    talker.send(3)
    (result,) = [event for event in talker.hear(1) if isinstance(event, UnitResult)]
    assert result.index == 2, f"expected the unit that waited to be gone, got unit {result.index}"
    talker.leave()


def test_gone_in_the_middle_of_a_unit(engine: Engine, turnstile: Turnstile) -> None:
    """The slot comes back after the step in flight; nothing more is heard, and the next one there finds it empty."""
    fresh = Talker(engine, "talker", TIGHT, speaker=0)
    fresh.send(5)
    expected = fresh.hear()
    fresh.leave()
    talkers = [Talker(engine, f"talker {number}", TIGHT, speaker=0) for number in range(N_SLOTS)]
    with turnstile.holding("talker 1", lambda: [talker.send(number) for number, talker in enumerate(talkers)]):
        gone = talkers[1].handle.close()
        late = talkers[1].send(9), talkers[1].handle.pause(), talkers[1].handle.close()
        again = engine.open("talker", TIGHT, lambda event: None)
    assert gone.result(PATIENCE_S) is None
    while not talkers[1].events.empty():
        assert isinstance(talkers[1].events.get(), PartialResult), "expected no outcome of the unit in flight"
    assert all(isinstance(one.exception(PATIENCE_S), OrderError) for one in late), "expected a closed session to refuse"
    assert isinstance(again.result(PATIENCE_S), Handle), "expected its slot for the next one"
    again.result().close().result(PATIENCE_S)
    for talker in (talkers[0], talkers[2]):
        talker.hear()
    assert talkers[1].events.empty(), "expected nothing more from a session that has gone"
    new = Talker(engine, "talker", TIGHT, speaker=0)
    new.send(5)
    assert_told("talker", new.hear(), expected)
    for talker in (talkers[0], talkers[2], new):
        talker.leave()


def test_no_more_sessions_than_slots(engine: Engine) -> None:
    talkers = [Talker(engine, f"talker {number}") for number in range(N_SLOTS)]
    error = engine.open("one more", QUIET, lambda event: None).exception(PATIENCE_S)
    assert isinstance(error, SlotError), error
    error = engine.open("talker 0", QUIET, lambda event: None).exception(PATIENCE_S)
    assert isinstance(error, OrderError), error
    for talker in talkers:
        talker.leave()


def test_many_threads_at_once(engine: Engine) -> None:
    """More callers than slots, each with a session of its own: all are served, and all alike."""
    heard: dict[int, list[Event]] = {}
    turns = threading.Semaphore(N_SLOTS)

    def live(number: int) -> None:
        with turns:
            talker = Talker(engine, f"caller {number}", QUIET, ref=1)
            for seed in range(3):
                talker.send(seed, force_listen=seed == 0)
            heard[number] = talker.hear(3)
            talker.leave()

    threads = [threading.Thread(target=live, args=(number,)) for number in range(2 * N_SLOTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(heard) == len(threads), f"expected {len(threads)} callers served, got {sorted(heard)}"
    kinds = {type(event).__name__ for events in heard.values() for event in events}
    assert "Failure" not in kinds, heard


def test_a_receiver_may_ask_for_more(engine: Engine) -> None:
    """Events come on the engine's thread; a question asked from there is answered like any other."""
    done, asked = threading.Event(), []

    def emit(event: Event) -> None:
        if isinstance(event, UnitResult) and event.index < 3:
            asked.append(handle.send(make_sound(event.index)))
        elif isinstance(event, UnitResult):
            done.set()

    handle = engine.open("asker", QUIET, emit).result(PATIENCE_S)
    handle.prepare(make_prompt()).result(PATIENCE_S)
    handle.send(make_sound(0))
    assert done.wait(PATIENCE_S), "expected three units"
    assert [one.result(PATIENCE_S) for one in asked] == [None, None]
    handle.close().result(PATIENCE_S)


def test_a_question_taken_back(engine: Engine, turnstile: Turnstile) -> None:
    talker = Talker(engine, "talker")
    with turnstile.holding("talker", lambda: talker.send(0)):
        unit, pause = talker.send(1), talker.handle.pause()
        assert unit.cancel() and not pause.done()
    assert pause.result(PATIENCE_S) is None
    with pytest.raises(CancelledError):
        unit.result(PATIENCE_S)
    talker.hear()
    talker.leave()
    assert talker.events.empty(), "expected no outcome of the unit that was taken back"


def test_by_hand_and_by_thread_alike(engine: Engine) -> None:
    """The tests of this folder that drive the loop themselves see what the thread does."""
    small = SmallEngine(make_config(), Director(listen=0.0))
    session = small.open("talker", TIGHT, make_prompt(speaker=0))
    talker = Talker(engine, "talker", TIGHT, speaker=0)
    for seed in range(3):
        small.send(session, seed)
        small.settle()
        talker.send(seed)
        assert_told("talker", talker.hear(), small.take("talker"))
    talker.leave()


# --- bad input -----------------------------------------------------------------------------------


def a_gif() -> bytes:
    buffer = io.BytesIO()
    make_picture(1).save(buffer, "PNG")
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
    ("a good and a bad picture", {"frames": [make_picture(1), b""]}, ImageError),
    ("no slices", {"frames": [make_picture(1)], "max_slice_nums": 0}, SettingsError),
    ("too many slices", {"frames": [make_picture(1)], "max_slice_nums": 10}, SettingsError),
    ("slices for nobody", {"frames": [make_picture(1)], "max_slice_nums": [1, 2]}, SettingsError),
    ("slices that are no number", {"frames": [make_picture(1)], "max_slice_nums": [True]}, SettingsError),
]


def test_bad_units_never_get_there(engine: Engine) -> None:
    """They are refused at once, by type, and the session's next unit is what it would have been."""
    expected, got = [], []
    for heard, bad_units in ((expected, []), (got, BAD_UNITS)):
        talker = Talker(engine, "talker", TIGHT, ref=1, speaker=0)
        for seed in range(2):
            for what, unit, error in bad_units:
                with pytest.raises(ModelError) as caught:
                    talker.handle.send(**unit)
                assert type(caught.value) is error, f"{what}: expected {error.__name__}, got {caught.value!r}"
            talker.send(seed)
            heard += talker.hear()
        assert talker.events.empty(), "expected no events of bad units"
        talker.leave()
    assert_told("talker", got, expected)


@pytest.mark.parametrize("ref_audio", [np.zeros(0, np.float32), np.full(16_000, np.nan, np.float32)])
def test_bad_prompts_never_get_there(engine: Engine, ref_audio: np.ndarray) -> None:
    talker = Talker(engine, "talker")
    with pytest.raises(AudioError):
        talker.handle.prepare(make_prompt().__class__("a", "b", ref_audio))
    talker.send(0)
    assert isinstance(talker.hear()[-1], UnitResult), "expected the session to be as prepared as before"
    talker.leave()
