"""The fairness benchmark with a fake worker: abuse reaches its limits, and the client in real time gets all results."""

import asyncio

from benchmarks.serve.fairness import ABUSE, _limits, real_time_client
from benchmarks.serve.fake_worker import FakeWorker
from tests.server.live_gateway import running_gateway, wait_until
from worker.config.access import ClientLimits

CASES = {"new-voices": "prepares_per_s", "metrics": "metrics_per_s"}


def test_abuse_reaches_its_limit_beside_a_real_time_client() -> None:
    async def scenario() -> None:
        limits = ClientLimits(prepares_per_s=0.3, metrics_per_s=2.0)
        async with FakeWorker(slots=4) as worker, running_gateway(worker, limits=limits) as gateway:
            registry = gateway.gateway.metrics.registry
            before = await asyncio.to_thread(_limits, gateway.port)
            assert before.keys() >= set(CASES.values()) and not any(before.values()), before
            for case, limit in CASES.items():
                abuse = asyncio.ensure_future(ABUSE[case](gateway.port))
                reached = registry.get_sample_value, "duologue_gateway_limits_total", {"limit": limit}
                await asyncio.gather(
                    real_time_client(gateway.port, 1),
                    wait_until(lambda: reached[0](*reached[1:]), limit, 30),  # noqa: B023
                )
                abuse.cancel()
                await asyncio.gather(abuse, return_exceptions=True)

    asyncio.run(scenario())
