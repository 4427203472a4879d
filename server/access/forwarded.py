"""The identity of a client whose connection another gateway of the cluster passes on."""

import hmac
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import Scope

from server.access.identity import Identity, IdentityKind
from worker.key_text import WORKER_SECRET_HEADER

IDENTITY_HEADER = "x-duologue-identity"
PATHS = "/ws/duplex/"  # the only sockets that gateways pass on


def forwarded_headers(identity: Identity, secret: str) -> dict[str, str]:
    """Headers of a connection that is passed on. secret: of the cluster."""
    fields = {"name": identity.name, "kind": identity.kind.value, "address": identity.address}
    return {IDENTITY_HEADER: json.dumps(fields), WORKER_SECRET_HEADER: secret}


def forwarded_identity(scope: Scope, secret: str | None) -> Identity | None:
    """The identity that another gateway has found; None for a connection of any other program.

    secret: of the cluster; None: connections are not passed on.
    """
    if secret is None or scope["type"] != "websocket" or not scope["path"].startswith(PATHS):
        return None
    headers: Mapping[str, str] = HTTPConnection(scope).headers
    given = headers.get(WORKER_SECRET_HEADER, "").encode("utf-8", "replace")
    if IDENTITY_HEADER not in headers or not hmac.compare_digest(given, secret.encode()):
        return None
    fields: dict[str, Any] = json.loads(headers[IDENTITY_HEADER])
    kind = IdentityKind(fields["kind"])
    return Identity(name=fields["name"], kind=kind, address=fields["address"], is_forwarded=True)
