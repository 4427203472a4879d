"""Messages received from a client and not yet forwarded: in order, and bounded for one client and for all together.

A client may send before it has a slot, and nothing is lost. Above a bound, `put` waits; the socket is then not read,
and TCP flow control stops the client. Does not parse messages.
"""

import asyncio
import time
from collections import deque
from typing import NamedTuple, NoReturn

from worker.protocol.held_bytes import ConnectionBytes
from worker.protocol.takeover.message_bytes import ByteBudget, Data, size_of


class ReceivedMessage(NamedTuple):
    """A message as it was received. received_at: monotonic s. n_bytes: of memory."""

    data: Data
    received_at: float
    n_bytes: int


class ClientDisconnected(Exception):
    """The client closed the connection or lost it."""


class Inbox:
    """Received messages of one client."""

    def __init__(self, budget: ByteBudget, max_bytes: int, held: ConnectionBytes | None = None):
        """max_bytes: size from which on `put` waits. held: the connection's bytes, of which the messages are a part."""
        self._max_bytes = max_bytes
        self._budget, self._held = budget, held
        self._n_bytes = 0
        self._waiting: deque[ReceivedMessage] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def limit(self, max_bytes: int) -> None:
        """Change the size from which on the next `put` waits."""
        self._max_bytes = max_bytes

    def move(self, held: ConnectionBytes | None) -> None:
        """Count the messages as held by another connection."""
        if self._held is not None:
            self._held.add(-self._n_bytes)
        self._held = held
        if held is not None:
            held.add(self._n_bytes)

    async def put(self, data: Data) -> None:
        """Add a message, and return when there is room to read another one."""
        message = ReceivedMessage(data, time.monotonic(), size_of(data))
        self._waiting.append(message)
        self._count(message.n_bytes)
        self._changed.set()
        del data, message  # `get` takes them while this waits
        await self.room()

    async def room(self) -> None:
        """Return when there is room to read another message."""
        while self._waiting and (self._n_bytes >= self._max_bytes or self._budget.is_exhausted):
            self._changed.clear()
            await self._changed.wait()

    async def get(self) -> ReceivedMessage:
        """Remove and return the next message. Raises: ClientDisconnected if the inbox is closed and empty."""
        message = await self.peek()
        self._waiting.popleft()
        self._count(-message.n_bytes)
        self._changed.set()
        return message

    async def peek(self) -> ReceivedMessage:
        """The next message, which stays. Raises: ClientDisconnected if the inbox is closed and empty."""
        while not self._waiting:
            if self._is_closed:
                raise ClientDisconnected
            self._changed.clear()
            await self._changed.wait()
        return self._waiting[0]

    async def until_closed(self) -> NoReturn:
        """Wait for the end of the input. Raises: ClientDisconnected."""
        while not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        raise ClientDisconnected

    def close(self) -> None:
        """Mark the end of the input: the client has disconnected."""
        self._is_closed = True
        self._changed.set()

    def clear(self) -> None:
        """Discard all messages and return their memory to the budget."""
        self._waiting.clear()
        self._count(-self._n_bytes)
        self._changed.set()

    def _count(self, n: int) -> None:
        self._n_bytes += n
        self._budget.used += n
        if self._held is not None:
            self._held.add(n)
