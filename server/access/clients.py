"""Limits of each client: open sockets, sessions at once, requests, messages and bytes a second.

A client is a key or, without a key, an address. Programs of this machine's user and a reverse proxy share its
addresses: these have `LOCAL_SHARE` times the rates and no limit of sockets and sessions. Each connection has rates of
its own.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from starlette.types import Scope

from server.access.connection_pace import MB, MEGAPIXEL, ClientBuckets, ConnectionPace
from server.access.identity import Identity
from server.access.limit import Limit
from server.access.refusal import AccessRefusedError, limit_reached
from server.access.token_bucket import TokenBucket
from server.access.usage import DayUsage
from worker.config.access import ClientLimits
from worker.protocol.live_http import HELD

PRUNE_S = 60.0  # interval at which clients without sockets and sessions are forgotten
BUSY_RETRY_S = 5.0  # retry-after of a client with too many sockets or sessions
MIN_SESSIONS = 2  # of one address, however few slots there are
LOCAL_SHARE = 10  # rates of an address of this machine, in those of any other client
CONNECTIONS = 8  # costly messages and pixels of a client, in those of one connection
METRICS_PATH = "/metrics"


@dataclass
class _Client:
    """State of one client. used_at: monotonic s of its last request."""

    buckets: ClientBuckets
    n_sockets: int = 0
    n_sessions: int = 0
    used_at: float = 0.0


@dataclass(eq=False)
class SessionPermit:
    """The right to one session, from its ticket to its end.

    limit: sessions that its client may have; None: any number. charged_s: seconds that are counted already.
    """

    identity: Identity
    limit: int | None
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
    """All clients that have sent something lately.

    Args:
        limits: settings.
        usage: of keys today.
        count: counts that a limit of a rate slowed a client down.
        clock: monotonic s.
    """

    def __init__(
        self,
        limits: ClientLimits,
        usage: DayUsage,
        count: Callable[[Limit], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._limits, self._usage, self._count, self._clock = limits, usage, count, clock
        self._clients: dict[str, _Client] = {}
        # By the connection's bytes: the owner of its last request, and its pace.
        self._paces: WeakKeyDictionary[object, tuple[str, ConnectionPace]] = WeakKeyDictionary()
        self._pruned_at = clock()

    def __len__(self) -> int:
        return len(self._clients)

    def _of(self, identity: Identity) -> _Client:
        """The client's state."""
        now = self._clock()
        if now - self._pruned_at > PRUNE_S:
            self._prune(now)
        client = self._clients.get(identity.owner)
        if client is None:
            client = self._clients[identity.owner] = _Client(self._buckets(_is_local(identity), now))
        client.used_at = now
        return client

    def _buckets(self, is_local: bool, now: float) -> ClientBuckets:
        limits, n = self._limits, LOCAL_SHARE if is_local else 1
        costly = {Limit.INTERRUPTS: limits.interrupts_per_s, Limit.PREPARES: limits.prepares_per_s}
        return ClientBuckets(
            requests=TokenBucket(n * limits.requests_per_s, now),
            messages=TokenBucket(n * limits.messages_per_s, now),
            bytes=TokenBucket(n * limits.mb_per_s * MB, now),
            metrics=TokenBucket(limits.metrics_per_s, now),
            takeovers=TokenBucket(n * limits.takeovers_per_s, now),
            costly={limit: TokenBucket(n * CONNECTIONS * rate, now) for limit, rate in costly.items()},
            pixels=TokenBucket(n * CONNECTIONS * limits.megapixels_per_s * MEGAPIXEL, now),
        )

    def pace_of(self, identity: Identity, scope: Scope) -> ConnectionPace:
        """The rates of the connection that a request or a socket came on. scope: an empty one is a new connection."""
        held = scope.get("state", {}).get(HELD)
        owner, pace = ("", None) if held is None else self._paces.get(held, ("", None))
        if pace is None or owner != identity.owner:
            share = object() if _is_local(identity) else identity.owner
            pace = ConnectionPace(self._limits, self._of(identity).buckets, share, self._count, self._clock)
            if held is not None:
                self._paces[held] = identity.owner, pace
        return pace

    def _prune(self, now: float) -> None:
        self._pruned_at = now
        self._clients = {
            owner: client
            for owner, client in self._clients.items()
            if client.n_sockets or client.n_sessions or now - client.used_at < PRUNE_S
        }

    def count_request(self, identity: Identity, path: str) -> None:
        """Count an HTTP request or a handshake. Raises: AccessRefusedError."""
        buckets, now = self._of(identity).buckets, self._clock()
        limit, what, bucket = Limit.REQUESTS, "requests", buckets.requests
        wait_s = bucket.take(now)
        if not wait_s and path == METRICS_PATH:
            limit, what, bucket = Limit.METRICS, "requests for /metrics", buckets.metrics
            wait_s = bucket.take(now)
        if wait_s:
            expected = f"at most {bucket.rate:g} a second ({limit})"
            raise limit_reached(limit, what, expected=expected, got="more", retry_after_s=wait_s)

    def count_takeover(self, identity: Identity) -> None:
        """Count a search of all workers for a session of a lost gateway. Raises: AccessRefusedError."""
        bucket = self._of(identity).buckets.takeovers
        if wait_s := bucket.take(self._clock()):
            expected = f"at most {bucket.rate:g} a second ({Limit.TAKEOVERS})"
            raise limit_reached(Limit.TAKEOVERS, "takeovers", expected=expected, got="more", retry_after_s=wait_s)

    def forgive_takeover(self, identity: Identity) -> None:
        """Do not count a search that has found the client's session."""
        self._of(identity).buckets.takeovers.spend(-1, self._clock())

    def open_socket(self, identity: Identity) -> None:
        """Count a WebSocket, for which `close_socket` must follow. Raises: AccessRefusedError."""
        if identity.is_forwarded:
            return
        client, limit = self._of(identity), self._limits.sockets
        if client.n_sockets >= limit and not _is_local(identity):
            raise limit_reached(
                Limit.SOCKETS,
                "open sockets",
                expected=f"at most {limit}",
                got="one more",
                retry_after_s=BUSY_RETRY_S,
            )
        client.n_sockets += 1

    def close_socket(self, identity: Identity) -> None:
        """Count the end of a WebSocket."""
        if not identity.is_forwarded:
            self._of(identity).n_sockets -= 1

    def admit_session(self, identity: Identity, n_slots: int) -> SessionPermit:
        """The right to a session.

        Args:
            identity: whose session it is.
            n_slots: number of all slots.
        Raises:
            AccessRefusedError if the client has its sessions already, or its key's minutes of today are used up.
        """
        self._usage.check_minutes(identity)
        limit = self._session_limit(identity, n_slots)
        if limit is not None and self._of(identity).n_sessions >= limit:
            raise sessions_refusal(limit)
        return self.adopt_session(identity, n_slots)

    def adopt_session(self, identity: Identity, n_slots: int) -> SessionPermit:
        """The right to a session that another gateway has admitted. It counts, but no limit ends it."""
        self._of(identity).n_sessions += 1
        return SessionPermit(identity, self._session_limit(identity, n_slots), self._end_session, self._usage)

    def _session_limit(self, identity: Identity, n_slots: int) -> int | None:
        if identity.has_key:
            return identity.limits.sessions
        if _is_local(identity):
            return None
        return self._limits.sessions or max(MIN_SESSIONS, math.ceil(n_slots / 2))

    def _end_session(self, permit: SessionPermit) -> None:
        self._of(permit.identity).n_sessions -= 1


def sessions_refusal(limit: int | None) -> AccessRefusedError:
    """The refusal of a client that has its sessions already. limit: their number."""
    expected = f"at most {limit}"
    return limit_reached(
        Limit.SESSIONS, "sessions at once", expected=expected, got="one more", retry_after_s=BUSY_RETRY_S
    )


def _is_local(identity: Identity) -> bool:
    return identity.is_local and not identity.has_key
