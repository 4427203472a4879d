"""The cookie of the pages, and the tokens of links that bring it.

A cookie names its key and when it ends, signed with a secret of this server and the key's hash. It does not contain the
key, survives a restart, and ends with its key.
"""

import hmac
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from server.access.keys import ApiKey, ApiKeys
from worker.key_text import LINK_PREFIX

LOG = logging.getLogger(__name__)
FILE_NAME = "page_secret"
COOKIE_S = 30 * 86_400
LINK_S = 600.0
MAX_LINKS = 1000
SECRET_BYTES = 32
FILE_MODE = 0o600


class PageCookies:
    """Makes and checks the values of the cookie.

    Args:
        path: file of the secret, made when the first cookie is.
        clock: Unix s.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time):
        self._path, self._clock = path, clock
        self._secret: bytes | None = None

    def make(self, key: ApiKey) -> str:
        """A cookie for a key, valid for `COOKIE_S`."""
        named = f"{key.name}.{int(self._clock()) + COOKIE_S}"
        return f"{named}.{self._signature(named, key)}"

    def find(self, cookie: str, keys: ApiKeys) -> ApiKey | None:
        """The key of a cookie; None if it is not valid or not any more."""
        named, _, signature = cookie.rpartition(".")
        name, _, ends_at = named.rpartition(".")
        key = keys.named(name)
        if key is None or not ends_at.isascii() or not ends_at.isdigit():
            return None
        is_signed = hmac.compare_digest(self._signature(named, key).encode(), signature.encode("utf-8", "replace"))
        return key if is_signed and int(ends_at[:20]) > self._clock() else None

    def _signature(self, named: str, key: ApiKey) -> str:
        if self._secret is None:
            self._secret = _read_or_make(self._path)
        return hmac.new(self._secret, f"page {named} {key.hash}".encode(), sha256).hexdigest()


def _read_or_make(path: Path) -> bytes:
    """The secret in the file, or a new one that is written there.

    Of servers that share the folder and start together, one makes the file and the others read it: a link to a complete
    file is made in one step, and only where there is none.
    """
    made = secrets.token_bytes(SECRET_BYTES)
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        if (found := _read(path)) is not None:
            return found
        path.parent.mkdir(parents=True, exist_ok=True)
        new.touch(FILE_MODE, exist_ok=False)
        new.write_bytes(made)
        with suppress(OSError):  # there is one, or the file system has no links
            path.hardlink_to(new)
        if (found := _read(path)) is not None:
            return found
        new.replace(path)  # the file is damaged
    except OSError as error:
        LOG.warning("secret of the pages' cookies: %s; visitors sign in again after a restart", error)
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)
    return made


def _read(path: Path) -> bytes | None:
    """The secret in the file; None if there is none, or one that is damaged."""
    with suppress(FileNotFoundError):
        if len(found := path.read_bytes()) == SECRET_BYTES:
            return found
    return None


class SignInLinks:
    """Tokens that sign one browser in, once, within `LINK_S`. clock: monotonic s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._names: dict[str, tuple[str, float]] = {}  # hash of a token -> name of its key, end

    def make(self, key_name: str) -> str:
        """A new token for a key."""
        now = self._clock()
        self._names = {one: found for one, found in self._names.items() if found[1] > now}
        while len(self._names) >= MAX_LINKS:
            del self._names[next(iter(self._names))]
        token = f"{LINK_PREFIX}{secrets.token_urlsafe(SECRET_BYTES)}"
        self._names[_digest(token)] = key_name, now + LINK_S
        return token

    def take(self, token: str) -> str | None:
        """The name of a token's key, once; None for an unknown, used or old token."""
        name, ends_at = self._names.pop(_digest(token), ("", 0.0))
        return name if name and ends_at > self._clock() else None


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
