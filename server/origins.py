"""Which pages may talk to this server: a browser sends a page's origin along, and any page may have it ask.

Programs send none and are let through.
"""

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection


class Origins:
    """Who is let in.

    allowed: origins beside this server's own; `*`: any. only_here: nobody but this machine can reach the server. Then
    its own pages have a name of this machine: any other one leads here only if somebody's name server says so.
    """

    def __init__(self, allowed: Collection[str], *, only_here: bool = False):
        self._allowed = frozenset(one.rstrip("/").lower() for one in allowed)
        self._only_here = only_here

    def admits(self, connection: HTTPConnection) -> bool:
        """Whether the request comes from a program, from one of our own pages or from an allowed one."""
        origin = connection.headers.get("origin")
        if origin is None or "*" in self._allowed or origin.lower() in self._allowed:
            return True
        try:
            page = urlsplit(origin)
            is_ours = bool(page.netloc) and page.netloc.lower() == connection.headers.get("host", "").lower()
            return is_ours and (not self._only_here or _is_here(page.hostname or ""))
        except ValueError:
            return False


def _is_here(name: str) -> bool:
    """Raises: ValueError for a name that is neither an address nor localhost."""
    return name == "localhost" or ip_address(name).is_loopback
