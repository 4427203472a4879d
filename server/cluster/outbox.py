"""Messages of one connection between authority and gateway that wait to be sent, with a bound."""

import asyncio
from types import TracebackType
from typing import Generic, TypeVar

from server.cluster.messages import ClusterMessageError

# Far above what a connection that works holds back: 10 000 sessions that begin at the same time fit.
MAX_UNSENT = 20_000

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """A queue as a context, which ends with an error when more than `limit` messages wait.

    The connection ends with it. The next one begins with all claims, so no message has to be kept.

    Args:
        reader: who reads the messages, for the error.
        limit: messages that may wait.
    """

    def __init__(self, reader: str, limit: int = MAX_UNSENT):
        self._reader, self._limit = reader, limit
        self._unsent: asyncio.Queue[Item] = asyncio.Queue(limit)
        self._scope = asyncio.timeout(None)
        self._is_full = self._is_open = False

    def put(self, message: Item) -> None:
        """Add a message; after the end it is dropped."""
        try:
            self._unsent.put_nowait(message)
        except asyncio.QueueFull:
            if self._is_open and not self._is_full:
                self._scope.reschedule(asyncio.get_running_loop().time())
            self._is_full = True

    async def get(self) -> Item:
        """The next message, waited for."""
        return await self._unsent.get()

    async def __aenter__(self) -> "Outbox[Item]":
        await self._scope.__aenter__()
        self._is_open = True
        if self._is_full:  # before the context
            self._scope.reschedule(asyncio.get_running_loop().time())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Raises: ClusterMessageError if too many messages wait."""
        self._is_open = False
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError:
            expected = f"one that reads: at most {self._limit} messages wait"
            raise ClusterMessageError(self._reader, expected=expected, got="more") from None
