"""What lets a conversation outlive its connection to a gateway: who may take it over, and messages that may be lost.

Contains no sockets.
"""

import asyncio
import hmac
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from worker.protocol.codec import Message, peek_header
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import Prepared, Result, Stopped, Timeout
from worker.protocol.takeover.journal_steps import DECIDED, KeptJournal
from worker.protocol.takeover.message_bytes import Data, size_of, type_of
from worker.protocol.takeover.message_sound import output_sound_s
from worker.protocol.takeover.session_journal import SessionJournal
from worker.protocol.takeover.slot_messages import KeepSlot, SlotTaken, TakeSlot
from worker.protocol.wire import WireError

KEPT_BYTES, KEPT_S = 4 * 2**20, 60.0  # of one session's messages that are not acknowledged
LAST = frozenset({Stopped.kind(), Timeout.kind()})
MAX_MISSING = 1000  # dropped messages whose sound is known


class KeptFrame(NamedTuple):
    """A message to the client. number: counted for the client. at: monotonic s. n_bytes: of memory."""

    number: int
    at: float
    data: Data
    n_bytes: int


class GatewayLink:
    """One connection of a conversation.

    Attributes:
        taken: set once another connection has taken the conversation over.
        released: set once this one neither reads nor writes.
        greeting: what is sent first; empty once it is read.
    """

    def __init__(self) -> None:
        self.taken, self.released = asyncio.Event(), asyncio.Event()
        self.greeting: tuple[SlotTaken | KeptJournal | Data, ...] = ()


