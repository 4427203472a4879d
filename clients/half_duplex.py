"""A half-duplex conversation with a gateway or a worker: send sound, receive turns.

    async with connect_half_duplex("ws://localhost:8006") as client:
        await client.prepare(["You are a helpful assistant."])
        await client.send_sound(sound)  # twice a second
        async for message in client:    # on a task of its own: VadState, TurnHeard, TurnChunk, TurnDone, ...
            ...

Contains no files, sound cards or pacing.
"""

import asyncio
import contextlib
import logging
import ssl as tls
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from clients.address import HALF_DUPLEX, TargetAddress
from clients.connection import OPEN_S, lost, open_socket
from clients.duplex import OnQueue, fail_answer
from clients.errors import ConnectionLost, ServerError
from worker.protocol.codec import FromClient, Message
from worker.protocol.codes import ErrorCode
from worker.protocol.half_duplex_messages import (
    DEFAULTS,
    HALF_DUPLEX_CLIENT,
    HALF_DUPLEX_SERVER,
    AnswerInterrupted,
    HalfDuplexAnswer,
    HalfDuplexPrepare,
    HalfDuplexSettings,
    SpeechChunk,
    SystemSound,
    SystemText,
    TurnPrepared,
    TurnTimeout,
)
from worker.protocol.messages import SYSTEM_PROMPT, Error, Interrupt, Stop, Stopped, write
from worker.protocol.queue_messages import Queued, QueueDone, QueueUpdate
from worker.protocol.wire import Sound, WireError

LOG = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=Message)


class _Request(NamedTuple):
    """A request without an answer yet. name: for errors. kind: the class of its answer."""

    name: str
    kind: type[Message]
    answer: "asyncio.Future[Message]"


@asynccontextmanager
async def connect_half_duplex(
    url: str,
    session_id: str | None = None,
    *,
    on_queue: OnQueue | None = None,
    ssl: tls.SSLContext | None = None,
    insecure: bool = False,
    open_timeout: float = OPEN_S,
) -> AsyncIterator["HalfDuplexClient"]:
    """A client with an open connection, after waiting in a gateway's queue.

    Arguments and errors as of `clients.duplex.connect`; a worker's address ends with /ws/half_duplex.
    """
    address = TargetAddress.of(url, session_id, HALF_DUPLEX)
    socket = await open_socket(address, ssl, insecure=insecure, timeout=open_timeout)
    async with HalfDuplexClient(socket, address, on_queue) as client:
        yield client


