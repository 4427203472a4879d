"""The API keys of the server: from the settings, and from a file that `python -m server.access` changes.

Only SHA-256 hashes are stored. A key has 256 random bits, so it cannot be found from its hash by trying candidates, and
a slow hash, which passwords need, would only cost time at every request.
"""

import hmac
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from models.atomic_file import write_atomically
from models.errors import ConfigError, ModelError, SettingsError
from server.access.identity import Identity, IdentityKind, KeyLimits
from worker.config.access import ApiKeyEntry
from worker.config.json_file import read_json
from worker.config.service import Config
from worker.key_text import KEYS_FILE

LOG = logging.getLogger(__name__)
FILE_MODE = 0o600
RELOAD_S = 1.0  # interval at which the file is checked for changes
START_KEY = "start"  # name of the key that the launcher makes for one run


@dataclass(frozen=True)
class ApiKey:
    """One key. hash: as `hash_of` returns it."""

    name: str
    hash: str
    is_admin: bool
    limits: KeyLimits
    models: frozenset[str] | None

    @classmethod
    def of(cls, entry: ApiKeyEntry) -> "ApiKey":
        """The key of a settings entry."""
        limits = KeyLimits(entry.sessions, entry.requests_per_day, entry.minutes_per_day)
        models = None if entry.models is None else frozenset(entry.models)
        return cls(entry.name, entry.hash, entry.admin, limits, models)

    def identity(self, address: str) -> Identity:
        """The identity of a request with this key. address: of the connection."""
        kind = IdentityKind.ADMIN if self.is_admin else IdentityKind.KEY
        return Identity(self.name, kind, address, self.limits, self.models)


def hash_of(key: str) -> str:
    """The stored form of a key."""
    return f"sha256:{sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()}"


class KeyFile:
    """The file of keys. path: need not exist."""

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> list[ApiKeyEntry]:
        """The entries; none without a file. Raises: ConfigError; SettingsError."""
        if not self.path.exists():
            return []
        content = read_json(self.path).get("keys")
        if not isinstance(content, list):
            raise ConfigError(f"{self.path}: keys", expected="a list", got=type(content).__name__)
        found = []
        for entry in content:
            if not isinstance(entry, Mapping):
                raise ConfigError(f"{self.path}: keys", expected="objects", got=type(entry).__name__)
            found.append(ApiKeyEntry(**entry))
        return found

    def write(self, entries: Sequence[ApiKeyEntry]) -> None:
        """Replace the entries. Raises: OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"keys": [entry.model_dump(mode="json", exclude_defaults=True) for entry in entries]}
        write_atomically(self.path, json.dumps(content, indent=1).encode() + b"\n")
        self.path.chmod(FILE_MODE)

    @property
    def changed_at(self) -> int | None:
        """When the file was changed, in ns; None if there is none."""
        try:
            return self.path.stat().st_mtime_ns
        except OSError:
            return None


class ApiKeys:
    """All keys. Once keys are required they stay so, also if the last one is removed.

    Args:
        configured: keys of the settings.
        file: further keys, which are read again when the file changes.
        clock: monotonic s.
    Raises:
        ConfigError, SettingsError for an invalid file and for two keys of one name.
    """

    def __init__(self, configured: Sequence[ApiKey], file: KeyFile, clock: Callable[[], float] = time.monotonic):
        self._configured, self._file, self._clock = tuple(configured), file, clock
        self._changed_at, self._checked_at = file.changed_at, clock()
        self._keys = self._joined()
        self._required = bool(self._keys) or self._changed_at is not None

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        self._reload()
        return self._required

    @property
    def all(self) -> tuple[ApiKey, ...]:
        """The current keys."""
        self._reload()
        return self._keys

    def find(self, key: str) -> ApiKey | None:
        """The key with this text; None if there is none. The time does not depend on which key it is."""
        digest, found = hash_of(key), None
        for one in self.all:
            if hmac.compare_digest(one.hash, digest):
                found = one
        return found

    def named(self, name: str) -> ApiKey | None:
        """The key of this name."""
        return next((one for one in self.all if one.name == name), None)

    def _joined(self) -> tuple[ApiKey, ...]:
        keys = (*self._configured, *map(ApiKey.of, self._file.read()))
        for text, what in (([key.name for key in keys], "name"), ([key.hash for key in keys], "hash")):
            if len(set(text)) < len(text):
                twice = next(one for one in text if text.count(one) > 1)
                raise SettingsError("API keys", expected=f"each {what} once", got=twice if what == "name" else "two")
        return keys

    def _reload(self) -> None:
        now = self._clock()
        if now - self._checked_at < RELOAD_S:
            return
        self._checked_at = now
        changed_at = self._file.changed_at
        if changed_at == self._changed_at:
            return
        try:
            self._keys = self._joined()
        except (ModelError, OSError) as error:
            LOG.error("API keys: %s; the former ones stay", error)
        else:
            LOG.info("API keys: %d are read again", len(self._keys))
        self._changed_at = changed_at
        self._required = self._required or bool(self._keys) or changed_at is not None


def key_file(config: Config) -> KeyFile:
    """The file of keys below `service.data_dir`."""
    return KeyFile(config.service.data_dir / KEYS_FILE)


def api_keys_of(config: Config, start_key: str | None = None) -> ApiKeys:
    """All keys of a configuration.

    Args:
        config: settings.
        start_key: a key for this run only, with an administrator's rights; None: none.
    Raises:
        ConfigError; SettingsError.
    """
    configured = [ApiKey.of(entry) for entry in config.service.api_keys]
    if start_key is not None:
        configured.append(ApiKey(START_KEY, hash_of(start_key), True, KeyLimits(), None))
    return ApiKeys(configured, key_file(config))
