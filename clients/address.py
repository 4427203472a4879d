"""Where a conversation is: what people type, made into a full WebSocket address. Knows paths; opens nothing."""

import ipaddress
import re
import ssl
import uuid
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

from models.errors import SettingsError

SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}
DUPLEX = "/ws/duplex"


@dataclass(frozen=True)
class TargetAddress:
    """A full address. is_gateway: answers with queue messages first; a worker does not. is_local: this machine."""

    url: str
    session_id: str
    is_gateway: bool
    is_local: bool

    @classmethod
    def of(cls, url: str, session_id: str | None = None) -> "TargetAddress":
        """A server's address to that of a conversation.

        Without a path it is a gateway's, /ws/duplex/SESSION_ID. `/ws/duplex` without a name behind it is a worker's.
        Any other path is kept as it is. Without a scheme it is ws.
        Raises: SettingsError.
        """
        given = url if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", url) else f"ws://{url}"
        try:
            parts = urlsplit(given)
            has_host, _ = bool(parts.hostname), parts.port
        except ValueError:
            has_host = False
        if not has_host or parts.scheme.lower() not in SCHEMES:
            raise SettingsError("url", expected="ws://host:port or wss://host:port, with or without a path", got=url)
        path, query = parts.path, parts.query
        name = session_id or f"omni_{uuid.uuid4().hex[:12]}"
        is_gateway = not path.endswith(DUPLEX)
        if path in ("", "/"):
            path = f"{DUPLEX}/{quote(name, safe='')}"
        elif not is_gateway:
            [held] = parse_qs(query).get("session_id", [""])[:1]
            query = query if held else "&".join(filter(None, (query, f"session_id={quote(name, safe='')}")))
            name = held or name
        else:
            name = path.rpartition("/")[2]
        full = urlunsplit((SCHEMES[parts.scheme.lower()], parts.netloc, path, query, ""))
        return cls(full, name, is_gateway, _is_local(parts.hostname))

    def tls(self, context: ssl.SSLContext | None, *, insecure: bool) -> ssl.SSLContext | None:
        """What encrypts the connection; None for ws. insecure: any certificate will do, such as a self-signed one."""
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
