"""uvicorn's HTTP protocol with time limits for connections that send no complete request, and with a limit of them.

Contains no WebSockets: an upgrade hands the connection over.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from worker.protocol.held_bytes import ConnectionBytes, HeldBytes, group_of

HELD = "held_bytes"  # key of the connection's bytes in the scope's state
MIN_BODY_BYTES = 1024  # a second, on average over the time limit of a body


class TransportLimit(StrEnum):
    """A limit of connections; the value is the name of its setting in `service.limits`, or of a constant."""

    CONNECTIONS = "connections"
    HEADER = "header_timeout_s"
    BODY = "body_timeout_s"
    UNREAD = "unread_timeout_s"
    HELD = "held_bytes"


def _count_nothing(_: TransportLimit) -> None:
    pass


@dataclass
class TransportLimits:
    """Limits of the connections of one server, and how many each address has.

    Attributes:
        max_connections: open ones of one address, except of this machine; not WebSockets.
        header_s: seconds from the first byte of a request, or from the connection, to the end of the request's
            headers; also of a TLS handshake.
        body_s: seconds in which a body must bring `MIN_BODY_BYTES` a second on average.
        unread_s: seconds without progress after which a client of a WebSocket counts as gone: it takes no data, or does
            not answer a ping.
        count: called for each connection that is closed.
    """

    max_connections: int = 256
    header_s: float = 10.0
    body_s: float = 20.0
    unread_s: float = 60.0
    count: Callable[[TransportLimit], None] = _count_nothing
    held: HeldBytes = field(default_factory=HeldBytes)
    n_open: Counter[str] = field(default_factory=Counter)

    def open(self, group: str | None) -> bool:
        """Count a connection, for which `close` must follow. Returns: whether the address may have it."""
        if group is None:
            return True
        self.n_open[group] += 1
        return self.n_open[group] <= self.max_connections

    def close(self, group: str | None) -> None:
        """Count the end of a connection."""
        if group is not None:
            self.n_open[group] -= 1
            if not self.n_open[group]:
                del self.n_open[group]


class LiveConfig(uvicorn.Config):
    """uvicorn's settings, and what all connections of a server share. transport: limits of connections."""

    transport: TransportLimits


def address_of_transport(transport: asyncio.BaseTransport) -> str | None:
    """The IP address at the other end of a connection; None if it is unknown."""
    peer = transport.get_extra_info("peername")
    return peer[0] if isinstance(peer, tuple) else None


def bytes_of_transport(
    config: uvicorn.Config, transport: asyncio.BaseTransport, shed: Callable[[], None]
) -> ConnectionBytes:
    """Bytes of a new connection. shed: closes it and drops what it holds."""
    limits = cast(LiveConfig, config).transport

    def count_and_shed() -> None:
        limits.count(TransportLimit.HELD)
        shed()

    return limits.held.open(address_of_transport(transport), count_and_shed)


class LiveHttp(H11Protocol):
    """uvicorn's HTTP protocol, which closes connections without a complete request.

    Puts the connection's bytes into the scope's state, for routes that read whole bodies.
    """

    _timer: asyncio.TimerHandle | None = None
    _timed: TransportLimit | None = None  # what `_timer` limits
    _n_body = 0  # bytes since `_timer` began
    _group: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._limits = cast(LiveConfig, self.config).transport
        self._bytes = bytes_of_transport(self.config, transport, transport.abort)
        self.app_state = {**self.app_state, HELD: self._bytes}
        self._group = group_of(address_of_transport(transport))
        if not self._limits.open(self._group):
            self._refuse(TransportLimit.CONNECTIONS)
            return
        self._watch(0)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.get_protocol() is self:  # not after an upgrade
            self._watch(len(data))

    def _watch(self, n_bytes: int) -> None:
        """Limit the time of the headers, or of the body, that the client has begun to send."""
        state = self.conn.their_state
        limit = TransportLimit.HEADER if state is h11.IDLE else TransportLimit.BODY if state is h11.SEND_BODY else None
        if limit is self._timed:
            self._n_body += n_bytes
            return
        self._stop_watching()
        self._timed = limit
        if limit is not None:
            seconds = self._limits.header_s if limit is TransportLimit.HEADER else self._limits.body_s
            self._timer = self.loop.call_later(seconds, self._on_time)

    def _on_time(self) -> None:
        seconds, limit = self._limits.body_s, self._timed
        assert limit is not None, "expected a limit while its timer runs"
        is_slow = self._n_body < seconds * MIN_BODY_BYTES and not self.flow.read_paused
        if limit is TransportLimit.HEADER or is_slow:
            self._refuse(limit)
            return
        self._n_body = 0
        self._timer = self.loop.call_later(seconds, self._on_time)

    def _refuse(self, limit: TransportLimit) -> None:
        self._limits.count(limit)
        self.transport.abort()

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timed = None
        self._n_body = 0

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._release()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()
        super().connection_lost(exc)

    def _release(self) -> None:
        self._stop_watching()
        self._bytes.close()
        self._limits.close(self._group)
        self._group = None
