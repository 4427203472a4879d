"""What lets a client continue its session over another connection: a secret, and messages that it has not received."""

import asyncio
import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from starlette.websockets import WebSocket

from server.live.inbox import ClientDisconnected
from worker.protocol.codes import ErrorCode
from worker.protocol.gateway_messages import RESUME_CLIENT, ResumeSession
from worker.protocol.takeover.message_bytes import ByteBudget, Data, size_of
from worker.protocol.takeover.message_sound import output_sound_s
from worker.protocol.wire import WireError

KEPT_BYTES, KEPT_S = 4 * 2**20, 60.0  # of one session's messages that are not acknowledged
KEPT_BYTES_TOTAL = 256 * 2**20  # of all sessions of one kind
RESUME_REQUEST_S = 10.0  # from the handshake to `resume_session`
MAX_REQUEST_CHARS = 2000
MAX_MISSING = 1000  # dropped messages whose sound is known one by one; of older ones only the sum


class KeptMessage(NamedTuple):
    """A message to the client. number: rises by one from 1 on. at: monotonic s. n_bytes: of memory."""

    number: int
    at: float
    data: Data
    n_bytes: int


class Gap(NamedTuple):
    """Messages that a client lacks and that are not kept. sound_s: seconds of their sound."""

    n_messages: int
    sound_s: float


class MessageJournal:
    """The newest messages that the client has not acknowledged; the oldest beyond the bounds are dropped.

    Args:
        clock: monotonic s.
        budget: bytes of all journals.
        max_bytes: bytes of this one. The newest message is kept in any case.
        count: messages that another gateway has sent.

    Attributes:
        count: number of the newest message; 0 before the first one.
        n_acknowledged: messages that the client has acknowledged.
        n_bytes: bytes of memory.
        sound_out: encoding of the sound in binary messages.
    """

    def __init__(self, clock: Callable[[], float], budget: ByteBudget, max_bytes: int = KEPT_BYTES, count: int = 0):
        self._clock, self._budget, self._max_bytes = clock, budget, max_bytes
        self._kept: deque[KeptMessage] = deque()
        self._dropped = count  # number of the newest message that is not kept
        self._missing: deque[tuple[int, float]] = deque()  # dropped and not acknowledged: number, seconds of sound
        self.sound_out = "pcm16"
        self.count, self.n_bytes, self.n_acknowledged = count, 0, 0

    def add(self, data: Data) -> int:
        """Keep a message. Returns: its number."""
        self.count += 1
        message = KeptMessage(self.count, self._clock(), data, size_of(data))
        self._kept.append(message)
        self._hold(message.n_bytes)
        oldest = message.at - KEPT_S
        while len(self._kept) > 1 and (
            self.n_bytes > self._max_bytes or self._budget.is_exhausted or self._kept[0].at < oldest
        ):
            dropped = self._drop()
            self._missing.append((dropped.number, output_sound_s(dropped.data, self.sound_out)))
            if len(self._missing) > MAX_MISSING:
                (_, first_s), (number, second_s) = self._missing.popleft(), self._missing.popleft()
                self._missing.appendleft((number, first_s + second_s))
        return self.count

    def acknowledge(self, number: int) -> bool:
        """Drop the messages up to this one. Returns: False for a message that was not sent yet."""
        if number > self.count:
            return False
        self.n_acknowledged = max(self.n_acknowledged, number)
        while self._kept and self._kept[0].number <= number:
            self._drop()
        while self._missing and self._missing[0][0] <= number:
            self._missing.popleft()
        return True

    def gap_after(self, number: int) -> Gap:
        """The dropped messages after this one, up to the first one that is kept."""
        return Gap(
            max(0, self._dropped - number), sum(sound_s for missing, sound_s in self._missing if missing > number)
        )

    def has_gap_after(self, number: int) -> bool:
        """Whether messages after this one are dropped."""
        return number < self._dropped

    def after(self, number: int) -> list[Data]:
        """The kept messages after this one."""
        return [one.data for one in self._kept if one.number > number]

    def next_after(self, number: int) -> KeptMessage | None:
        """The first kept message after this one; None if there is none."""
        if not self._kept:
            return None
        index = max(0, number + 1 - self._kept[0].number)
        return self._kept[index] if index < len(self._kept) else None

    def clear(self) -> None:
        """Drop all messages and return their memory to the budget."""
        while self._kept:
            self._drop()
        self._missing.clear()

    def _drop(self) -> KeptMessage:
        message = self._kept.popleft()
        self._dropped = message.number
        self._hold(-message.n_bytes)
        return message

    def _hold(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        self._budget.used += n_bytes


class ResumeTokens:
    """The secret of one session, which each use replaces. It is compared in constant time and kept as a digest only."""

    def __init__(self) -> None:
        self._digest = b""
        self._before: bytes | None = None  # valid until the client has shown that it has the new one

    @property
    def digests(self) -> tuple[str, ...]:
        """SHA-256 of the valid secrets, in hexadecimal digits."""
        return tuple(one.hex() for one in (self._digest, self._before) if one)

    def issue(self) -> str:
        """A new secret. The one before stays valid until `confirm`."""
        token = secrets.token_urlsafe(32)
        self._before, self._digest = self._digest or None, _digest(token)
        return token

    def replace(self, token: str) -> str:
        """A new secret in place of this one, which the client has, and which stays valid until `confirm`."""
        self._digest = _digest(token)
        return self.issue()

    def confirm(self, token: str | None = None) -> None:
        """The client has received this secret; None: the newest one. If it is, the one before is no longer valid."""
        if token is None or hmac.compare_digest(_digest(token), self._digest):
            self._before = None

    def accepts(self, token: str) -> bool:
        """Whether this is the newest secret, or the one before while it is valid."""
        given = _digest(token)
        is_newest = hmac.compare_digest(given, self._digest)
        is_before = self._before is not None and hmac.compare_digest(given, self._before)
        return is_newest or is_before


async def resume_request(websocket: WebSocket) -> ResumeSession:
    """The first message of a connection that continues a session. Raises: WireError; ClientDisconnected."""
    try:
        async with asyncio.timeout(RESUME_REQUEST_S):
            event = await websocket.receive()
    except TimeoutError:
        raise WireError(ErrorCode.BAD_MESSAGE, "message", expected="resume_session", got="none in time") from None
    if event["type"] == "websocket.disconnect":
        raise ClientDisconnected
    text = event.get("text")
    if text is None or len(text) > MAX_REQUEST_CHARS:
        got = "a binary frame" if text is None else f"{len(text)} characters"
        raise WireError(ErrorCode.BAD_MESSAGE, "message", expected="a short resume_session", got=got)
    message = RESUME_CLIENT.read_text(text)
    if not isinstance(message, ResumeSession):
        raise WireError(ErrorCode.BAD_MESSAGE, "message.type", expected="resume_session", got=message.type)
    return message


def refused_token() -> WireError:
    """The error of a token that continues no session."""
    expected = "the newest token of a session that goes on, with the key that began it"
    return WireError(ErrorCode.RESUME_REFUSED, "resume_session.token", expected=expected, got="another one")


def token_digest(token: str) -> str:
    """SHA-256 of a secret, in hexadecimal digits."""
    return _digest(token).hex()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
