"""A half-duplex conversation with a gateway or a worker: send sound, receive turns.

    async with connect_half_duplex("ws://localhost:8006") as client:
        await client.prepare(["You are a helpful assistant."])
        await client.send_sound(sound)  # twice a second
        async for message in client:    # on a task of its own: VadState, TurnHeard, TurnChunk, TurnDone, ...
            ...

Contains no files, sound cards or pacing.
"""

import logging
import ssl as tls
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from clients.address import HALF_DUPLEX, TargetAddress
from clients.connection import OPEN_S, open_socket
from clients.errors import ConnectionLost, ServerError
from clients.socket_client import OnQueue, SocketClient, fail_answer
from worker.protocol.codec import FromClient, Message
from worker.protocol.codes import ErrorCode
from worker.protocol.gateway_messages import Queued, QueueUpdate
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
from worker.protocol.wire import Sound, WireError

LOG = logging.getLogger(__name__)


@asynccontextmanager
async def connect_half_duplex(
    url: str,
    session_id: str | None = None,
    *,
    on_queue: OnQueue | None = None,
    ssl: tls.SSLContext | None = None,
    insecure: bool = False,
    key: str | None = None,
    open_timeout: float = OPEN_S,
) -> AsyncIterator["HalfDuplexClient"]:
    """A client with an open connection, after waiting in a gateway's queue.

    Arguments and errors as of `clients.duplex.connect`; a worker's address ends with /ws/half_duplex.
    """
    address = TargetAddress.of(url, session_id, HALF_DUPLEX)
    socket = await open_socket(address, ssl, insecure=insecure, key=key, timeout=open_timeout)
    async with HalfDuplexClient(socket, address, on_queue) as client:
        yield client


class HalfDuplexClient(SocketClient[HalfDuplexAnswer]):
    """One conversation; `connect_half_duplex` creates it.

    Iterating yields every message that is not the answer to `prepare` or `stop`. Iteration ends with the conversation,
    and raises ConnectionLost if the connection is lost.

    Attributes:
        session_id: the session's id.
    """

    _task_name = "half-duplex-client"

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

    # --- internal ------------------------------------------------------------------------------

    def _encode(self, message: FromClient) -> str | bytes:
        return write(message)

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
        if not self._expected:
            return False
        name, kind, answer = self._expected[0]
        if answer is None or not isinstance(message, (kind, Error)):
            return False
        self._expected.popleft()
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
