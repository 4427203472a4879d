"""The rates of one connection: what it sends is slowed down, and what costs much is refused above its limit."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.types import Message, Receive

from server.access.limit import Limit
from server.access.message_kinds import limits_of
from server.access.refusal import AccessRefusedError, limit_reached
from server.access.token_bucket import TokenBucket
from worker.config.access import ClientLimits
from worker.protocol.codes import CloseCode

MB, MEGAPIXEL = 10**6, 10**6
WHAT = {Limit.INTERRUPTS: "interruptions and demands", Limit.PREPARES: "preparations and changes of the session"}


@dataclass(frozen=True)
class ClientBuckets:
    """What all connections of a client share. Those of costly messages hold `CONNECTIONS` times a connection's rate.

    A connection that a limit of its own ends counts as requests.
    """

    requests: TokenBucket
    messages: TokenBucket
    bytes: TokenBucket
    metrics: TokenBucket
    takeovers: TokenBucket
    costly: dict[Limit, TokenBucket]
    pixels: TokenBucket


class ConnectionPace:
    """The buckets of one TCP connection and of its client.

    Args:
        limits: settings.
        client: of the connection's client.
        share: identity of the connection for fair shares of threads.
        count: counts that a limit was reached.
        clock: monotonic s.
    """

    def __init__(
        self,
        limits: ClientLimits,
        client: ClientBuckets,
        share: object,
        count: Callable[[Limit], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        now = clock()
        self.share = share
        self._client, self._count, self._clock = client, count, clock
        self._end_cost = limits.requests_per_s
        self._messages = TokenBucket(limits.socket_messages_per_s, now)
        self._bytes = TokenBucket(limits.socket_mb_per_s * MB, now)
        self._pixels = TokenBucket(limits.megapixels_per_s * MEGAPIXEL, now)
        self._costly = {
            Limit.INTERRUPTS: TokenBucket(limits.interrupts_per_s, now),
            Limit.PREPARES: TokenBucket(limits.prepares_per_s, now),
        }

    async def read(self, n_bytes: int) -> None:
        """Count a message, and wait as long as the connection or its client is ahead of its rates."""
        now = self._clock()
        await self._wait(
            (Limit.MESSAGES, self._client.messages.spend(1, now)),
            (Limit.BYTES, self._client.bytes.spend(n_bytes, now)),
            (Limit.SOCKET_MESSAGES, self._messages.spend(1, now)),
            (Limit.SOCKET_BYTES, self._bytes.spend(n_bytes, now)),
        )

    async def decode(self, n_pixels: int) -> None:
        """Count pixels that are decoded next, and wait as long as the connection or its client is ahead of its rate."""
        now = self._clock()
        owed = max(self._client.pixels.spend(n_pixels, now), self._pixels.spend(n_pixels, now))
        await self._wait((Limit.PIXELS, owed))

    async def _wait(self, *owed: tuple[Limit, float]) -> None:
        limit, seconds = max(owed, key=lambda one: one[1])
        if seconds:
            self._count(limit)
            await asyncio.sleep(seconds)

    def paced(self, receive: Receive, refuse: Callable[[AccessRefusedError], Awaitable[None]]) -> Receive:
        """`receive` at most as fast as the client may send: it waits, and flow control slows the client down.

        Args:
            receive: of ASGI, for a request or a WebSocket.
            refuse: ends a socket whose client sent a costly message above its limit; `receive` then returns a
                disconnect.
        """

        async def receive_paced() -> Message:
            message = await receive()
            data: str | bytes | None = message.get("text") or message.get("bytes") or message.get("body")
            if not data and message["type"] != "websocket.receive":
                return message
            await self.read(len(data or ""))
            if not data or "body" in message:
                return message
            try:
                await self._check(data)
            except AccessRefusedError as error:
                await refuse(error)
                return {"type": "websocket.disconnect", "code": CloseCode.POLICY_VIOLATION}
            return message

        return receive_paced

    async def _check(self, data: str | bytes) -> None:
        """Count a socket's message by its kinds. Raises: AccessRefusedError for a costly one above its limit."""
        for limit in await limits_of(data):
            now = self._clock()
            bucket = self._costly[limit]
            own_wait_s = bucket.take(now)
            wait_s = max(own_wait_s, self._client.costly[limit].take(now))
            if own_wait_s:  # coming back at once costs the requests of a second
                self._client.requests.charge(self._end_cost, now)
            if wait_s:
                self._count(limit)
                expected = f"at most {bucket.rate:g} a second ({limit})"
                raise limit_reached(limit, WHAT[limit], expected=expected, got="more", retry_after_s=wait_s)


CONNECTION: ContextVar[ConnectionPace | None] = ContextVar("connection", default=None)


async def pace_pixels(n_pixels: int) -> None:
    """Wait until the connection that is served may have so many more pixels decoded."""
    pace = CONNECTION.get()
    if pace is not None:
        await pace.decode(n_pixels)
