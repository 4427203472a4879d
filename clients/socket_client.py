"""The connection life that every conversation client shares: open, requests with answers, iteration, loss."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from clients.address import TargetAddress
from clients.connection import lost
from clients.errors import ConnectionLost
from worker.protocol.codec import FromClient, Message
from worker.protocol.gateway_messages import Queued, QueueDone, QueueUpdate
from worker.protocol.messages import Error

OnQueue = Callable[[Queued | QueueUpdate], None]
Answer = TypeVar("Answer", bound=Message)
Event = TypeVar("Event", bound=Message)


class Expected(NamedTuple):
    """An answer that the server owes.

    Attributes:
        request: the request's name, for errors.
        kind: the class of the answer.
        answer: the future to set; None if iteration delivers the answer.
    """

    request: str
    kind: type[Message]
    answer: "asyncio.Future[Message] | None"


class SocketClient(ABC, Generic[Event]):
    """One conversation over one WebSocket.

    Iterating yields every message that answers no request. Iteration ends with the conversation, and raises
    ConnectionLost if the connection is lost.

    Args:
        socket: an open connection.
        address: its address; through a gateway, entering the client waits for a slot.
        on_queue: called with each queue position while the client waits.

    Attributes:
        session_id: the session's id.
    """

    _task_name: ClassVar[str]

    def __init__(self, socket: ClientConnection, address: TargetAddress, on_queue: OnQueue | None = None):
        self.session_id = address.session_id
        self._socket, self._address, self._on_queue = socket, address, on_queue
        self._expected: deque[Expected] = deque()
        self._events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self._last_error: Error | None = None
        self._is_over = False

    async def __aenter__(self) -> Self:
        queue_done: asyncio.Future[Message] | None = None
        if self._address.is_gateway:
            queue_done = asyncio.get_running_loop().create_future()
            self._expected.append(Expected("a slot", QueueDone, queue_done))
        self._reading = asyncio.create_task(self._read(), name=self._task_name)
        try:
            if queue_done is not None:
                await queue_done
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; `stop` before it is optional."""
        self._is_over = True
        await self._socket.close()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await self._events.get()
        if event is not None and not isinstance(event, Exception):
            return event
        self._events.put_nowait(event)  # further iteration ends the same way
        raise StopAsyncIteration if event is None else event

    @abstractmethod
    def _encode(self, message: FromClient) -> str | bytes:
        """The bytes of a message. Raises: WireError."""

    @abstractmethod
    def _take(self, data: str | bytes) -> None:
        """Handle what the server sent. Raises: ConnectionLost if it violates the protocol."""

    async def _request(self, message: FromClient, kind: type[Answer]) -> Answer:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        await self._send(message, Expected(message.type, kind, future))
        answer = await future
        assert isinstance(answer, kind), f"{message.type}: expected {kind.__name__}, got {answer.type}"
        return answer

    async def _send(self, message: FromClient, expected: Expected | None = None) -> None:
        data = self._encode(message)
        if self._reading.done():
            raise self._lost()
        if expected is not None:
            self._expected.append(expected)
        try:
            await self._deliver(data, expected)
        except ConnectionClosed:
            await asyncio.wait([self._reading])  # it fails the pending answers with the close code
            if expected is None or expected.answer is None:
                raise self._lost() from None

    async def _deliver(self, data: str | bytes, expected: Expected | None) -> None:
        """Send the bytes of a message. expected: its answer. Raises: ConnectionClosed."""
        await self._socket.send(data)

    async def _reconnect(self) -> bool:
        """Continue over another connection. Returns: False if the conversation has ended with its connection."""
        return False

    async def _read(self) -> None:
        """Receive all messages until the conversation ends; then fail the pending requests."""
        end: Exception | None = None
        while True:
            try:
                async for data in self._socket:
                    self._take(data)
            except ConnectionClosed:
                pass
            except Exception as error:  # from a message that violates the protocol, or from on_queue
                end = error
                await self._socket.close()
            if end is not None or self._is_over or not await self._reconnect():
                break
        if end is None and not self._is_over:
            end = self._lost()
        for expected in self._expected:
            if expected.answer is not None:
                fail_answer(expected.answer, end or self._lost())
        self._events.put_nowait(end)

    def _lost(self) -> ConnectionLost:
        return lost(self._socket, self._address, self._last_error)


def fail_answer(future: "asyncio.Future[Any]", error: Exception) -> None:
    """Set an exception on a future that may be cancelled or never awaited."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # mark it as retrieved
