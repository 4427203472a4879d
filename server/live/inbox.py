"""What a client has sent and nobody has taken yet: in order, bounded, and together with all other clients' too.

A client may talk before its turn has come; nothing of that is lost. Beyond the bounds its socket is not read until
there is room: then its own buffers fill up, and it waits. Knows bytes, not messages.
"""

import asyncio
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

Data = str | bytes
EACH = 256  # bytes that a message takes beside its own: millions of empty ones are a load too


class ReceivedMessage(NamedTuple):
    """One message as it came. received: monotonic s. n_bytes: of memory."""

    data: Data
    received: float
    n_bytes: int


class ClientDisconnected(Exception):
    """The client has closed the connection or lost it."""


@dataclass
class ByteBudget:
    """Room for all clients together. most: bytes; each client may still keep one message."""

    most: int
    used: int = 0


class Inbox:
    """Of one client. most: bytes after which no more is read."""

    def __init__(self, store: ByteBudget, most: int):
        self.most = most
        self._store = store
        self._n_bytes = 0
        self._waiting: deque[ReceivedMessage] = deque()
        self._changed = asyncio.Event()
        self._is_over = False

    def __len__(self) -> int:
        return len(self._waiting)

    async def put(self, data: Data) -> None:
        """Returns once another message may be read."""
        sent = ReceivedMessage(data, time.monotonic(), size_of(data))
        self._waiting.append(sent)
        self._count(sent.n_bytes)
        self._changed.set()
        while self._waiting and (self._n_bytes >= self.most or self._store.used >= self._store.most):
            self._changed.clear()
            await self._changed.wait()

    async def get(self) -> ReceivedMessage:
        """The next message. Raises: ClientDisconnected when there is none left and the client is gone."""
        while not self._waiting:
            if self._is_over:
                raise ClientDisconnected
            self._changed.clear()
            await self._changed.wait()
        sent = self._waiting.popleft()
        self._count(-sent.n_bytes)
        self._changed.set()
        return sent

    def end(self) -> None:
        """Nothing more will come."""
        self._is_over = True
        self._changed.set()

    def forget(self) -> None:
        """Give the room back."""
        self._waiting.clear()
        self._count(-self._n_bytes)
        self._changed.set()

    def _count(self, n: int) -> None:
        self._n_bytes += n
        self._store.used += n


def size_of(data: Data) -> int:
    """Bytes of memory that a message takes; a character takes up to four."""
    return sys.getsizeof(data) + EACH
