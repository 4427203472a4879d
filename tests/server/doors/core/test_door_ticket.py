"""Tickets of sessions whose client has gone."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.websockets import WebSocketDisconnect

from server.doors.core.door_ticket import accept_socket


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_client_that_has_gone_keeps_no_slot(*, is_gone: bool) -> None:
    given_back: list[object] = []

    async def accept(subprotocol: str | None) -> None:
        if is_gone:
            raise WebSocketDisconnect(1006)

    slots: Any = SimpleNamespace(dispatcher=SimpleNamespace(finish=given_back.append))
    websocket, ticket = cast(Any, SimpleNamespace(accept=accept)), cast(Any, object())
    if is_gone:
        with pytest.raises(WebSocketDisconnect):
            asyncio.run(accept_socket(websocket, slots, ticket))
    else:
        asyncio.run(accept_socket(websocket, slots, ticket))
    assert given_back == ([ticket] if is_gone else [])
