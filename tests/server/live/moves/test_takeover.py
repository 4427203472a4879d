"""The search for the worker that has kept a session."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from server.access.identity import Identity
from server.access.limit import Limit
from server.access.refusal import limit_reached
from server.dispatch.queue import ANY_WORKER
from server.dispatch.workers import Worker
from server.live.moves.takeover import TakeoverError, _find, take_session
from server.live.slot_wait import SlotWait
from worker.protocol.gateway_messages import ResumeSession
from worker.protocol.takeover.slot_messages import KEPT_FIELD

ANSWERS = {True: {"kept": True}, False: {"kept": False}}


class Workers(httpx.AsyncBaseTransport):
    """Workers by address. answers: None: no answer; an error is raised instead of one."""

    def __init__(self, **answers: bool | httpx.HTTPError | None):
        self.answers, self.cancelled = answers, set[str]()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = self.answers[request.url.host]
        if isinstance(answer, httpx.HTTPError):
            raise answer
        if answer is None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.add(request.url.host)
                raise
        return httpx.Response(200, json=ANSWERS[bool(answer)])

    async def find(self) -> Worker | None:
        named = [SimpleNamespace(address=name, headers={}, health={KEPT_FIELD: 0}) for name in self.answers]
        async with httpx.AsyncClient(transport=self) as http:
            slots: Any = SimpleNamespace(http=http, dispatcher=SimpleNamespace(workers=SimpleNamespace(all=named)))
            return await _find(cast(SlotWait, slots), "s", "digest", "owner")


def test_the_first_worker_that_has_it_is_taken_without_waiting_for_others() -> None:
    workers = Workers(hung=None, other=False, right=True)
    found = asyncio.run(workers.find())
    assert found is not None and found.address == "right"
    assert workers.cancelled == {"hung"}, "expected no request to go on"


def test_a_worker_that_is_down_keeps_nothing_but_a_silent_one_may() -> None:
    assert asyncio.run(Workers(one=False, down=httpx.ConnectError("refused")).find()) is None
    with pytest.raises(TakeoverError, match="expected answers of all workers, got none of some"):
        asyncio.run(Workers(one=False, silent=httpx.ReadTimeout("late")).find())


def test_a_client_that_is_too_fast_asks_no_worker_and_tries_again() -> None:
    def count_takeover(_: Identity) -> None:
        raise limit_reached(Limit.TAKEOVERS, "takeovers", expected="at most 5", got="more", retry_after_s=1.0)

    slots: Any = SimpleNamespace(count_takeover=count_takeover)  # without workers
    request, identity = ResumeSession(token="t", received=0), Identity(address="192.0.2.1")
    with pytest.raises(TakeoverError, match="expected a client that is not too fast"):
        asyncio.run(take_session(slots, "s", request, identity, ANY_WORKER))
