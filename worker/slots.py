"""A slot that a conversation leases, and the engine's session in it.

Contains the way from a lease to a closed session, whatever happens in between. `Service` counts the leases.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import StrEnum
from typing import Any, Protocol, TypeVar

import numpy as np

from models.errors import SlotError
from models.inputs.prompts import Prompt
from models.token2wav.voice.voice import Voice
from worker.chat.config import HalfDuplexConfig, ReplyConfig
from worker.chat.half_duplex import HalfDuplex
from worker.engine import Engine
from worker.engine_thread import EngineError
from worker.loop.results import Event
from worker.loop.session import OrderError
from worker.loop.session_handle import SessionHandle

LOG = logging.getLogger(__name__)
POLL_S = 0.05


class SlotUse(StrEnum):
    """What a slot is leased for; the values are the worker statuses of the public implementation."""

    DUPLEX = "duplex_active"
    HALF_DUPLEX = "busy_half_duplex"
    CHAT = "busy_chat"
    STREAMING = "busy_streaming"


class EngineSession(Protocol):
    """A session of the engine, of any kind."""

    def close(self) -> Future[None]:
        """End the session and release its slot. Future errors: OrderError if it is closed; EngineError."""


Opened = TypeVar("Opened", bound=EngineSession)
Leased = TypeVar("Leased")


class SlotLease:
    """A slot, from `Service.lease` to `close`, with at most one session at a time. For one event loop.

    Args:
        engine: the slot's engine.
        name: the name of the sessions in the slot.
        use: what it is leased for.
        release: called once when the slot is free again, on any thread.
    """

    def __init__(self, engine: Engine, name: str, use: SlotUse, release: Callable[[], None]):
        self.name, self.use = name, use
        self._engine, self._release = engine, release
        self._opening: asyncio.Task[EngineSession] | None = None
        self._is_closed = False

    async def open(self, emit: Callable[[Event], None]) -> SessionHandle:
        """Open a session for units. emit: as in `Engine.open`. Raises: EngineError."""
        return await self._occupy(_result_of(self._engine.open(self.name, None, emit)))

    async def converse(
        self,
        system: Sequence[str | np.ndarray],
        config: HalfDuplexConfig,
        emit: Callable[[Event], None],
        *,
        voice: Voice | None = None,
    ) -> HalfDuplex:
        """Open a half-duplex conversation, after closing the former one; arguments and errors of `Engine.converse`."""
        await self._vacate()

        def converse() -> Future[HalfDuplex]:
            return self._engine.converse(self.name, system, config, emit, voice=voice)

        return await self._occupy(_result_on_thread(converse))

    async def chat(
        self,
        messages: object,
        config: ReplyConfig,
        emit: Callable[[Event], None],
        *,
        voice: Voice | None = None,
    ) -> SessionHandle:
        """Answer a conversation; arguments and errors of `Engine.chat`. `close` ends an answer in flight."""

        def chat() -> Future[SessionHandle]:
            return self._engine.chat(self.name, messages, config, emit, voice=voice)

        return await self._occupy(_result_on_thread(chat))

    async def prompt(self, messages: object, config: ReplyConfig) -> Prompt:
        """The prompt of a conversation, without a session. Raises: as `Engine.prompt`."""
        return await asyncio.to_thread(self._engine.prompt, messages, config)

    def close(self) -> None:
        """End the session; the slot is free after the step in flight. Later calls have no effect."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._opening is None:
            self._release()
        elif self._opening.done():
            self._close_opened(self._opening)
        else:
            self._opening.add_done_callback(self._close_opened)

    async def _occupy(self, opening: Coroutine[Any, Any, Opened]) -> Opened:
        # A task of its own: a caller that is cancelled leaves a session that `close` must find.
        task = asyncio.create_task(opening)
        self._opening = task
        return await asyncio.shield(task)

    async def _vacate(self) -> None:
        if self._opening is None:
            return
        with suppress(Exception):  # there is no session, and the caller that opened it has the error
            session = await asyncio.shield(self._opening)
            await asyncio.wrap_future(session.close())
        self._opening = None

    def _close_opened(self, opening: "asyncio.Task[EngineSession]") -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._release()
        else:
            opening.result().close().add_done_callback(self._on_session_closed)

    def _on_session_closed(self, closed: "Future[None]") -> None:
        error = closed.exception()
        if not isinstance(error, EngineError | OrderError | None):  # OrderError: a chat closes by itself
            LOG.error("session %s could not be closed: %s", self.name, error, exc_info=error)
        self._release()


async def _result_of(opening: "Future[Opened]") -> Opened:
    return await asyncio.wrap_future(opening)


async def _result_on_thread(call: "Callable[[], Future[Opened]]") -> Opened:
    """The result of a call that first works on the caller's thread, for example cutting images."""
    return await asyncio.wrap_future(await asyncio.to_thread(call))


async def with_slot(lease: Callable[[], Leased], wait_s: float) -> Leased:
    """The result of `lease`, which is called until a slot is free.

    Raises: SlotError if none is within `wait_s`; other errors of `lease`.
    """
    until = time.monotonic() + wait_s
    while True:
        try:
            return lease()
        except SlotError:
            if time.monotonic() > until:
                raise
        await asyncio.sleep(POLL_S)
