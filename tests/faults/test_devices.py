"""An engine that fails: sessions that may be resumed move to another worker."""

from benchmarks.serve.fake_worker import FakeWorker
from tests.server.live.test_resumption import Talker
from tests.server.live_gateway import CHUNK, STOP, run, running_gateway, wait_until


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
            await talker.take("session_moving")
            assert (await talker.take("session_moved"))["repeated"] == 1
            assert (await talker.take("result"))["current_time"] == 2
            assert list(healthy.sessions) == ["omni_me"], healthy.sessions
            await talker.client.send(STOP)
            await talker.take("stopped")

    run(scenario)
