"""Ephemeral secrets, which browsers use in place of a key: bound to the key that made them, and short-lived."""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from server.access.identity import Identity, IdentityKind
from server.access.keys import ApiKeys
from server.access.limit import Limit
from server.access.refusal import limit_reached
from worker.key_text import SECRET_PREFIX

SECRET_BYTES = 24
MAX_SECRETS = 1000  # of one client that have not ended


@dataclass(frozen=True)
class ClientSecret:
    """A secret. expires_at: Unix s. session: settings of its sessions."""

    value: str
    expires_at: int
    session: Mapping[str, Any]


@dataclass(frozen=True)
class _Kept:
    expires_at: int
    session: Mapping[str, Any]
    key_name: str
    key_hash: str
    owner: str


class ClientSecrets:
    """All secrets that have not ended, by the hash of their value. They end with the process too. clock: Unix s."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._kept: dict[str, _Kept] = {}

    def make(self, identity: Identity, keys: ApiKeys, seconds: int, session: Mapping[str, Any]) -> ClientSecret:
        """A new secret.

        Args:
            identity: who makes it; its sessions count for the same key.
            keys: all keys.
            seconds: until it ends.
            session: settings of its sessions.
        Raises:
            AccessRefusedError if the client has too many.
        """
        now = self._clock()
        self._kept = {digest: one for digest, one in self._kept.items() if one.expires_at > now}
        if Counter(one.owner for one in self._kept.values())[identity.owner] >= MAX_SECRETS:
            raise limit_reached(
                Limit.SECRETS, "client secrets", expected=f"at most {MAX_SECRETS}", got="one more", retry_after_s=60
            )
        value, expires_at = f"{SECRET_PREFIX}{secrets.token_urlsafe(SECRET_BYTES)}", int(now) + seconds
        key = keys.named(identity.name) if identity.has_key else None
        self._kept[_digest(value)] = _Kept(
            expires_at, session, identity.name, "" if key is None else key.hash, identity.owner
        )
        return ClientSecret(value, expires_at, session)

    def find(self, value: str, keys: ApiKeys, address: str) -> Identity | None:
        """The identity of a request with a secret; None if the secret is unknown, has ended, or its key has."""
        kept = self._kept.get(_digest(value))
        if kept is None or kept.expires_at <= self._clock():
            return None
        if not kept.key_name:
            return Identity(address=address, session=kept.session)
        key = keys.named(kept.key_name)
        if key is None or key.hash != kept.key_hash:
            return None
        return replace(key.identity(address), kind=IdentityKind.SECRET, session=kept.session)


def _digest(value: str) -> str:
    return sha256(value.encode("utf-8", "surrogateescape")).hexdigest()
