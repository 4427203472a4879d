"""Limits of each client: open sockets, sessions at once, requests, messages and bytes a second.

A client is a key or, without a key, an address. Addresses of this machine have no limits: programs of its user and a
reverse proxy connect from there.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import Message, Receive

from server.access.identity import Identity
from server.access.refusal import limit_reached
from server.access.usage import DayUsage
from worker.config.access import ClientLimits

BURST_S = 10.0  # seconds of its rates that a client may use at once
PRUNE_S = 60.0  # interval at which clients without sockets and sessions are forgotten
BUSY_RETRY_S = 5.0  # retry-after of a client with too many sockets or sessions
MIN_SESSIONS = 2  # of one address, however few slots there are
MB = 10**6


class TokenBucket:
    """A rate with a burst. rate: tokens a second."""

    def __init__(self, rate: float, now: float):
        self._rate, self._most = rate, max(1.0, rate * BURST_S)
        self._tokens, self._at = self._most, now

    def _refill(self, now: float) -> None:
        self._tokens = min(self._most, self._tokens + (now - self._at) * self._rate)
        self._at = now

    def take(self, now: float) -> float:
        """Take one token. Returns: 0.0; without a token the seconds until there is one, and nothing is taken."""
        self._refill(now)
        if self._tokens < 1:
            return (1 - self._tokens) / self._rate
        self._tokens -= 1
        return 0.0

    def spend(self, n: float, now: float) -> float:
        """Take `n` tokens, also if there are fewer. Returns: seconds until none is owed."""
        self._refill(now)
        self._tokens -= n
        return max(0.0, -self._tokens / self._rate)


@dataclass
class _Client:
    """State of one client. used_at: monotonic s of its last request."""

    requests: TokenBucket
    messages: TokenBucket
    bytes: TokenBucket
    n_sockets: int = 0
    n_sessions: int = 0
    used_at: float = 0.0


@dataclass(eq=False)
class SessionPermit:
    """The right to one session, from its ticket to its end. charged_s: seconds that are counted already."""

    identity: Identity
    _release: Callable[["SessionPermit"], None]
    _usage: DayUsage
    charged_s: float = 0.0
    _is_released: bool = field(default=False)

    def charge(self, elapsed_s: float) -> None:
        """Count the seconds of the session so far. elapsed_s: since it got its slot."""
        self._usage.add_session(self.identity, elapsed_s - self.charged_s)
        self.charged_s = max(self.charged_s, elapsed_s)

    @property
    def is_used_up(self) -> bool:
        """Whether the key's minutes of today are used up."""
        return self._usage.has_used_minutes(self.identity)

    def release(self, elapsed_s: float) -> None:
        """End the session. elapsed_s: since it got its slot; 0 without one. A second call does nothing."""
        if not self._is_released:
            self._is_released = True
            self.charge(elapsed_s)
            self._release(self)


class Clients:
    """All clients that have sent something lately. clock: monotonic s."""

    def __init__(self, limits: ClientLimits, usage: DayUsage, clock: Callable[[], float] = time.monotonic):
        self._limits, self._usage, self._clock = limits, usage, clock
        self._clients: dict[str, _Client] = {}
        self._pruned_at = clock()

    def __len__(self) -> int:
        return len(self._clients)

    def _of(self, identity: Identity) -> _Client | None:
        """The client's state; None if it has no limits."""
        if not identity.has_key and identity.is_local:
            return None
        now = self._clock()
        if now - self._pruned_at > PRUNE_S:
            self._prune(now)
        client = self._clients.get(identity.owner)
        if client is None:
            limits = self._limits
            client = self._clients[identity.owner] = _Client(
                TokenBucket(limits.requests_per_s, now),
                TokenBucket(limits.messages_per_s, now),
                TokenBucket(limits.mb_per_s * MB, now),
            )
        client.used_at = now
        return client

    def _prune(self, now: float) -> None:
        self._pruned_at = now
        self._clients = {
            owner: client
            for owner, client in self._clients.items()
            if client.n_sockets or client.n_sessions or now - client.used_at < PRUNE_S
        }

    def count_request(self, identity: Identity) -> None:
        """Count an HTTP request or a handshake. Raises: AccessRefusedError."""
        client = self._of(identity)
        wait_s = 0.0 if client is None else client.requests.take(self._clock())
        if wait_s:
            raise limit_reached(
                "requests",
                expected=f"at most {self._limits.requests_per_s:g} a second",
                got="more",
                retry_after_s=wait_s,
            )

    def open_socket(self, identity: Identity) -> None:
        """Count a WebSocket, for which `close_socket` must follow. Raises: AccessRefusedError."""
        client = self._of(identity)
        if client is None:
            return
        if client.n_sockets >= self._limits.sockets:
            raise limit_reached(
                "open sockets", expected=f"at most {self._limits.sockets}", got="one more", retry_after_s=BUSY_RETRY_S
            )
        client.n_sockets += 1

    def close_socket(self, identity: Identity) -> None:
        """Count the end of a WebSocket."""
        client = self._of(identity)
        if client is not None:
            client.n_sockets -= 1

    def admit_session(self, identity: Identity, n_slots: int) -> SessionPermit:
        """The right to a session.

        Args:
            identity: whose session it is.
            n_slots: number of all slots.
        Raises:
            AccessRefusedError if the client has its sessions already, or its key's minutes of today are used up.
        """
        self._usage.check_minutes(identity)
        client = self._of(identity)
        limit = self._session_limit(identity, n_slots)
        if client is not None:
            if limit is not None and client.n_sessions >= limit:
                raise limit_reached(
                    "sessions at once", expected=f"at most {limit}", got="one more", retry_after_s=BUSY_RETRY_S
                )
            client.n_sessions += 1
        return SessionPermit(identity, self._end_session, self._usage)

    def _session_limit(self, identity: Identity, n_slots: int) -> int | None:
        if identity.has_key:
            return identity.limits.sessions
        return self._limits.sessions or max(MIN_SESSIONS, math.ceil(n_slots / 2))

    def _end_session(self, permit: SessionPermit) -> None:
        client = self._of(permit.identity)
        if client is not None:
            client.n_sessions -= 1

    def paced(self, receive: Receive, identity: Identity) -> Receive:
        """`receive` at most as fast as the client may send: it waits, and flow control slows the client down."""
        client = self._of(identity)
        if client is None:
            return receive

        async def receive_paced() -> Message:
            message = await receive()
            data = message.get("text") or message.get("bytes") or message.get("body")
            if data is not None:
                now = self._clock()
                wait_s = max(client.messages.spend(1, now), client.bytes.spend(len(data), now))
                if wait_s:
                    await asyncio.sleep(wait_s)
            return message

        return receive_paced
