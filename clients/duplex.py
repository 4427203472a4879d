"""A conversation with a gateway or a worker: seconds of sound and pictures go in, words and sound come out.

    async with connect("ws://localhost:8006") as client:
        await client.prepare("You are a helpful assistant.")
        await client.send_unit(sound, [jpeg])  # once a second
        async for message in client:           # on a task of its own: Partial, Result, Error
            ...

docs/client.md shows it whole. Knows the order of questions and answers. Does not know files, sound cards or time.
"""

import asyncio
import contextlib
import logging
import ssl as tls
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Self

import numpy as np
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_socket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from clients.address import TargetAddress
from clients.errors import ConnectionLost, Refused, ServerError
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import (
    PLAIN_SPEC,
    SYSTEM_PROMPT,
    AudioChunk,
    Error,
    FromClient,
    FromServer,
    Interrupt,
    Interrupted,
    Partial,
    Pause,
    Paused,
    Prepare,
    Prepared,
    Queued,
    QueueDone,
    QueueUpdate,
    Result,
    Resume,
    Resumed,
    ServerMessage,
    Spec,
    Stop,
    Stopped,
    Timeout,
    read_server,
    write,
)
from worker.protocol.wire import WireError

LOG = logging.getLogger(__name__)
OPEN_S = 15.0  # more than a worker waits for a slot
CLOSE_S = 3.0
MAX_FRAME = 64 * 2**20

OnQueue = Callable[[Queued | QueueUpdate], None]


class _Expected(NamedTuple):
    """The next answer. what: was asked. answer: nobody waits for a unit's; they come by iteration."""

    what: str
    kind: type[FromServer]
    answer: "asyncio.Future[Any] | None"


@asynccontextmanager
async def connect(
    url: str,
    session_id: str | None = None,
    *,
    on_queue: OnQueue | None = None,
    ssl: tls.SSLContext | None = None,
    insecure: bool = False,
    open_timeout: float = OPEN_S,
) -> AsyncIterator["DuplexClient"]:
    """A client whose turn it is: places in a gateway's queue have been waited for.

    Args:
        url: ws://host:port or wss://host:port of a gateway; ws://host:port/ws/duplex of a worker; or a full path.
        session_id: letters, digits, `_` and `-`; those that begin with adx_ send no pictures. None: a new one.
        on_queue: told where the client stands while it waits.
        ssl, insecure: what to trust for wss; insecure: any certificate.
        open_timeout: s, for the connection, not for the queue.
    Raises: SettingsError for no address; Refused; ConnectionLost; ServerError, such as queue_full.
    """
    address = TargetAddress.of(url, session_id)
    try:
        socket = await connect_socket(
            address.url,
            ssl=address.tls(ssl, insecure=insecure),
            proxy=None if address.is_local else True,
            compression=None,  # sound does not shrink
            max_size=MAX_FRAME,
            open_timeout=open_timeout,
            close_timeout=CLOSE_S,
        )
    except InvalidStatus as error:
        raise Refused(address.url, error.response.status_code) from None
    except (OSError, TimeoutError, InvalidHandshake, EOFError, UnicodeError) as error:  # a name that cannot be one
        expected = "a certificate that is trusted" if isinstance(error, tls.SSLError) else "a server that answers"
        raise ConnectionLost(address.url, expected=expected, got=str(error) or type(error).__name__) from None
    async with DuplexClient(socket, address, on_queue) as client:
        yield client


