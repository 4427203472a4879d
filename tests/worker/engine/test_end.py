"""How the engine's thread ends, in good order or by a breakdown: everybody is told, and every slot is free."""

import threading
from unittest import mock

import pytest

from tests.models.stages.slot_copies import assert_fresh
from tests.worker.engine.engine_callers import PATIENCE_S, TIGHT, Talker, Turnstile, make_engine
from tests.worker.engine.failing_regions import broken, of_slot
from tests.worker.loop.engines import N_SLOTS, QUIET
from worker.engine import EngineError
from worker.loop.results import Failure

pytestmark = pytest.mark.usefixtures("short_units")


def test_not_running() -> None:
    engine = make_engine()
    assert isinstance(engine.open("early", None, lambda event: None).exception(0), EngineError)
    engine.close()


def test_the_end_in_the_middle_of_everything() -> None:
    """Sessions are ended, the thread goes, what nobody saw is refused, and every slot is empty."""
    turnstile = Turnstile()
    engine = make_engine(turnstile)
    engine.start()
    talkers = [Talker(engine, f"talker {number}", TIGHT, speaker=0) for number in range(2)]
    with turnstile.holding("talker 0", lambda: [talker.send(number) for number, talker in enumerate(talkers)]):
        ending = threading.Thread(target=engine.close)
        ending.start()
        while engine._inbox.empty():  # the end is ordered
            pass
        assert talkers[0].send(9).cancel()
        late = [talker.send(9) for talker in talkers] + [engine.open("late", QUIET, lambda event: None)]
    ending.join(PATIENCE_S)
    assert not ending.is_alive(), "expected the engine to end"
    kinds = [type(one.exception(PATIENCE_S)) for one in late]
    assert kinds == [EngineError] * 3, f"expected what came after the end to be refused, got {kinds}"
    assert isinstance(talkers[0].handle.pause().exception(0), EngineError)
    assert engine.n_free() == N_SLOTS, f"expected all slots free, got {engine.n_free()}"
    assert_fresh(engine.parts.duplex.state, range(N_SLOTS))
    engine.close()


def test_an_order_that_comes_as_the_thread_goes() -> None:
    """The thread still lives, but looks into its inbox no more: whoever asks then is told so too."""
    engine = make_engine()
    engine.start()
    refuse, asked = engine._refuse_rest, []

    def refuse_and_ask() -> None:
        refuse()
        if threading.current_thread() is engine._thread and not asked:
            asked.append(None)
            asked[0] = engine.open("late", QUIET, lambda event: None)

    with mock.patch.object(engine, "_refuse_rest", refuse_and_ask):
        engine.close()
    assert isinstance(asked[0].exception(5), EngineError), "expected an answer"


def test_a_breakdown_fails_everything() -> None:
    """What cannot be undone ends the engine: everybody is told, nobody waits for ever."""
    turnstile = Turnstile()
    engine = make_engine(turnstile)
    engine.start()
    talkers = [Talker(engine, f"talker {number}", TIGHT, speaker=0) for number in range(2)]
    duplex = engine.parts.duplex
    table = duplex.runner.regions
    with (
        broken(table, "unit_step", of_slot(0), "after"),
        mock.patch.object(duplex, "rewind", side_effect=RuntimeError("no way back")),
    ):
        with turnstile.holding("talker 0", lambda: [talker.send(number) for number, talker in enumerate(talkers)]):
            asked = [talkers[0].send(1), talkers[1].handle.pause()]
        engine._thread.join(PATIENCE_S)
    assert not engine._thread.is_alive(), "expected the thread to be gone"
    for one in asked:
        assert isinstance(one.exception(5), EngineError | type(None)), one.exception(5)
    for talker in talkers:
        (failure,) = [event for event in talker.hear() if isinstance(event, Failure)]
        assert isinstance(failure.error, EngineError) and "no way back" in str(failure.error), failure
    late = engine.open("late", QUIET, lambda event: None).exception(0)
    assert isinstance(late, EngineError) and "no way back" in str(late), late
    assert engine.n_free() == N_SLOTS, f"expected all slots free, got {engine.n_free()}"
    engine.close()
