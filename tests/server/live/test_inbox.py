"""What is kept for a client that is not served yet: all of it, in order, and no more than there is room for."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.live.inbox import EACH, ByteBudget, ClientDisconnected, Inbox, size_of

ROOM = 10_000


async def is_held_up(putting: Coroutine[Any, Any, None]) -> "asyncio.Task[None] | None":
    """The task, if it does not end by itself."""
    task = asyncio.create_task(putting)
    for _ in range(5):
        await asyncio.sleep(0)
    if task.done():
        task.result()
        return None
    return task


@given(messages=st.lists(st.one_of(st.text(max_size=20), st.binary(max_size=20))))
def test_order_and_room(messages: list[str | bytes]) -> None:
    async def story() -> None:
        store = ByteBudget(10**6)
        inbox = Inbox(store, 10**6)
        for message in messages:
            await inbox.put(message)
        assert store.used == sum(map(size_of, messages))
        inbox.end()
        got = [(await inbox.get()).data for _ in messages]
        assert got == messages, f"expected {messages}, got {got}"
        with pytest.raises(ClientDisconnected):
            await inbox.get()
        assert store.used == 0, f"expected all room back, got {store.used} bytes in use"

    asyncio.run(story())


def test_beyond_its_bound_a_client_waits() -> None:
    async def story() -> None:
        inbox = Inbox(ByteBudget(10**6), ROOM)
        assert await is_held_up(inbox.put(bytes(ROOM - 3 * size_of(b"")))) is None
        waiting = await is_held_up(inbox.put(b""))
        assert waiting is None, "expected room up to the bound"
        waiting = await is_held_up(inbox.put(b"x"))
        assert waiting is not None, "expected no reading beyond the bound"
        await inbox.get()
        await waiting
        assert [(await inbox.get()).data for _ in range(2)] == [b"", b"x"]

    asyncio.run(story())


def test_empty_messages_are_a_load_too() -> None:
    async def story() -> None:
        inbox = Inbox(ByteBudget(10**6), ROOM)

        async def flood() -> None:
            while True:
                await inbox.put("")
                await asyncio.sleep(0)

        flooding = asyncio.create_task(flood())
        for _ in range(3 * ROOM // EACH):
            await asyncio.sleep(0)
        flooding.cancel()
        assert len(inbox) <= ROOM // EACH + 1, f"expected about {ROOM // EACH} messages at most, got {len(inbox)}"

    asyncio.run(story())


def test_all_together_have_room_for_so_much() -> None:
    async def story() -> None:
        store = ByteBudget(ROOM)
        greedy, modest = Inbox(store, 10**6), Inbox(store, 10**6)
        greedy_waits = await is_held_up(greedy.put(bytes(ROOM)))
        modest_waits = await is_held_up(modest.put(b"one"))
        assert greedy_waits is not None and modest_waits is not None, "expected both to wait, the store being full"
        assert (await modest.get()).data == b"one", "expected each to have one message all the same"
        await modest_waits
        greedy.forget()
        await greedy_waits
        assert store.used == 0
        assert await is_held_up(modest.put(b"two")) is None

    asyncio.run(story())


def test_a_lower_bound_counts_from_then_on() -> None:
    async def story() -> None:
        inbox = Inbox(ByteBudget(10**6), 10**6)
        for _ in range(3):
            await inbox.put(bytes(ROOM))
        inbox.most = ROOM
        waiting = await is_held_up(inbox.put(b"last"))
        assert waiting is not None
        for _ in range(3):
            await inbox.get()
        await waiting

    asyncio.run(story())


def test_the_end_is_told_to_who_waits_for_more() -> None:
    async def story() -> None:
        inbox = Inbox(ByteBudget(10), 10)
        getting = asyncio.create_task(inbox.get())
        await asyncio.sleep(0)
        inbox.end()
        with pytest.raises(ClientDisconnected):
            await getting

    asyncio.run(story())
