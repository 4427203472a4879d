"""The inbox of a client: order, the size limit of one inbox, and the shared budget."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.live.inbox import ClientDisconnected, Inbox
from worker.protocol.takeover.message_bytes import OVERHEAD, ByteBudget, size_of

ROOM = 10_000


async def blocked_task(putting: Coroutine[Any, Any, None]) -> "asyncio.Task[None] | None":
    """A task that runs the coroutine; None if it ends without waiting."""
    task = asyncio.create_task(putting)
    for _ in range(5):
        await asyncio.sleep(0)
    if task.done():
        task.result()
        return None
    return task


@given(messages=st.lists(st.one_of(st.text(max_size=20), st.binary(max_size=20))))
def test_messages_keep_order_and_memory_is_returned(messages: list[str | bytes]) -> None:
    async def scenario() -> None:
        budget = ByteBudget(10**6)
        inbox = Inbox(budget, 10**6)
        for message in messages:
            await inbox.put(message)
        assert budget.used == sum(map(size_of, messages))
        inbox.close()
        got = [(await inbox.get()).data for _ in messages]
        assert got == messages, f"expected {messages}, got {got}"
        with pytest.raises(ClientDisconnected):
            await inbox.get()
        assert budget.used == 0, f"expected all memory back, got {budget.used} bytes in use"

    asyncio.run(scenario())


def test_put_waits_above_limit() -> None:
    async def scenario() -> None:
        inbox = Inbox(ByteBudget(10**6), ROOM)
        assert await blocked_task(inbox.put(bytes(ROOM - 3 * size_of(b"")))) is None
        waiting = await blocked_task(inbox.put(b""))
        assert waiting is None, "expected no wait at the limit"
        waiting = await blocked_task(inbox.put(b"x"))
        assert waiting is not None, "expected to wait above the limit"
        await inbox.get()
        await waiting
        assert [(await inbox.get()).data for _ in range(2)] == [b"", b"x"]

    asyncio.run(scenario())


def test_empty_messages_count() -> None:
    async def scenario() -> None:
        inbox = Inbox(ByteBudget(10**6), ROOM)

        async def flood() -> None:
            while True:
                await inbox.put("")
                await asyncio.sleep(0)

        flooding = asyncio.create_task(flood())
        for _ in range(3 * ROOM // OVERHEAD):
            await asyncio.sleep(0)
        flooding.cancel()
        assert len(inbox) <= ROOM // OVERHEAD + 1, (
            f"expected about {ROOM // OVERHEAD} messages at most, got {len(inbox)}"
        )

    asyncio.run(scenario())


def test_budget_limits_all_inboxes_together() -> None:
    async def scenario() -> None:
        budget = ByteBudget(ROOM)
        greedy, modest = Inbox(budget, 10**6), Inbox(budget, 10**6)
        greedy_waits = await blocked_task(greedy.put(bytes(ROOM)))
        modest_waits = await blocked_task(modest.put(b"one"))
        assert greedy_waits is not None and modest_waits is not None, "expected both to wait for the budget"
        assert (await modest.get()).data == b"one", "expected one message in each inbox even so"
        await modest_waits
        greedy.clear()
        await greedy_waits
        assert budget.used == 0
        assert await blocked_task(modest.put(b"two")) is None

    asyncio.run(scenario())


def test_lower_limit_applies_to_next_put() -> None:
    async def scenario() -> None:
        inbox = Inbox(ByteBudget(10**6), 10**6)
        for _ in range(3):
            await inbox.put(bytes(ROOM))
        inbox.limit(ROOM)
        waiting = await blocked_task(inbox.put(b"last"))
        assert waiting is not None
        for _ in range(3):
            await inbox.get()
        await waiting

    asyncio.run(scenario())


def test_close_wakes_pending_get() -> None:
    async def scenario() -> None:
        inbox = Inbox(ByteBudget(10), 10)
        getting = asyncio.create_task(inbox.get())
        await asyncio.sleep(0)
        inbox.close()
        with pytest.raises(ClientDisconnected):
            await getting

    asyncio.run(scenario())
