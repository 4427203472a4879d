"""Bytes from clients that a process holds: messages that are not complete yet, messages and bodies that wait.

They are bounded for one address and for the process. Above a bound, the connection that holds most is closed, so that
live sessions, which hold little, continue. Contains no sockets.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from ipaddress import IPv6Address, ip_address

MAX_HELD_ADDRESS = 256 * 2**20
MAX_HELD = 768 * 2**20
IPV6_PREFIX = 64  # bits; one customer of a provider has all addresses of a prefix


class ConnectionBytes:
    """Bytes of one connection.

    Attributes:
        group: the address, without its last part for IPv6; None for a loopback address, which a proxy may share.
        n_bytes: bytes it holds; 0 after the close.
    """

    def __init__(self, held: "HeldBytes", group: str | None, shed: Callable[[], None]):
        self.group, self.n_bytes = group, 0
        self._held, self._shed, self._is_closed = held, shed, False

    def add(self, n_bytes: int) -> None:
        """Count bytes; negative ones are released. It may close this connection or another one."""
        if self._is_closed:
            return
        self.n_bytes += n_bytes
        self._held.count(self, n_bytes)

    def close(self) -> None:
        """Release all bytes; later calls of `add` have no effect."""
        self.add(-self.n_bytes)
        self._is_closed = True
        self._shed = _nothing  # the connection has this object
        self._held.forget(self)

    def shed(self) -> None:
        """Close the connection, to bring the process back below a bound."""
        shed = self._shed
        self.close()
        shed()


class HeldBytes:
    """Bytes of all connections of one process. total: their sum."""

    def __init__(self, max_total: int = MAX_HELD, max_address: int = MAX_HELD_ADDRESS):
        self.total = 0
        self._max_total, self._max_address = max_total, max_address
        self._of_group: Counter[str] = Counter()
        self._open: set[ConnectionBytes] = set()

    def open(self, address: str | None, shed: Callable[[], None]) -> ConnectionBytes:
        """Bytes of a new connection, to be closed with it.

        Args:
            address: the client's IP address; None if unknown.
            shed: closes the connection and drops what it holds.
        """
        connection = ConnectionBytes(self, group_of(address), shed)
        self._open.add(connection)
        return connection

    def count(self, connection: ConnectionBytes, n_bytes: int) -> None:
        """Count bytes of a connection, and close connections while a bound is exceeded."""
        self.total += n_bytes
        group = connection.group
        if group is not None:
            self._of_group[group] += n_bytes
            while n_bytes > 0 and self._of_group[group] > self._max_address:
                _largest(one for one in self._open if one.group == group).shed()
        while n_bytes > 0 and self.total > self._max_total:
            _largest(self._open).shed()

    def forget(self, connection: ConnectionBytes) -> None:
        """Forget a connection that holds nothing."""
        self._open.discard(connection)
        if connection.group is not None and not self._of_group[connection.group]:
            del self._of_group[connection.group]


def _nothing() -> None:
    pass


def _largest(connections: Iterable[ConnectionBytes]) -> ConnectionBytes:
    return max(connections, key=lambda one: one.n_bytes)


def group_of(address: str | None) -> str | None:
    """The part of an address that stands for one client; None for a loopback or unknown address."""
    try:
        ip = ip_address((address or "").partition("%")[0])
    except ValueError:
        return None
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_loopback:
        return None
    if isinstance(ip, IPv6Address):
        return str(IPv6Address(int(ip) >> (128 - IPV6_PREFIX) << (128 - IPV6_PREFIX)))
    return str(ip)
