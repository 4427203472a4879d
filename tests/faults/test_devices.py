"""A device that fails: one call that fails ends a unit, a device that is lost ends the engine, and sessions move."""

from unittest import mock

import torch

from benchmarks.serve.fake_worker import FakeWorker
from tests.server.live.test_resumption import Talker
from tests.server.live_gateway import CHUNK, STOP, run, running_gateway, wait_until
from tests.worker.engine.engine_callers import PATIENCE_S, make_engine
from tests.worker.engine.engine_callers import Talker as EngineTalker
from tests.worker.engine.failing_regions import instead
from worker.engine_thread import EngineError
from worker.loop.batch_runner import DeviceLostError
from worker.loop.results import Failure, UnitResult

LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_a_lost_device_ends_the_engine_and_a_failed_call_only_its_unit() -> None:
    def fail(*_: object) -> None:
        raise LOST

    engine = make_engine()
    engine.start()
    talkers = [EngineTalker(engine, f"talker {number}") for number in range(2)]
    table = engine.parts.unit_steps.regions
    with instead(table, "unit_step", fail):
        talkers[0].send(0).result(PATIENCE_S)
        (failure,) = [event for event in talkers[0].wait() if isinstance(event, Failure)]
        assert failure.error is LOST, f"expected the error of the call, got {failure.error!r}"
    talkers[0].send(1).result(PATIENCE_S)
    assert any(isinstance(event, UnitResult) for event in talkers[0].wait()), "expected the engine to go on"
    with instead(table, "unit_step", fail), mock.patch.object(torch.cpu, "synchronize", fail):
        talkers[1].send(0)
        engine.thread.thread.join(PATIENCE_S)
    assert isinstance(engine.failure, DeviceLostError), f"expected the thread to end, got {engine.failure!r}"
    for talker in talkers:  # also the one without a unit
        (failure,) = [event for event in talker.wait() if isinstance(event, Failure)]
        assert isinstance(failure.error, EngineError) and "illegal memory access" in str(failure.error), failure
    engine.close()


def test_a_session_moves_when_its_engine_fails() -> None:
    """The chunk in flight runs again, and the client sees no error."""

    async def scenario() -> None:
        async with FakeWorker(slots=1) as one, FakeWorker(slots=1) as other, running_gateway(one, other) as gateway:
            talker = await Talker.prepared(gateway)
            await talker.client.send(CHUNK)
            await talker.take("result")
            failing, healthy = (one, other) if one.sessions else (other, one)
            failing.think_s = 1000.0
            await talker.client.send(CHUNK)
            await wait_until(lambda: failing.is_thinking, "the unit to run")
            failing.state = "FAILED"
            [connection] = [one for one in failing.connections if one.conversation is not None]
            await connection.close(1011, "engine")
            assert (await talker.take("session_moved"))["repeated"] == 1
            assert (await talker.take("result"))["current_time"] == 2
            assert list(healthy.sessions) == ["omni_me"], healthy.sessions
            await talker.client.send(STOP)
            await talker.take("stopped")

    run(scenario)
