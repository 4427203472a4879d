"""A conversation with a gateway or a worker: send sound and pictures, receive text and sound.

    async with connect("ws://localhost:8006") as client:
        await client.prepare("You are a helpful assistant.")
        await client.send_unit(sound, [jpeg])  # once a second
        async for message in client:           # on a task of its own: Partial, Result, Error
            ...

docs/client.md has a complete example. Contains no files, sound cards or pacing.
"""

import asyncio
import logging
import ssl as tls
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from clients.address import TargetAddress
from clients.connection import OPEN_S, open_socket
from clients.errors import ConnectionLost, ServerError
from clients.resumption import OnConnection, Resumption
from clients.socket_client import Expected, OnQueue, SocketClient, fail_answer
from worker.protocol.adjust_messages import Adjust, Adjusted
from worker.protocol.codec import FromClient
from worker.protocol.codes import TRY_AGAIN, CloseCode, ErrorCode
from worker.protocol.gateway_messages import MessagesLost, Queued, QueueUpdate, SessionMoved, SessionMoving
from worker.protocol.messages import (
    PLAIN_SPEC,
    SYSTEM_PROMPT,
    AudioChunk,
    Error,
    Interrupt,
    Interrupted,
    Partial,
    Pause,
    Paused,
    Prepare,
    Prepared,
    Result,
    Resume,
    Resumed,
    ServerMessage,
    Spec,
    Stop,
    Stopped,
    Timeout,
    VideoFrame,
    read_server,
    write,
)
from worker.protocol.text_messages import InsertText, TextInserted, TextRole
from worker.protocol.wire import Sound, WireError

LOG = logging.getLogger(__name__)


@asynccontextmanager
async def connect(
    url: str,
    session_id: str | None = None,
    *,
    on_queue: OnQueue | None = None,
    on_connection: OnConnection | None = None,
    ssl: tls.SSLContext | None = None,
    insecure: bool = False,
    key: str | None = None,
    open_timeout: float = OPEN_S,
) -> AsyncIterator["DuplexClient"]:
    """A client with an open connection, after waiting in a gateway's queue.

    Args:
        url: ws://host:port or wss://host:port of a gateway; ws://host:port/ws/duplex of a worker; or a full path.
        session_id: letters, digits, `_` and `-`; the prefix adx_ means without pictures. None: a new id.
        on_queue: called with each queue position while the client waits.
        on_connection: called when the connection is lost, and when the conversation goes on over another one; only
            with `resume` in the `spec` of `prepare`.
        ssl: the TLS context for wss; None: the default one.
        insecure: whether to accept any certificate.
        key: API key of the server; None: the environment variable DUOLOGUE_API_KEY, if it is set.
        open_timeout: limit for opening the connection, without the time in the queue, in s.
    Raises:
        SettingsError: for an invalid address.
        Refused: if the server refuses the handshake.
        ConnectionLost: if there is no connection.
        ServerError: if the server sends an error, such as queue_full.
    """
    address = TargetAddress.of(url, session_id)
    reopen = partial(open_socket, address.resuming, ssl, insecure=insecure, key=key, timeout=open_timeout)
    socket = await open_socket(address, ssl, insecure=insecure, key=key, timeout=open_timeout)
    async with DuplexClient(socket, address, on_queue, Resumption(reopen, on_connection)) as client:
        yield client


