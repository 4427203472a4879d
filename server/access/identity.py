"""Who sends a request: an identity with rights and limits, which the access guard puts into the request's scope.

Routes, sockets and doors read it with `identity_of`. They never see keys.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from typing import Any

from starlette.requests import HTTPConnection

SCOPE_KEY = "duologue.identity"


class IdentityKind(StrEnum):
    """How a request proved its identity.

    OPEN: not at all, and no key is required. ANONYMOUS: not at all, on a route that needs no key. KEY: with a key.
    ADMIN: with an administrator's key. SECRET: with an ephemeral secret.
    """

    OPEN = "open"
    ANONYMOUS = "anonymous"
    KEY = "key"
    ADMIN = "admin"
    SECRET = "secret"


@dataclass(frozen=True)
class KeyLimits:
    """Limits of one key; None: no limit.

    sessions: at the same time, waiting ones included. requests_per_day: HTTP requests that change something and
    sockets. minutes_per_day: of sessions with a slot.
    """

    sessions: int | None = None
    requests_per_day: int | None = None
    minutes_per_day: float | None = None


@dataclass(frozen=True)
class Identity:
    """Who sends a request.

    Attributes:
        name: name of the key; "" without a key.
        kind: how the request proved it.
        address: IP address of the connection; "" if it is unknown.
        limits: of the key. A secret has those of the key that made it and counts against them.
        models: names of the models that the key may use; None: all.
        session: settings of the session that a secret was made with; None without a secret.
        is_forwarded: another gateway of the cluster passes the connection on, and has counted it.
    """

    name: str = ""
    kind: IdentityKind = IdentityKind.OPEN
    address: str = ""
    limits: KeyLimits = KeyLimits()
    models: frozenset[str] | None = None
    session: Mapping[str, Any] | None = None
    is_forwarded: bool = False

    @property
    def has_key(self) -> bool:
        """Whether the request came with a key, or with a secret that a key made."""
        return self.kind not in (IdentityKind.OPEN, IdentityKind.ANONYMOUS) and bool(self.name)

    @property
    def owner(self) -> str:
        """What its sessions, tickets and recordings are filed under: the key, or the address without one."""
        return f"key:{self.name}" if self.has_key else f"address:{self.address}"

    @property
    def is_admin(self) -> bool:
        """Whether it may do what concerns everyone: with an administrator's key, or on this machine without keys."""
        return self.kind is IdentityKind.ADMIN or (self.kind is IdentityKind.OPEN and self.is_local)

    @property
    def is_local(self) -> bool:
        """Whether the connection comes from this machine."""
        try:
            address = ip_address(self.address)
        except ValueError:
            return False
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback

    def owns(self, owner: str) -> bool:
        """Whether it may see and change what is filed under `owner`: its own, or everything as an administrator."""
        return self.is_admin or owner == self.owner

    def may_use(self, model: str) -> bool:
        """Whether it may use the model. model: the served name."""
        return self.models is None or model in self.models


def identity_of(connection: HTTPConnection) -> Identity:
    """The identity of a request or of a WebSocket, as the access guard found it."""
    identity = connection.scope[SCOPE_KEY]
    assert isinstance(identity, Identity)
    return identity


def address_of(scope: MutableMapping[str, Any]) -> str:
    """The IP address of a connection; "" if it is unknown."""
    client = scope.get("client")
    return str(client[0]) if client else ""
