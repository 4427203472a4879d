"""What a client keeps to continue its conversation over another connection, and the attempts to open one.

Contains no messages but those of resumption.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from clients.errors import ClientError, ConnectionLost, Refused
from clients.socket_client import Expected
from worker.protocol.gateway_messages import Received, ResumeSession, SessionResumed
from worker.protocol.messages import Prepared, read_server, write
from worker.protocol.wire import WireError

LOG = logging.getLogger(__name__)
FIRST_S, MAX_S, SPREAD = 0.25, 4.0, 0.2  # waits between attempts: they double, with some randomness
FINAL = (401, 404)  # statuses of handshakes that another attempt does not change
ANSWER_S = 10.0
ACKNOWLEDGED_EVERY = 8  # messages
RESUMING = 4000  # close code of a connection that another one replaces


@dataclass(frozen=True)
class ConnectionChange:
    """A connection that was lost, or has been replaced.

    Attributes:
        seconds: without a connection so far.
        is_back: whether the conversation goes on.
    """

    seconds: float
    is_back: bool


OnConnection = Callable[[ConnectionChange], None]


class Resumption:
    """The state of one conversation's resumption.

    Args:
        reopen: opens another connection to the session. Raises: ClientError.
        on_connection: called when the connection is lost and when the conversation goes on.

    Attributes:
        is_on: whether the server keeps the session after a lost connection.
        connected: set while messages can be sent.
        end: why the conversation does not go on; None: it does, or there was no connection within the grace.
    """

    def __init__(self, reopen: Callable[[], Awaitable[ClientConnection]], on_connection: OnConnection | None):
        self._reopen, self._on_connection = reopen, on_connection
        self._token: str | None = None
        self._grace_s = 0.0
        self._sent: deque[tuple[int, str | bytes, Expected | None]] = deque()  # not answered: number, data, answer
        self._n_sent = self._n_received = self._n_acknowledged = 0
        self._n_resumed = 0  # received messages when the conversation went on the last time
        self._wait_s = 0.0  # before the next attempt
        self._is_prepared = False
        self.end: ClientError | WireError | None = None
        self.connected = asyncio.Event()
        self.connected.set()

    @property
    def is_on(self) -> bool:
        return self._token is not None

    def prepared(self, message: Prepared) -> None:
        """Take the token of a prepared conversation."""
        if message.resume_token is not None and not self._n_received:
            self._n_received = 1
        self._is_prepared, self._token = True, message.resume_token
        self._grace_s = message.resume_grace_s or 0.0
        if not self.is_on:
            self._sent.clear()

    def received(self) -> None:
        """Count a message of the server."""
        self._n_received += self._n_received > 0

    def keep(self, data: str | bytes, expected: Expected | None) -> None:
        """Keep a message until its answer, or that of a later one. expected: its answer."""
        self._n_sent += 1
        if self.is_on or not self._is_prepared:
            self._sent.append((self._n_sent, data, expected))

    def answered(self, expected: Expected) -> None:
        """Forget the messages up to the one with this answer."""
        if any(one is expected for _, _, one in self._sent):
            while self._sent.popleft()[2] is not expected:
                pass

    def acknowledgement(self) -> str | None:
        """The message that acknowledges what was received; None if there is little of it."""
        if not self.is_on or self._n_received - self._n_acknowledged < ACKNOWLEDGED_EVERY:
            return None
        self._n_acknowledged = self._n_received
        return _text(Received(count=self._n_received))

    async def resume(self) -> ClientConnection | None:
        """Another connection over which the conversation goes on.

        The first attempt is made at once, unless nothing has come over the connection that the last attempt opened.
        Returns: None if there is none within the grace, or `end` is the reason.
        """
        loop = asyncio.get_running_loop()
        lost_at = loop.time()
        self.connected.clear()
        self._tell(0.0, is_back=False)
        if self._n_received > self._n_resumed:
            self._wait_s = 0.0
        while True:
            await asyncio.sleep(self._wait_s * random.uniform(1 - SPREAD, 1 + SPREAD))
            self._wait_s = min(MAX_S, max(FIRST_S, 2 * self._wait_s))
            try:
                socket = await self._attempt()
            except (WireError, ConnectionLost, Refused) as error:  # the session is over, or has lost messages
                LOG.warning("no resumption: %s", error)
                self.end = error
                return None
            seconds = loop.time() - lost_at
            if socket is not None:
                self._n_resumed = self._n_received
                self._tell(seconds, is_back=True)
                self.connected.set()
                return socket
            if seconds > self._grace_s:
                return None

    async def _attempt(self) -> ClientConnection | None:
        """One attempt. Returns: None if there is no connection now.

        Raises: WireError, ConnectionLost, Refused for good.
        """
        try:
            socket = await self._reopen()
        except ClientError as error:
            if isinstance(error, Refused) and error.status in FINAL:
                raise
            LOG.debug("no connection: %s", error)
            return None
        try:
            await socket.send(_text(ResumeSession(token=self._token or "", received=self._n_received)))
            async with asyncio.timeout(ANSWER_S):
                message = read_server(await socket.recv())
            if not isinstance(message, SessionResumed) or message.lost:
                got = str(message.type)
                if isinstance(message, SessionResumed):
                    got = f"{message.lost} lost messages with {message.lost_sound_s:.1f} s of sound"
                await socket.close()
                raise ConnectionLost("resume_session", expected="all messages that are missing", got=got)
            self._token = message.resume_token
            await self._send_again(socket, message.received)
        except (ConnectionClosed, TimeoutError):
            await socket.close(RESUMING)  # any final code would end a session that the server has resumed meanwhile
            return None
        return socket

    async def _send_again(self, socket: ClientConnection, n_arrived: int) -> None:
        """Send the messages that have not arrived, also those that are added meanwhile."""
        while waiting := [(number, data) for number, data, _ in self._sent if number > n_arrived]:
            n_arrived, data = waiting[0]
            await socket.send(data)

    def _tell(self, seconds: float, *, is_back: bool) -> None:
        if self._on_connection is not None:
            self._on_connection(ConnectionChange(seconds, is_back))


def _text(message: Received | ResumeSession) -> str:
    text = write(message)
    assert isinstance(text, str), "expected a message without sound"
    return text
