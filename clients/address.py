"""The WebSocket address of a conversation, from the address that a user enters. Opens no connection."""

import ipaddress
import re
import ssl
import uuid
from dataclasses import dataclass, replace
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

from models.errors import SettingsError
from worker.protocol.gateway_messages import RESUME_QUERY

SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}
DUPLEX, HALF_DUPLEX = "/ws/duplex", "/ws/half_duplex"
PREFIXES = {DUPLEX: "omni_", HALF_DUPLEX: "hdx_"}


@dataclass(frozen=True)
class TargetAddress:
    """The full address of a conversation.

    Attributes:
        url: ws:// or wss://, with path and query.
        session_id: the session's id.
        is_gateway: whether the server sends queue messages first; a worker does not.
        is_local: whether the server is on this machine.
    """

    url: str
    session_id: str
    is_gateway: bool
    is_local: bool

    @classmethod
    def of(cls, url: str, session_id: str | None = None, kind: str = DUPLEX) -> "TargetAddress":
        """The address of a conversation on a server.

        Args:
            url: the server's address. Without a path it is a gateway's, and KIND/SESSION_ID is appended. A path that
                ends with KIND is a worker's. Any other path is kept. The default scheme is ws.
            session_id: the session's id; None: a new one.
            kind: the path of such conversations, DUPLEX or HALF_DUPLEX.
        Raises:
            SettingsError: for an address without a host or with another scheme.
        """
        given = url if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", url) else f"ws://{url}"
        try:
            parts = urlsplit(given)
            host, _ = parts.hostname, parts.port  # `port` raises for an invalid one
        except ValueError:
            host = None
        if host is None or parts.scheme.lower() not in SCHEMES:
            raise SettingsError("url", expected="ws://host:port or wss://host:port, with or without a path", got=url)
        path, query = parts.path, parts.query
        name = session_id or f"{PREFIXES[kind]}{uuid.uuid4().hex[:12]}"
        is_gateway = not path.endswith(kind)
        if path in ("", "/"):
            path = f"{kind}/{quote(name, safe='')}"
        elif not is_gateway:
            [held] = parse_qs(query).get("session_id", [""])[:1]
            query = query if held else "&".join(filter(None, (query, f"session_id={quote(name, safe='')}")))
            name = held or name
        else:
            name = path.rpartition("/")[2]
        full = urlunsplit((SCHEMES[parts.scheme.lower()], parts.netloc, path, query, ""))
        return cls(full, name, is_gateway, _is_local(host))

    @property
    def resuming(self) -> "TargetAddress":
        """The address of another connection to the same session."""
        parts = urlsplit(self.url)
        query = "&".join(filter(None, (parts.query, f"{RESUME_QUERY}=1")))
        return replace(self, url=urlunsplit(parts._replace(query=query)))

    def tls(self, context: ssl.SSLContext | None, *, insecure: bool) -> ssl.SSLContext | None:
        """The TLS context of the connection; None for ws. insecure: accept any certificate."""
        if not self.url.startswith("wss:"):
            return None
        context = context or ssl.create_default_context()
        if insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
