"""Which pages may talk to this server: a browser sends a page's origin along, and any page may have it ask.

Programs send none and are let through.
"""

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection


class Origins:
    """allowed: origins beside this server's own; `*`: any."""

    def __init__(self, allowed: Collection[str]):
        self._allowed = frozenset(one.rstrip("/").lower() for one in allowed)

    def admits(self, connection: HTTPConnection) -> bool:
        """Whether the request comes from a program, from one of our own pages or from an allowed one."""
        origin = connection.headers.get("origin")
        if origin is None or "*" in self._allowed or origin.lower() in self._allowed:
            return True
        try:
            page = urlsplit(origin).netloc.lower()
        except ValueError:
            return False
        return bool(page) and page == connection.headers.get("host", "").lower()