class SlotKeeper:
    """The messages and the terms of one conversation.

    Args:
        clock: monotonic s.
        journal: rebuilds the conversation on another worker, for the next gateway; None: no journal is kept.

    Attributes:
        terms: of the gateway; None: the conversation ends with its connection.
        newest: the conversation's connection, or its last one.
        given_up: set if no gateway needs the conversation without its connection any more.
        is_waiting: that connection is lost, and the conversation waits for another gateway.
        is_over: its last message is written, and no gateway may take it over.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, journal: SessionJournal | None = None):
        self.terms: KeepSlot | None = None
        self.newest, self.is_waiting = GatewayLink(), False
        self.given_up, self.is_over = asyncio.Event(), False
        self._clock, self._sound_out, self._journal = clock, "pcm16", journal
        self._kept: deque[KeptFrame] = deque()
        self._missing: deque[tuple[int, float]] = deque(maxlen=MAX_MISSING)  # dropped: number, seconds of sound
        self._n_frames = self._offset = 0  # messages on this connection; number of a message, less its place there
        self._n_bytes = self._n_received = 0

    def keep(self, link: GatewayLink, message: KeepSlot) -> None:
        """Take the terms of the gateway, and the numbers that it has given to messages.

        Args:
            link: the gateway's connection. Another one may have taken the conversation since it sent the message, which
                then changes nothing.
            message: the terms.
        """
        if link.taken.is_set():
            return
        change = message.number - message.n_frames - self._offset
        if change:
            last = 0 if self.terms is None else message.n_frames + self._offset
            self._kept = deque(
                one._replace(number=one.number + change) if one.number > last else one for one in self._kept
            )
            self._offset += change
        self.terms, self._n_received = message, message.received
        if self._journal is not None:
            self._journal.suspect(message.n_after_suspect)
        self.given_up.clear()
        while self._kept and self._kept[0].number <= message.acknowledged:
            self._n_bytes -= self._kept.popleft().n_bytes
        while self._missing and self._missing[0][0] <= message.acknowledged:
            self._missing.popleft()

    def give_up(self) -> None:
        """End the conversation, if its connection is lost, or once it is."""
        self.terms = None
        self.given_up.set()

    def forget(self) -> None:
        """Keep nothing: the conversation was prepared without resumption."""
        self.terms = None
        self._kept.clear()
        self._missing.clear()
        self._n_bytes = 0

    @property
    def has_journal(self) -> bool:
        """Whether messages of the client are kept."""
        return self._journal is not None

    def count_received(self, data: Data = "") -> None:
        """Count a message of the client, and keep it in the journal."""
        self._n_received += 1
        if self._journal is None:
            return
        if type_of(data) == DECIDED:
            self._journal.given(data)
        else:
            self._journal.sent(data)

    def answered(self, message: Message, data: Data, *, is_kept: bool) -> None:
        """Record a message of the worker in the journal.

        Args:
            message: the message.
            data: the same as it is sent.
            is_kept: the session may go on with another gateway.
        """
        if self._journal is None:
            return
        kind = message.kind()
        self._journal.answered(kind, data, vars(message) if isinstance(message, Result) else peek_header(data))
        if kind == Prepared.kind():
            self._journal.keep(is_kept)
        self.is_over = self.is_over or kind in LAST

    def close(self) -> None:
        """Forget the journal: the conversation is over."""
        if self._journal is not None:
            self._journal.clear()

    def count_sent(self) -> None:
        """Count a message to the client that is not kept."""
        self._n_frames += 1

    def add(self, data: Data, sound_out: str) -> None:
        """Keep a message to the client. sound_out: encoding of the sound in binary messages."""
        self._n_frames += 1
        self._sound_out = sound_out
        now = self._clock()
        message = KeptFrame(self._n_frames + self._offset, now, data, size_of(data))
        self._kept.append(message)
        self._n_bytes += message.n_bytes
        while len(self._kept) > 1 and (self._n_bytes > KEPT_BYTES or self._kept[0].at < now - KEPT_S):
            dropped = self._kept.popleft()
            self._n_bytes -= dropped.n_bytes
            self._missing.append((dropped.number, output_sound_s(dropped.data, sound_out)))

    # --- another gateway -------------------------------------------------------------------------

    def accepts(self, token: str, owner: str) -> bool:
        """Whether a gateway whose client has this token and key may take the conversation. token: its SHA-256."""
        terms = self.terms
        if terms is None or self.is_over or terms.owner not in ("", owner):
            return False
        return any(hmac.compare_digest(token, one) for one in terms.tokens)

    def take(self, request: TakeSlot) -> tuple[GatewayLink, GatewayLink]:
        """Give the conversation to another connection, whose greeting is made once the one before is released.

        Returns: the connection before, and the new one. Raises: WireError resume_refused.
        """
        if not self.accepts(request.token, request.owner) or self.terms is None:
            expected = "the newest token of a session that is kept, with the key that began it"
            raise WireError(ErrorCode.RESUME_REFUSED, "take_slot.token", expected=expected, got="another one")
        newest = self._n_frames + self._offset
        if request.received > newest:
            expected = f"at most {newest}, the messages sent"
            raise WireError(ErrorCode.BAD_MESSAGE, "take_slot.received", expected=expected, got=request.received)
        self.terms = self.terms.model_copy(update={"tokens": request.tokens})
        before, self.newest = self.newest, GatewayLink()
        before.taken.set()
        return before, self.newest

    def greet(self, link: GatewayLink, received: int, *, paused: bool) -> None:
        """Make the greeting of a connection that has taken the conversation.

        Args:
            link: the connection.
            received: messages that the client has.
            paused: whether the conversation is paused.
        """
        while self._kept and self._kept[0].number <= received:
            self._n_bytes -= self._kept.popleft().n_bytes
        first = self._kept[0].number if self._kept else self._n_frames + self._offset + 1
        copied = None if self._journal is None else self._journal.copied()
        journal = () if copied is None else (copied[0], *copied[1])
        taken = SlotTaken(
            received=self._n_received,
            next=first,
            lost=first - 1 - received,
            lost_sound_s=sum(sound_s for number, sound_s in self._missing if number > received),
            sound_out=self._sound_out,
            paused=paused,
            n_journal=len(journal),
            n_repeated=len(self._kept),
        )
        self._kept = deque(one._replace(number=first + n) for n, one in enumerate(self._kept))
        self._n_frames, self._offset = len(self._kept), first - 1
        link.greeting = (taken, *journal, *(one.data for one in self._kept))
