"""The checks of a request's Origin and Host headers, which protect against requests from pages of other sites.

A browser sends the header with requests that any page can cause. Programs send none, and are allowed.
The host name of every request must be one of this server's: otherwise a name that another site lets point to this
machine would be an origin of its own, whose page reads everything (DNS rebinding).
"""

import socket
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection


class Origins:
    """The allowed origins.

    Args:
        allowed: origins in addition to this server's own; `*` allows any.
        hosts: host names in addition to those of this machine and of `allowed`; `*` allows any.
        loopback_only: the server listens on a loopback address. Its own pages then have a loopback host name. Another
            host name that resolves to this machine indicates DNS rebinding and is refused.
    """

    def __init__(self, allowed: Collection[str], hosts: Collection[str] = (), *, loopback_only: bool = False):
        self._allowed = frozenset(one.rstrip("/").lower() for one in allowed)
        self._loopback_only = loopback_only
        self._hosts = {host.lower() for host in hosts} | {urlsplit(one).hostname or one for one in self._allowed}
        if not loopback_only:
            name = socket.gethostname().lower()
            self._hosts |= {name, f"{name}.local"}

    def allows(self, connection: HTTPConnection) -> bool:
        """Whether the request comes from a program, from a page of this server or from an allowed origin."""
        origin = connection.headers.get("origin")
        if origin is None or "*" in self._allowed or origin.lower() in self._allowed:
            return True
        try:
            page = urlsplit(origin)
            is_ours = bool(page.netloc) and page.netloc.lower() == connection.headers.get("host", "").lower()
            return is_ours and (not self._loopback_only or _is_loopback(page.hostname or ""))
        except ValueError:
            return False

    def allows_host(self, connection: HTTPConnection) -> bool:
        """Whether the request names this server: as localhost, with a loopback address or a configured name.

        A server for other machines may also be named with any address, or with the machine's name.
        """
        given = connection.headers.get("host")
        if given is None or "*" in self._hosts:
            return True
        try:
            name = urlsplit(f"//{given}").hostname or ""
            return name in self._hosts or _is_loopback(name) or not self._loopback_only
        except ValueError:  # a name that is no address
            return False


def _is_loopback(name: str) -> bool:
    """Raises: ValueError for a name that is neither an IP address nor localhost."""
    return name == "localhost" or ip_address(name).is_loopback