class DuplexClient:
    """One conversation, made by `connect`.

    session_id: its name. spec: options in force. Iterating gives `Partial`, `Result`, `Timeout`, and `Error` where a
    unit has no result; each unit has one result or one error, in the order they were sent. It ends when the
    conversation does, and raises ConnectionLost if that was no end.
    """

    def __init__(self, socket: ClientConnection, address: TargetAddress, on_queue: OnQueue | None = None):
        self.session_id, self.spec = address.session_id, PLAIN_SPEC
        self._socket, self._address, self._on_queue = socket, address, on_queue
        self._expected: deque[_Expected] = deque()
        self._events: asyncio.Queue[ServerMessage | Exception | None] = asyncio.Queue()
        self._last_error: Error | None = None
        self._is_over = False

    async def __aenter__(self) -> Self:
        turn = None
        if self._address.is_gateway:
            turn = asyncio.get_running_loop().create_future()
            self._expected.append(_Expected("a place", QueueDone, turn))
        self._reading = asyncio.create_task(self._read(), name="duplex-client")
        try:
            if turn is not None:
                await turn
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave, with or without `stop` before."""
        self._is_over = True
        await self._socket.close()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    # --- what is asked -------------------------------------------------------------------------

    async def prepare(
        self,
        system_prompt: str = SYSTEM_PROMPT,
        *,
        ref_audio: np.ndarray | None = None,
        tts_ref_audio: np.ndarray | None = None,
        ref_audio_path: str | None = None,
        config: Mapping[str, Any] | None = None,
        max_slice_nums: int | None = None,
        spec: Spec = PLAIN_SPEC,
    ) -> Prepared:
        """Begin the conversation, or begin it anew.

        Args:
            ref_audio: [n] float32 at 16 kHz, the voice; tts_ref_audio: another one to speak with.
            ref_audio_path: a voice that the server has, by its name.
            config: settings, see docs/session-config.md. spec: what goes beyond the plain protocol.
        Returns: what was agreed on; its `notes` name settings that were ignored.
        Raises: ServerError, such as bad_config; ConnectionLost.
        """
        message = Prepare(
            system_prompt=system_prompt,
            ref_audio_base64=ref_audio,
            tts_ref_audio_base64=tts_ref_audio,
            ref_audio_path=ref_audio_path,
            config=dict(config or {}),
            max_slice_nums=max_slice_nums,
            spec=spec,
        )
        return await self._ask(message, Prepared)

    async def send_unit(
        self,
        sound: np.ndarray,
        jpegs: Sequence[bytes] = (),
        *,
        force_listen: bool = False,
        max_slice_nums: int | list[int] | None = None,
    ) -> None:
        """A second of sound and its pictures; what comes of it comes by iteration.

        Args: sound: [16000] float32 at 16 kHz in [-1, 1]. jpegs: encoded pictures.
        Raises: ConnectionLost.
        """
        chunk = AudioChunk(
            audio_base64=sound,
            frame_base64_list=list(jpegs),
            force_listen=force_listen,
            max_slice_nums=max_slice_nums,
        )
        await self._send(chunk, _Expected(chunk.type, Result, None))

    async def pause(self, timeout: float | None = None) -> Paused:
        """Answered when all units so far are; then none are taken until `resume`. timeout: s, None: the server's."""
        return await self._ask(Pause(timeout=timeout), Paused)

    async def resume(self) -> Resumed:
        """Go on."""
        return await self._ask(Resume(), Resumed)

    async def interrupt(self) -> Interrupted:
        """Have it stop speaking at once; answered when all units so far are."""
        return await self._ask(Interrupt(), Interrupted)

    async def stop(self) -> Stopped:
        """End the conversation when all units so far are answered; iteration ends behind them."""
        return await self._ask(Stop(), Stopped)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ServerMessage:
        event = await self._events.get()
        if event is not None and not isinstance(event, Exception):
            return event
        self._events.put_nowait(event)  # whoever asks again hears the same
        raise StopAsyncIteration if event is None else event

    # --- inside --------------------------------------------------------------------------------

    async def _ask(self, message: FromClient, kind: type[FromServer]) -> Any:
        expected = _Expected(message.type, kind, asyncio.get_running_loop().create_future())
        await self._send(message, expected)
        return await expected.answer

    async def _send(self, message: FromClient, expected: _Expected) -> None:
        data = write(message, self.spec)
        if self._reading.done():
            raise self._lost()
        self._expected.append(expected)
        try:
            await self._socket.send(data)
        except ConnectionClosed:
            await asyncio.wait([self._reading])  # it knows why
            if expected.answer is None:
                raise self._lost() from None

    async def _read(self) -> None:
        """Everything that comes, until nothing does; then whoever waits is told."""
        end: Exception | None = None
        try:
            async for data in self._socket:
                self._take(data)
        except ConnectionClosed:
            pass
        except Exception as error:  # a server that does not speak the protocol, or on_queue
            end = error
            await self._socket.close()
        if end is None and not self._is_over:
            end = self._lost()
        for expected in self._expected:
            if expected.answer is not None and not expected.answer.done():
                expected.answer.set_exception(end or self._lost())
                expected.answer.exception()  # may be nobody waits any more
        self._events.put_nowait(end)

    def _take(self, data: str | bytes) -> None:
        try:
            message = read_server(data, self.spec)
        except WireError as error:
            if error.code is not ErrorCode.UNKNOWN_TYPE:  # of a later version
                raise ConnectionLost(self._address.url, expected="a message of the protocol", got=str(error)) from None
            LOG.debug("ignored: %s", error)
            return
        match message:
            case Queued() | QueueUpdate():
                if self._on_queue is not None:
                    self._on_queue(message)
            case Partial():
                self._events.put_nowait(message)
            case Timeout():
                self._is_over = True
                self._events.put_nowait(message)
            case Error():
                self._last_error = message
                expected = self._expected.popleft() if self._expected else None
                if expected is None or expected.answer is None:
                    self._events.put_nowait(message)
                else:
                    _answer(expected, ServerError(expected.what, str(message.code), message.error))
            case _:
                self._take_answer(message)

    def _take_answer(self, message: ServerMessage) -> None:
        if not self._expected or not isinstance(message, self._expected[0].kind):
            LOG.warning("session %s: a %s that nobody asked for is ignored", self.session_id, message.type)
            return
        expected = self._expected.popleft()
        if isinstance(message, Prepared):
            self.spec = message.spec
        elif isinstance(message, Stopped):
            self._is_over = True
        if expected.answer is None:
            self._events.put_nowait(message)
        else:
            _answer(expected, message)

    def _lost(self) -> ConnectionLost:
        code = self._socket.close_code
        got = "the end of the connection" if code in (None, 1006) else f"close code {code}"
        if reason := self._socket.close_reason:
            got += f" ({reason})"
        if self._last_error is not None:
            got += f"; the last error was {self._last_error.code}: {self._last_error.error}"
        return ConnectionLost(self._address.url, expected="a conversation that goes on", got=got)


def _answer(expected: _Expected, answer: ServerMessage | Exception) -> None:
    if expected.answer.done():  # whoever waited has gone
        return
    if isinstance(answer, Exception):
        expected.answer.set_exception(answer)
        expected.answer.exception()
    else:
        expected.answer.set_result(answer)