class HalfDuplexClient:
    """One conversation; `connect_half_duplex` creates it.

    Iterating yields every message that is not the answer to `prepare` or `stop`. Iteration ends with the conversation,
    and raises ConnectionLost if the connection is lost.

    Attributes:
        session_id: the session's id.
    """

    def __init__(self, socket: ClientConnection, address: TargetAddress, on_queue: OnQueue | None = None):
        self.session_id = address.session_id
        self._socket, self._address, self._on_queue = socket, address, on_queue
        self._requests: deque[_Request] = deque()
        self._events: asyncio.Queue[HalfDuplexAnswer | Exception | None] = asyncio.Queue()
        self._last_error: Error | None = None
        self._is_over = False

    async def __aenter__(self) -> Self:
        slot = self._expect("a slot", QueueDone) if self._address.is_gateway else None
        self._reading = asyncio.create_task(self._read(), name="half-duplex-client")
        try:
            if slot is not None:
                await slot
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

    # --- requests ------------------------------------------------------------------------------

    async def prepare(
        self, system: Sequence[str | np.ndarray] = (SYSTEM_PROMPT,), settings: HalfDuplexSettings = DEFAULTS
    ) -> TurnPrepared:
        """Start or restart the conversation.

        Args:
            system: texts and sounds ([n] float32 at 16 kHz) of the system message; the first sound is the voice too.
            settings: from `half_duplex_settings`, for example.
        Raises:
            ServerError: such as bad_audio.
            ConnectionLost: if the connection is lost.
        """
        items = [SystemText(text=one) if isinstance(one, str) else SystemSound(data=Sound.of(one)) for one in system]
        return await self._request(HalfDuplexPrepare(system_content=items, config=settings), TurnPrepared)

    async def send_sound(self, sound: np.ndarray) -> None:
        """Send sound, [n] float32 at 16 kHz in [-1, 1]. Raises: ConnectionLost."""
        await self._send(SpeechChunk(audio_base64=Sound.of(sound)))

    async def interrupt(self) -> AnswerInterrupted:
        """Stop the answer that is made or played; iteration yields the returned message too."""
        return await self._request(Interrupt(), AnswerInterrupted)

    async def stop(self) -> Stopped:
        """End the conversation at once."""
        return await self._request(Stop(), Stopped)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> HalfDuplexAnswer:
        event = await self._events.get()
        if event is not None and not isinstance(event, Exception):
            return event
        self._events.put_nowait(event)  # further iteration ends the same way
        raise StopAsyncIteration if event is None else event

    # --- internal ------------------------------------------------------------------------------

    def _expect(self, name: str, kind: type[Message]) -> "asyncio.Future[Message]":
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._requests.append(_Request(name, kind, answer))
        return answer

    async def _request(self, message: FromClient, kind: type[Answer]) -> Answer:
        future = self._expect(message.type, kind)
        await self._send(message)
        answer = await future
        assert isinstance(answer, kind), f"{message.type}: expected {kind.__name__}, got {answer.type}"
        return answer

    async def _send(self, message: FromClient) -> None:
        try:
            await self._socket.send(write(message))
        except ConnectionClosed:
            await asyncio.wait([self._reading])
            raise lost(self._socket, self._address, self._last_error) from None

    async def _read(self) -> None:
        """Receive all messages until the connection ends; then fail the pending requests."""
        end: Exception | None = None
        try:
            async for data in self._socket:
                self._take(data)
        except ConnectionClosed:
            pass
        except Exception as error:  # from a message that violates the protocol, or from on_queue
            end = error
            await self._socket.close()
        if end is None and not self._is_over:
            end = lost(self._socket, self._address, self._last_error)
        for request in self._requests:
            fail_answer(request.answer, end or lost(self._socket, self._address, self._last_error))
        self._events.put_nowait(end)

    def _take(self, data: str | bytes) -> None:
        try:
            message = HALF_DUPLEX_SERVER.read_text(data if isinstance(data, str) else data.decode())
        except (WireError, UnicodeDecodeError) as error:
            if isinstance(error, WireError) and error.code is ErrorCode.UNKNOWN_TYPE:  # a later version may add types
                LOG.debug("ignored: %s", error)
                return
            raise ConnectionLost(self._address.url, expected="a message of the protocol", got=str(error)) from None
        match message:
            case Queued() | QueueUpdate():
                if self._on_queue is not None:
                    self._on_queue(message)
                return
            case Stopped() | TurnTimeout():
                self._is_over = True
            case Error():
                self._last_error = message
        if not self._is_answer(message) or isinstance(message, AnswerInterrupted):
            self._events.put_nowait(message)

    def _is_answer(self, message: Message) -> bool:
        """Give a message to the oldest request, if it answers it. Returns: whether it does."""
        if not self._requests:
            return False
        name, kind, answer = self._requests[0]
        if not isinstance(message, (kind, Error)):
            return False
        self._requests.popleft()
        if isinstance(message, Error):
            fail_answer(answer, ServerError(name, str(message.code), message.error))
        elif not answer.done():  # done: the request was cancelled
            answer.set_result(message)
        return True


def half_duplex_settings(given: Mapping[str, Any]) -> HalfDuplexSettings:
    """Settings from groups such as `{"vad": {"barge_in": True}}`; unknown keys are ignored, as the server does.

    Raises: WireError, which names a setting outside its range.
    """
    message = HALF_DUPLEX_CLIENT.read({"type": HalfDuplexPrepare.kind(), "config": dict(given)})
    assert isinstance(message, HalfDuplexPrepare), f"expected a prepare, got {message.type}"
    return message.config
