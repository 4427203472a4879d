"""The client's side of a session, over one connection or, with resumption, over one after another.

From the first `prepared` of a session with resumption on, messages of the worker are kept until the client acknowledges
them, and a task of each connection sends those that its client lacks. Contains no slots and no workers.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.websockets import WebSocket, WebSocketDisconnect

from server.live.inbox import ClientDisconnected
from server.live.resumption import MessageJournal, ResumeTokens
from worker.protocol.codec import peek_header
from worker.protocol.codes import ErrorCode
from worker.protocol.connection import send_in_time
from worker.protocol.gateway_messages import (
    RESUME_CLIENT,
    MessagesLost,
    Received,
    ResumeSession,
    SessionMoved,
    SessionMoving,
    SessionResumed,
)
from worker.protocol.messages import Error, write
from worker.protocol.takeover.message_bytes import ByteBudget, Data
from worker.protocol.takeover.slot_messages import KeepSlot, SlotTaken
from worker.protocol.wire import WireError, json_text, read_object

RECEIVED = Received.kind()
MAX_ACK_CHARS = 1000


@dataclass(eq=False)
class Attachment:
    """A connection of a client, as its session sees it.

    Attributes:
        sent: number of the newest kept message that the client has, or that was sent.
        greeting: sent before the kept messages; None for a session's first connection.
        replaced: set once another connection has taken its place.
    """

    websocket: WebSocket
    sent: int = 0
    greeting: SessionResumed | None = None
    replaced: asyncio.Event = field(default_factory=asyncio.Event)


class ClientEnd:
    """The client's side of one session.

    Args:
        websocket: its first connection.
        budget: bytes of the messages that all sessions keep.
        grace_s: seconds that a session without a connection is kept; 0: none is.

    Attributes:
        newest: the session's connection, or its last one.
        is_lost: whether that connection is lost.
        n_received: messages of the client so far.
        n_forwarded: messages of the client that were read from the inbox.
        n_frames: messages of the session's worker over its connection, as the worker counts them.
        is_kept: whether the session goes on after a lost connection.
    """

    def __init__(self, websocket: WebSocket, budget: ByteBudget, grace_s: float):
        self.newest, self.is_lost = Attachment(websocket), False
        self.n_received = self.n_forwarded = self.n_frames = 0
        self.is_kept = False
        self._budget, self._grace_s = budget, grace_s
        self._journal: MessageJournal | None = None
        self._tokens = ResumeTokens()
        self._added, self._sent = asyncio.Event(), asyncio.Event()

    # --- messages to the client -----------------------------------------------------------------

    async def send(self, data: Data, *, is_own: bool = False) -> None:
        """Send a message of the worker, at the pace of the connection if there is one.

        is_own: the message is the gateway's.
        Raises: ClientDisconnected, unless messages are kept.
        """
        if self._journal is None:
            self.n_frames += not is_own
            await send_data(self.newest.websocket, data)
            return
        await self._until_sent(self._journal.count)  # so that messages that the client still lacks are not dropped
        self.n_frames += not is_own
        await self._until_sent(self._add(self._journal, data))

    def post(self, message: SessionMoving | SessionMoved | Error) -> None:
        """Send a message about a session that is kept, and do not wait for the client."""
        assert self._journal is not None, "expected a session that is kept"
        self._add(self._journal, write(message))

    async def _until_sent(self, number: int) -> None:
        """Wait until the newest connection has sent this message, or is lost."""
        while not self.is_lost and self.newest.sent < number:
            self._sent.clear()
            await self._sent.wait()

    async def write(self, connection: Attachment) -> None:
        """Send the kept messages over a connection until its end. Raises: ClientDisconnected."""
        if connection.greeting is not None:
            await send_data(connection.websocket, write(connection.greeting))
        while True:
            message = None if self._journal is None else self._journal.next_after(connection.sent)
            if message is None:
                self._added.clear()
                await self._added.wait()
                continue
            if self._journal is not None and message.number > connection.sent + 1:
                gap = self._journal.gap_after(connection.sent)
                connection.sent = message.number - 1
                self._sent.set()
                lost = MessagesLost(lost=gap.n_messages, lost_sound_s=gap.sound_s, next=message.number)
                await send_data(connection.websocket, write(lost))
                continue
            await send_data(connection.websocket, message.data)
            connection.sent = max(connection.sent, message.number)
            self._sent.set()

    def _add(self, journal: MessageJournal, data: Data) -> int:
        number = journal.add(data)
        self._added.set()
        return number

    # --- resumption -----------------------------------------------------------------------------

    def offer(self, data: Data) -> Data:
        """A worker's `prepared` with the secret that continues the session, if the client asked for one."""
        given = peek_header(data).get("spec")
        spec = given if isinstance(given, dict) else {}
        self.is_kept = self._grace_s > 0 and spec.get("resume") is True
        if not self.is_kept:
            return data
        if self._journal is None:
            self._journal = MessageJournal(time.monotonic, self._budget)
        self._journal.sound_out = str(spec.get("sound_out"))
        fields = {"resume_token": self._tokens.issue(), "resume_grace_s": self._grace_s}
        return json_text({**read_object(data), **fields})

    def count_message(self, connection: Attachment) -> None:
        """Count a message of the client."""
        self.n_received += 1
        if connection.greeting is not None:  # which it has read before it sends anything
            self._tokens.confirm(connection.greeting.resume_token)

    def keep_slot(self, owner: str, n_after_suspect: int | None = None) -> KeepSlot | None:
        """How the worker keeps the session without this gateway; None if it must not. Arguments as in `KeepSlot`."""
        if self._journal is None or not self.is_kept:
            return None
        return KeepSlot(
            grace_s=self._grace_s,
            tokens=list(self._tokens.digests),
            owner=owner,
            received=self.n_forwarded,
            n_frames=self.n_frames,
            number=self._journal.count,
            acknowledged=self._journal.n_acknowledged,
            n_after_suspect=n_after_suspect,
        )

    def acknowledge(self, data: Data) -> bool:
        """Drop the messages that the client has. Returns: whether `data` says so, and must not be forwarded."""
        if self._journal is None or not isinstance(data, str) or len(data) > MAX_ACK_CHARS or RECEIVED not in data:
            return False
        if peek_header(data).get("type") != RECEIVED:
            return False
        try:
            message = RESUME_CLIENT.read_text(data)
            if isinstance(message, Received):
                if not self._journal.acknowledge(message.count):
                    raise self._too_many("received.count", message.count)
                self.newest.sent = max(self.newest.sent, message.count)  # `send` does not wait for what is dropped
                self._sent.set()
        except WireError as error:
            self._add(self._journal, write(Error.of(error)))
        return True

    def take(self, taken: SlotTaken, tokens: ResumeTokens, new_token: str) -> Attachment:
        """Continue a session that a worker has kept after its gateway was lost, over the first connection here.

        Args:
            taken: the worker's answer.
            tokens: the valid secrets. new_token: the newest one, which the client gets.
        """
        self._journal = MessageJournal(time.monotonic, self._budget, count=taken.next - 1)
        self._journal.sound_out, self._tokens, self.is_kept = taken.sound_out, tokens, True
        self.n_received = self.n_forwarded = taken.received
        self.newest.sent = taken.next - 1
        self.newest.greeting = SessionResumed(
            resume_token=new_token,
            resume_grace_s=self._grace_s,
            received=taken.received,
            next=taken.next,
            lost=taken.lost,
            lost_sound_s=taken.lost_sound_s,
        )
        return self.newest

    def accepts(self, token: str) -> bool:
        """Whether a client with this secret may continue the session."""
        return self._tokens.accepts(token) and self.is_kept

    def resume(self, websocket: WebSocket, request: ResumeSession) -> Attachment:
        """Continue over another connection, with the messages that the client lacks.

        Raises: WireError bad_message for a number of messages that were not sent; the session stays as it is.
        """
        journal = self._journal
        assert journal is not None, "expected a session that is kept"
        if request.received > journal.count:
            raise self._too_many("resume_session.received", request.received)
        journal.acknowledge(request.received)
        following = journal.next_after(request.received)
        first = journal.count + 1 if following is None else following.number
        gap = journal.gap_after(request.received)
        greeting = SessionResumed(
            resume_token=self._tokens.replace(request.token),
            resume_grace_s=self._grace_s,
            received=self.n_received,
            next=first,
            lost=gap.n_messages,
            lost_sound_s=gap.sound_s,
        )
        before, self.newest = self.newest, Attachment(websocket, first - 1, greeting)
        self.is_lost = False
        before.replaced.set()
        self._sent.set()
        return self.newest

    def lose(self, connection: Attachment) -> None:
        """Record that a connection is lost."""
        if connection is self.newest:
            self.is_lost = True
            self._sent.set()

    def close(self) -> None:
        """Forget the kept messages: the session is over."""
        self.is_kept = False
        if self._journal is not None:
            self._journal.clear()

    def _too_many(self, what: str, got: int) -> WireError:
        count = 0 if self._journal is None else self._journal.count
        return WireError(ErrorCode.BAD_MESSAGE, what, expected=f"at most {count}, the messages sent", got=got)


async def send_data(websocket: WebSocket, data: Data) -> None:
    """Send a message. Raises: ClientDisconnected, also for a client that reads nothing for `STUCK_S`."""
    with suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
        await send_in_time(websocket, data)
        return
    raise ClientDisconnected
