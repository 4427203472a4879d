"""`SlotLease` with a running engine: sessions of each kind, their end, and callers that are cancelled."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from models.errors import ModelError
from tests.worker.chat.reply_engine import LLM_LEN, SPOKEN, make_parts, short_chunks
from tests.worker.loop.engines import make_config, voice
from worker.chat import config as reply_config
from worker.chat.config import HalfDuplexConfig
from worker.engine import Engine
from worker.loop.results import Event, Prefilled, ReplyResult
from worker.slots import SlotLease, SlotUse

N_SLOTS = 3
REPLY = SPOKEN.model_copy(update={"max_new_tokens": 4})
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    parts = make_parts()
    # A slot of the small engine has no room for a round of 30 s.
    with pytest.MonkeyPatch.context() as patch, short_chunks(), Engine(parts, make_config(N_SLOTS, LLM_LEN)) as engine:
        patch.setattr(reply_config, "SEGMENT_ROWS", 100)
        yield engine


class Lease(SlotLease):
    """A lease that tells when it was released."""

    def __init__(self, engine: Engine, use: SlotUse):
        self.released = threading.Event()
        super().__init__(engine, "a", use, self._once)

    def _once(self) -> None:
        assert not self.released.is_set(), "release: expected one call, got another"
        self.released.set()

    async def assert_closes(self, engine: Engine) -> None:
        """Close the lease and check that the engine's slot is free when it is released."""
        self.close()
        self.close()
        assert await asyncio.to_thread(self.released.wait, PATIENCE_S), "expected a release, got none"
        assert engine.n_free() == N_SLOTS, f"free slots: expected {N_SLOTS}, got {engine.n_free()}"


class Events:
    """Events of the engine, on the event loop."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def emit(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def until(self, kind: type) -> Event:
        async with asyncio.timeout(PATIENCE_S):
            while not isinstance(event := await self._queue.get(), kind):
                pass
            return event


def test_session_for_units_frees_its_slot(engine: Engine) -> None:
    async def talk() -> None:
        lease = Lease(engine, SlotUse.DUPLEX)
        handle = await lease.open(lambda event: None)
        assert (handle.name, engine.n_free()) == ("a", N_SLOTS - 1)
        await lease.assert_closes(engine)

    asyncio.run(talk())


def test_lease_without_session_is_released(engine: Engine) -> None:
    asyncio.run(Lease(engine, SlotUse.CHAT).assert_closes(engine))


def test_chat_is_answered_and_closes_by_itself(engine: Engine) -> None:
    async def chat() -> None:
        lease, events = Lease(engine, SlotUse.CHAT), Events()
        await lease.chat([{"role": "user", "content": "Hello"}], REPLY, events.emit, voice=voice(0))
        assert isinstance(await events.until(Prefilled), Prefilled)
        result = await events.until(ReplyResult)
        assert isinstance(result, ReplyResult) and result.pcm is not None and len(result.pcm) > 0
        await lease.assert_closes(engine)

    asyncio.run(chat())


def test_close_ends_a_chat_in_flight(engine: Engine) -> None:
    async def chat() -> None:
        lease, events = Lease(engine, SlotUse.CHAT), Events()
        long = REPLY.model_copy(update={"max_new_tokens": LLM_LEN // 2})
        await lease.chat([{"role": "user", "content": "Hello"}], long, events.emit, voice=voice(0))
        await events.until(Prefilled)
        await lease.assert_closes(engine)

    asyncio.run(chat())


def test_refused_chat_leaves_the_slot(engine: Engine) -> None:
    async def chat() -> None:
        lease = Lease(engine, SlotUse.CHAT)
        with pytest.raises(ModelError):
            await lease.chat([], REPLY, lambda event: None)
        assert engine.n_free() == N_SLOTS
        await lease.assert_closes(engine)

    asyncio.run(chat())


def test_second_conversation_replaces_the_first(engine: Engine) -> None:
    async def talk() -> None:
        lease, config = Lease(engine, SlotUse.HALF_DUPLEX), HalfDuplexConfig(reply=REPLY)
        first = await lease.converse(["You are kind."], config, lambda event: None)
        second = await lease.converse(["You are brief."], config, lambda event: None)
        assert first is not second and engine.n_free() == N_SLOTS - 1
        first.push(np.zeros(16_000, np.float32))
        await lease.assert_closes(engine)

    asyncio.run(talk())


@pytest.mark.parametrize("n_steps", range(4))
def test_cancelled_caller_leaves_no_session(engine: Engine, n_steps: int) -> None:
    """Cancelled before, while and after the engine opens the session."""

    async def talk() -> None:
        lease = Lease(engine, SlotUse.HALF_DUPLEX)
        opening = asyncio.create_task(lease.converse(["Be kind."], HalfDuplexConfig(reply=REPLY), lambda event: None))
        for _ in range(n_steps):
            await asyncio.sleep(0)
        opening.cancel()
        with suppress(asyncio.CancelledError):
            await opening
        await lease.assert_closes(engine)

    asyncio.run(talk())
