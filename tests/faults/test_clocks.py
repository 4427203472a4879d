"""A wall clock that jumps: sessions of the Realtime API end by the monotonic clock."""

import asyncio
import time

import pytest

from benchmarks.serve.fake_worker import FakeWorker
from server.doors.live.door_context import SessionLimits
from server.doors.realtime import socket
from tests.server.doors.realtime.realtime_client import realtime
from tests.server.live_gateway import run, running_gateway

HOURS_S = 7200.0
POLL_S = 0.01


@pytest.mark.parametrize("jump_s", [HOURS_S, -HOURS_S])
def test_a_session_ends_at_its_limit_whatever_the_wall_clock_says(
    jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = SessionLimits() if jump_s > 0 else SessionLimits(session_s=0.3)
    monkeypatch.setattr(socket, "DRAIN_POLL_S", POLL_S)
    true_time = time.time

    async def scenario() -> None:
        async with (
            FakeWorker() as worker,
            running_gateway(worker, session_limits=limits) as gateway,
            realtime(gateway.port) as client,
        ):
            monkeypatch.setattr(time, "time", lambda: true_time() + jump_s)
            if jump_s < 0:
                assert await client.closed() == (1000, "session_expired")
                return
            await asyncio.sleep(10 * POLL_S)
            assert (await client.update(instructions="Be kind."))["instructions"] == "Be kind."

    run(scenario)
