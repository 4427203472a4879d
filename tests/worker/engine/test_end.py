"""End of the engine's thread, by `close` or by an error: sessions receive failures, and every slot is free."""

import threading
from unittest import mock

import pytest
import torch

from tests.models.stages.slot_copies import assert_fresh
from tests.worker.engine.engine_callers import PATIENCE_S, TIGHT, Talker, Turnstile, make_engine
from tests.worker.engine.failing_regions import instead
from tests.worker.loop.engines import N_SLOTS, QUIET
from worker.engine_thread import EngineError
from worker.loop.batch_runner import DeviceLostError
from worker.loop.results import Failure

LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
pytestmark = pytest.mark.usefixtures("short_units")


def test_not_running() -> None:
    engine = make_engine()
    assert isinstance(engine.open("early", None, lambda event: None).exception(0), EngineError)
    engine.close()


def test_close_while_units_run() -> None:
    """Sessions and thread end, commands after the end are refused, and every slot is empty."""
    turnstile = Turnstile()
    engine = make_engine(turnstile)
    engine.start()
    talkers = [Talker(engine, f"talker {number}", TIGHT, speaker=0) for number in range(2)]
    with turnstile.holding("talker 0", lambda: [talker.send(number) for number, talker in enumerate(talkers)]):
        ending = threading.Thread(target=engine.close)
        ending.start()
        while engine._commands.is_empty():  # until `close` has queued the end
            pass
        assert talkers[0].send(9).cancel()
        late = [talker.send(9) for talker in talkers] + [engine.open("late", QUIET, lambda event: None)]
    ending.join(PATIENCE_S)
    assert not ending.is_alive(), "expected the engine to end"
    kinds = [type(one.exception(PATIENCE_S)) for one in late]
    assert kinds == [EngineError] * 3, f"expected commands after the end to be refused, got {kinds}"
    assert isinstance(talkers[0].handle.pause().exception(0), EngineError)
    assert engine.n_free() == N_SLOTS, f"expected all slots free, got {engine.n_free()}"
    assert_fresh(engine.parts.unit_steps.state, range(N_SLOTS))
    engine.close()


def test_refuses_a_command_while_the_thread_ends() -> None:
    """The thread is alive but no longer reads its queue."""
    engine = make_engine()
    engine.start()
    refuse_all, late = engine._commands.refuse_all, []

    def refuse_and_open() -> None:
        refuse_all()
        assert threading.current_thread() is engine.thread.thread
        late.append(engine.open("late", QUIET, lambda event: None))

    with mock.patch.object(engine._commands, "refuse_all", refuse_and_open):
        engine.close()
    assert isinstance(late[0].exception(5), EngineError), "expected the command to be refused"


def test_a_device_that_is_lost_fails_every_session() -> None:
    """It ends the thread: every session receives a failure, and every future is done. One failed call does not."""

    def fail(*_: object) -> None:
        raise LOST

    turnstile = Turnstile()
    engine = make_engine(turnstile)
    engine.start()
    talkers = [Talker(engine, f"talker {number}", TIGHT, speaker=0) for number in range(2)]
    table = engine.parts.unit_steps.regions
    with instead(table, "unit_step", fail):
        talkers[0].send(1)
        (failure,) = [event for event in talkers[0].wait() if isinstance(event, Failure)]
        assert failure.error is LOST, f"expected the error of the call, got {failure.error!r}"
    with instead(table, "unit_step", fail), mock.patch.object(torch.cpu, "synchronize", fail):
        with turnstile.holding("talker 0", lambda: [talker.send(number) for number, talker in enumerate(talkers)]):
            commands = [talkers[0].send(1), talkers[1].handle.pause()]
        engine.thread.thread.join(PATIENCE_S)
    assert not engine.thread.thread.is_alive(), "expected the thread to have ended"
    assert isinstance(engine.failure, DeviceLostError), engine.failure
    for one in commands:
        assert isinstance(one.exception(5), EngineError | type(None)), one.exception(5)
    for talker in talkers:
        (failure,) = [event for event in talker.wait() if isinstance(event, Failure)]
        assert isinstance(failure.error, EngineError) and "illegal memory access" in str(failure.error), failure
    late = engine.open("late", QUIET, lambda event: None).exception(0)
    assert isinstance(late, EngineError) and "illegal memory access" in str(late), late
    assert engine.n_free() == N_SLOTS, f"expected all slots free, got {engine.n_free()}"
    engine.close()