class DuplexClient(SocketClient[ServerMessage]):
    """One conversation; `connect` creates it.

    Iterating yields `Partial`, `Result`, `Timeout`, and `Error` for a unit without a result: one result or error per
    unit, in the order of sending; and, in a session that may be resumed, `SessionMoving` when its worker is lost and
    `SessionMoved` when another one goes on.
    Iteration ends with the conversation, and raises ConnectionLost if the connection is lost.

    Attributes:
        session_id: the session's id.
        spec: the options in force.
    """

    _task_name = "duplex-client"

    def __init__(
        self, socket: ClientConnection, address: TargetAddress, on_queue: OnQueue | None, resumption: Resumption
    ):
        super().__init__(socket, address, on_queue)
        self.spec = PLAIN_SPEC
        self._resumption = resumption

    async def close(self) -> None:
        """Close the connection; `stop` before it is optional."""
        if not self._resumption.connected.is_set():
            self._reading.cancel()
            self._events.put_nowait(None)
        await super().close()

    # --- requests ------------------------------------------------------------------------------

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
        """Start or restart the conversation.

        Args:
            system_prompt: the system text.
            ref_audio: [n] float32 at 16 kHz, the voice in the prompt.
            tts_ref_audio: [n] float32 at 16 kHz, the voice of the speech; None: `ref_audio`.
            ref_audio_path: name of a voice on the server.
            config: settings, see docs/session-config.md.
            max_slice_nums: most slices of a large picture.
            spec: options beyond the plain protocol.
        Returns:
            The options in force; `notes` names ignored settings.
        Raises:
            ServerError: such as bad_config.
            ConnectionLost: if the connection is lost.
        """
        message = Prepare(
            system_prompt=system_prompt,
            ref_audio_base64=None if ref_audio is None else Sound.of(ref_audio),
            tts_ref_audio_base64=None if tts_ref_audio is None else Sound.of(tts_ref_audio),
            ref_audio_path=ref_audio_path,
            config=dict(config or {}),
            max_slice_nums=max_slice_nums,
            spec=spec,
        )
        return await self._request(message, Prepared)

    async def send_picture(self, jpeg: bytes) -> None:
        """Send an encoded picture of the next unit, as soon as it is there: the server encodes it before the unit.

        Raises:
            ConnectionLost: if the connection is lost.
        """
        await self._send(VideoFrame(frame=jpeg))

    async def send_unit(
        self,
        sound: np.ndarray,
        jpegs: Sequence[bytes] = (),
        *,
        force_listen: bool = False,
        force_speak: bool = False,
        close_early: bool = False,
        max_slice_nums: int | list[int] | None = None,
    ) -> None:
        """Send one unit; iteration yields its result.

        Args:
            sound: [16000] float32 at 16 kHz in [-1, 1]; any shorter length with `close_early`, and for a piece of a
                unit, which waits for the rest of its second.
            jpegs: encoded pictures, after those of `send_picture`.
            force_listen: whether the unit must listen.
            force_speak: whether the unit must speak; not with `force_listen`.
            close_early: whether silence stands for the samples that a unit lacks.
            max_slice_nums: most slices of a large picture, one number or one per picture.
        Raises:
            ConnectionLost: if the connection is lost.
        """
        chunk = AudioChunk(
            audio_base64=Sound.of(sound),
            frame_base64_list=list(jpegs),
            force_listen=force_listen,
            force_speak=force_speak,
            close_early=close_early,
            max_slice_nums=max_slice_nums,
        )
        await self._send(chunk, Expected(chunk.type, Result, None))

    async def adjust(
        self,
        *,
        config: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
        ref_audio: np.ndarray | None = None,
        tts_ref_audio: np.ndarray | None = None,
        ref_audio_path: str | None = None,
        max_slice_nums: int | None = None,
    ) -> Adjusted:
        """Change the conversation from the next unit on and keep its context; all changes take effect, or none.

        Args:
            config: settings to change, see docs/session-config.md.
            system_prompt, ref_audio, tts_ref_audio, ref_audio_path, max_slice_nums: as in `prepare`; None: unchanged.
        Returns:
            The values now in force; `notes` names changes that take effect later.
        Raises:
            ServerError: such as bad_config.
            ConnectionLost: if the connection is lost.
        """
        message = Adjust(
            config=dict(config or {}),
            system_prompt=system_prompt,
            ref_audio_base64=None if ref_audio is None else Sound.of(ref_audio),
            tts_ref_audio_base64=None if tts_ref_audio is None else Sound.of(tts_ref_audio),
            ref_audio_path=ref_audio_path,
            max_slice_nums=max_slice_nums,
        )
        return await self._request(message, Adjusted)

    async def insert_text(self, text: str, role: TextRole = "user") -> TextInserted:
        """Insert a text into the context; returns once it is there, in front of the units sent from then on.

        Args:
            text: plain text, not empty.
            role: whose message it is.
        Raises:
            ServerError: such as context_full.
            ConnectionLost: if the connection is lost.
        """
        return await self._request(InsertText(text=text, role=role), TextInserted)

    async def pause(self, timeout: float | None = None) -> Paused:
        """Refuse units until `resume`; returns after all earlier units are answered.

        Args:
            timeout: limit of the pause in s; None: the server's setting.
        """
        return await self._request(Pause(timeout=timeout), Paused)

    async def resume(self) -> Resumed:
        """Accept units again."""
        return await self._request(Resume(), Resumed)

    async def interrupt(self) -> Interrupted:
        """Stop the model's speech at once; returns after all earlier units are answered."""
        return await self._request(Interrupt(), Interrupted)

    async def stop(self) -> Stopped:
        """End the conversation after all earlier units are answered; iteration ends after them."""
        return await self._request(Stop(), Stopped)

    # --- internal ------------------------------------------------------------------------------

    def _encode(self, message: FromClient) -> str | bytes:
        return write(message, self.spec)

    async def _deliver(self, data: str | bytes, expected: Expected | None) -> None:
        resumption = self._resumption
        if resumption.connected.is_set() and (acknowledgement := resumption.acknowledgement()):
            await self._deliver(acknowledgement, None)
        resumption.keep(data, expected)
        if resumption.connected.is_set():
            try:
                await self._socket.send(data)
                return
            except ConnectionClosed:
                if not resumption.is_on:
                    raise
        waiting = asyncio.create_task(resumption.connected.wait())  # the resumption sends what is kept
        try:
            await asyncio.wait((waiting, self._reading), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    async def _reconnect(self) -> bool:
        # Any other close frame than "Try again" means that the server has ended the conversation.
        close = self._socket.protocol.close_rcvd
        is_lost = close is None or (close.code == CloseCode.SERVICE_RESTART and close.reason == TRY_AGAIN)
        socket = await self._resumption.resume() if is_lost and self._resumption.is_on else None
        self._socket = socket or self._socket
        return socket is not None

    def _lost(self) -> ConnectionLost:
        if (end := self._resumption.end) is None:
            return super()._lost()
        return ConnectionLost(self._address.url, expected="a conversation that goes on", got=str(end))

    def _take(self, data: str | bytes) -> None:
        self._resumption.received()
        try:
            message = read_server(data, self.spec)
        except WireError as error:
            if error.code is not ErrorCode.UNKNOWN_TYPE:  # a later version may add types
                raise ConnectionLost(self._address.url, expected="a message of the protocol", got=str(error)) from None
            LOG.debug("ignored: %s", error)
            return
        match message:
            case Queued() | QueueUpdate():
                if self._on_queue is not None:
                    self._on_queue(message)
            case MessagesLost():
                got = f"{message.lost} lost messages with {message.lost_sound_s:.1f} s of sound"
                raise ConnectionLost(self._address.url, expected="all messages", got=got)
            case Partial() | SessionMoving() | SessionMoved():
                self._events.put_nowait(message)
            case Timeout():
                self._is_over = True
                self._events.put_nowait(message)
            case Error():
                self._last_error = message
                expected = self._expected.popleft() if self._expected else None
                if expected is not None:
                    self._resumption.answered(expected)
                if expected is None or expected.answer is None:
                    self._events.put_nowait(message)
                else:
                    fail_answer(expected.answer, ServerError(expected.request, str(message.code), message.error))
            case _:
                self._take_answer(message)

    def _take_answer(self, message: ServerMessage) -> None:
        if not self._expected or not isinstance(message, self._expected[0].kind):
            LOG.warning("session %s: ignored an unexpected %s", self.session_id, message.type)
            return
        expected = self._expected.popleft()
        self._resumption.answered(expected)
        if isinstance(message, Prepared):
            self.spec = message.spec
            self._resumption.prepared(message)
        elif isinstance(message, Stopped):
            self._is_over = True
        if expected.answer is None:
            self._events.put_nowait(message)
        elif not expected.answer.done():  # done: the request was cancelled
            expected.answer.set_result(message)
