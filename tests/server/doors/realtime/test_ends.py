"""How Realtime sessions end: close code, reason, and the error before it."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
import websockets

from benchmarks.serve.fake_worker import FakeWorker
from server.access.identity import Identity
from server.doors.core.unit_session import UnitListener, UnitSession
from server.doors.live.door_context import SessionLimits
from server.doors.live.ends import MAX_FRAME
from server.live.closes import DRAINING, ENDED, QUOTA_USED, SocketClose
from tests.server.doors.realtime.realtime_client import Json, RealtimeClient, realtime
from tests.server.live_gateway import RunningGateway, run, running_gateway, wait_until


async def end_of(client: RealtimeClient) -> tuple[int, str, Json | None]:
    """Wait for the close frame. Returns: its code and reason, and the error of the last event."""
    code, reason = await client.closed()
    last = client.log[-1]
    return code, reason, last["error"] if last["type"] == "error" else None


def in_session(
    check: Callable[[RunningGateway, RealtimeClient], Awaitable[None]], limits: SessionLimits | None = None
) -> None:
    """Run a check of one session. limits: of sessions."""

    async def scenario() -> None:
        async with (
            FakeWorker(n_listen=1000, n_speak=2) as worker,
            running_gateway(worker, session_limits=limits) as gateway,
        ):
            async with realtime(gateway.port) as client:
                await check(gateway, client)
            await gateway.wait_idle()

    run(scenario)


def test_a_session_ends_at_its_limit() -> None:
    async def check(_: RunningGateway, client: RealtimeClient) -> None:
        code, reason, error = await end_of(client)
        assert (code, reason) == (1000, "session_expired")
        assert error is not None and error["code"] == "session_expired" and "0.01 minutes" in error["message"]

    in_session(check, SessionLimits(session_s=0.6))


def test_events_that_are_refused_do_not_keep_a_session() -> None:
    async def check(_: RunningGateway, client: RealtimeClient) -> None:
        async def be_refused() -> None:
            while True:
                await client.socket.send('{"type": "no.such"}')
                await client.send("response.cancel")
                await asyncio.sleep(0.1)

        refused = asyncio.create_task(be_refused())
        code, reason, error = await end_of(client)
        refused.cancel()
        assert (code, reason) == (1000, "idle"), error

    in_session(check, SessionLimits(idle_s=1.0))


def test_a_draining_server_lets_the_open_response_end() -> None:
    async def check(gateway: RunningGateway, client: RealtimeClient) -> None:
        await client.send("response.create")
        await client.until("response.output_audio.delta")
        gateway.gateway.live.drain()
        done = await client.until("response.done")
        assert done["response"]["status"] == "completed"
        assert await end_of(client) == (1001, "Shutting down", None)

    in_session(check)


def test_a_frame_that_is_too_long_closes_the_socket() -> None:
    async def check(_: RunningGateway, client: RealtimeClient) -> None:
        await client.socket.send(" " * (MAX_FRAME + 1))
        code, _, _ = await end_of(client)
        assert code == 1009

    in_session(check)


@pytest.mark.parametrize(
    ("close", "code", "error"),
    [
        (QUOTA_USED, 1008, ("rate_limit_error", "rate_limit_exceeded")),
        (ENDED, 1008, ("server_error", "cancelled")),
        (DRAINING, 1001, None),
    ],
)
def test_an_end_by_the_gateway_tells_its_reason(close: SocketClose, code: int, error: tuple[str, str] | None) -> None:
    async def check(gateway: RunningGateway, client: RealtimeClient) -> None:
        [session] = gateway.gateway.live.all
        session.end(close)
        got_code, reason, got = await end_of(client)
        assert (got_code, reason) == (code, close.reason)
        assert (got and (got["type"], got["code"])) == error

    in_session(check)


def test_a_secret_whose_voice_is_gone_begins_no_session() -> None:
    async def scenario() -> None:
        async with FakeWorker() as worker, running_gateway(worker) as gateway:
            session = {"type": "realtime", "audio": {"output": {"voice": "nowhere"}}}
            refused = await gateway.http.post("/v1/realtime/client_secrets", json={"session": session})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session.audio.output.voice")
            access = gateway.gateway.access
            secret = access.secrets.make(Identity(address="127.0.0.1"), access.keys, 60, session)
            headers = {"Authorization": f"Bearer {secret.value}"}
            url = f"ws://127.0.0.1:{gateway.port}/v1/realtime"
            async with websockets.connect(url, additional_headers=headers, proxy=None) as socket:
                error = json.loads(await socket.recv())["error"]
                assert (error["code"], error["param"]) == ("invalid_value", "session.audio.output.voice")
                with pytest.raises(websockets.ConnectionClosed):
                    await socket.recv()
                assert socket.close_code == 1008
            await gateway.wait_idle()

    run(scenario)


def test_a_client_that_goes_while_its_units_end_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker would keep the slot of a connection that stays open."""

    async def scenario() -> None:
        ending, units_run = asyncio.Event(), UnitSession.run

        async def slow_to_end(units: UnitSession, listener: UnitListener) -> None:
            try:
                await units_run(units, listener)
            finally:
                ending.set()
                await asyncio.Event().wait()  # until the session is cancelled too

        monkeypatch.setattr(UnitSession, "run", slow_to_end)
        async with FakeWorker() as worker, running_gateway(worker) as gateway, realtime(gateway.port) as client:
            await client.update(audio={"input": {"turn_detection": None}})
            await ending.wait()
            client.socket.transport.abort()
            await gateway.wait_idle()
            await wait_until(lambda: not worker.sessions, "no connection to the worker")

    run(scenario)
