"""A connection that one gateway passes on to another."""

import asyncio
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.frames import Close

from server.access.identity import Identity
from server.cluster import forward
from tests.server.live_gateway import run
from worker.protocol.gateway_messages import ResumeSession


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
        request = ResumeSession(token="t", received=0)
        passed = await forward.ResumeForward(_Located(), "secret").serve(client, "omni_a", request, Identity())
        assert passed and client.closed == (1012, "draining"), f"expected its close, got {client.closed}"

    run(scenario)
