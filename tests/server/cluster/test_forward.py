"""A connection that one gateway passes on to another."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import websockets
from websockets.exceptions import ConnectionClosedError
from websockets.frames import Close

from benchmarks.serve.fake_worker import FakeWorker
from server.access.identity import Identity
from server.cluster import forward
from tests.server.cluster.clusters import SECRET, running_authority, running_gateways
from tests.server.doors.dialects.vllm_omni.omni_client import SOUND, OmniClient
from tests.server.live_gateway import RunningGateway, run, wait_until


class _ClosedLink:
    """A connection that the other gateway has closed at once, such as one that shuts down."""

    async def __aenter__(self) -> "_ClosedLink":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def send(self, _: object) -> None:
        await self.recv()

    async def recv(self) -> str:
        raise ConnectionClosedError(Close(1012, "draining"), None)


class _Located:
    async def locate(self, _: str) -> list[str]:
        return ["g1:1"]


class _Client:
    closed: tuple[int, str] | None = None

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    async def close(self, code: int, reason: str) -> None:
        self.closed = code, reason


def test_close_of_the_other_gateway_before_the_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async def connect(*_: object, **__: object) -> _ClosedLink:
            return link

        link, client = _ClosedLink(), _Client()
        monkeypatch.setattr(forward, "connect", connect)
        passed = await forward.ResumeForward(_Located(), "secret").serve(client, "omni_a", "/", "{}", Identity())
        assert passed and client.closed == (1012, "draining"), f"expected its close, got {client.closed}"

    run(scenario)


def test_a_session_of_the_vllm_omni_dialect_goes_on_through_another_gateway(tmp_path: Path) -> None:
    """And back; a session that no gateway has is refused as ever."""

    async def scenario() -> None:
        async with (
            FakeWorker(slots=1, n_listen=0, n_speak=3) as worker,
            running_authority(tmp_path / "state", worker, secret=SECRET) as authority,
            running_gateways(authority.url, ("g0", "g1"), 1, secret=SECRET) as gateways,
        ):

            async def socket(number: int) -> websockets.ClientConnection:
                url = f"ws://127.0.0.1:{gateways[number].port}/v1/duplex?resume=true"
                return await websockets.connect(url, compression=None, proxy=None)

            client = OmniClient(await socket(0))
            await client.begin()
            client.abort()
            stranger = OmniClient(await socket(1))
            stranger.log = list(client.log)
            await stranger.resume(stranger.socket, session_id="adx_omni_other")
            assert (await stranger.until("error"))["error"]["code"] == "session_resume_expired"
            await stranger.socket.close()
            for number in (1, 0):
                await client.resume(await socket(number))
                await client.until("session.resumed")
                await client.append()
                await client.until(SOUND)
                client.abort()
            await client.resume(await socket(1))
            await client.until("session.resumed")
            await client.send("session.close")
            assert (await client.until("session.closed"))["reason"] == "client_close"
            await wait_until(lambda: not authority.service.authority.workers.leases, "the end of the session")
            expected = [{"resumed": 3}, {"forwarded": 2, "refused": 1}]
            await wait_until(lambda: [*map(outcomes, gateways)] == expected, f"resumptions {expected}")

    run(scenario)


def outcomes(gateway: RunningGateway) -> dict[str, int]:
    """Resumptions by their outcome."""
    [family] = [one for one in gateway.gateway.metrics.registry.collect() if one.name.endswith("gateway_resumptions")]
    found = {one.labels["outcome"]: int(one.value) for one in family.samples if one.name.endswith("_total")}
    return {outcome: n for outcome, n in found.items() if n}
