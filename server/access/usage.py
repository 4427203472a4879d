"""What every key used today: requests and seconds of sessions with a slot. Kept in a file, so it survives a restart."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, ValidationError

from models.atomic_file import write_atomically
from models.errors import ConfigError
from server.access.identity import Identity
from server.access.limit import Limit
from server.access.refusal import AccessRefusedError, limit_reached
from server.background import end_task
from worker.config.json_file import read_json

LOG = logging.getLogger(__name__)
DAY_S = 86_400
SAVE_S = 5.0  # a crash loses at most this much of the counters


def file_name(gateway: str = "") -> str:
    """Name of the counters' file. gateway: its name in a cluster, since gateways may share a folder; "" without."""
    return f"usage-{quote(gateway, safe='')}.json" if gateway else "usage.json"


class KeyUsage(BaseModel):
    """Use of one key in one day. requests: counted ones. session_s: seconds of sessions with a slot."""

    model_config = ConfigDict(strict=True)

    requests: NonNegativeInt = 0
    session_s: NonNegativeFloat = 0.0


class _StoredUsage(BaseModel):
    """day: number of days since 1970-01-01, in UTC. keys: name -> use."""

    model_config = ConfigDict(strict=True)

    day: int
    keys: dict[str, KeyUsage] = {}


class DayUsage:
    """The counters of the current day, in UTC. A damaged file is logged and replaced.

    Args:
        path: the file, which need not exist.
        clock: Unix s.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time):
        self._path, self._clock = path, clock
        self._stored = _read(path) or _StoredUsage(day=self._day)
        self._others = _StoredUsage(day=self._day)
        self._is_saved = True

    @property
    def _day(self) -> int:
        return int(self._clock() // DAY_S)

    @property
    def until_tomorrow_s(self) -> float:
        """Seconds until the counters start again."""
        return DAY_S - self._clock() % DAY_S

    def of(self, name: str) -> KeyUsage:
        """The use of a key today."""
        if self._stored.day != self._day:
            self._stored = _StoredUsage(day=self._day)
        return self._stored.keys.setdefault(name, KeyUsage())

    @property
    def own(self) -> tuple[int, dict[str, KeyUsage]]:
        """The day, and what this gateway has counted in it."""
        day = self._day
        return day, dict(self._stored.keys) if self._stored.day == day else {}

    def add_others(self, day: int, keys: dict[str, KeyUsage]) -> None:
        """Take what the other gateways of the cluster have counted, in place of what they had before."""
        self._others = _StoredUsage(day=day, keys=keys)

    def total_of(self, name: str) -> KeyUsage:
        """The use of a key today at all gateways."""
        own, others = self.of(name), self._others.keys.get(name)
        if others is None or self._others.day != self._day:
            return own
        return KeyUsage(requests=own.requests + others.requests, session_s=own.session_s + others.session_s)

    def count_request(self, identity: Identity) -> None:
        """Count a request of a key. Raises: AccessRefusedError if its requests of today are used up."""
        if not identity.has_key:
            return
        limit = identity.limits.requests_per_day
        if limit is not None and self.total_of(identity.name).requests >= limit:
            raise self._refusal(Limit.DAY_REQUESTS, "requests", f"at most {limit}")
        self.of(identity.name).requests += 1
        self._is_saved = False

    def left(self, identity: Identity) -> list[dict[str, Any]]:
        """What is left of the key's requests of today, as `rate_limits` of the OpenAI API; empty without a limit."""
        limit = identity.limits.requests_per_day
        if not identity.has_key or limit is None:
            return []
        remaining = max(0, limit - self.total_of(identity.name).requests)
        reset_s = round(self.until_tomorrow_s, 3)
        return [{"name": "requests", "limit": limit, "remaining": remaining, "reset_seconds": reset_s}]

    def has_used_minutes(self, identity: Identity) -> bool:
        """Whether the key's minutes of today are used up."""
        limit = identity.limits.minutes_per_day
        return identity.has_key and limit is not None and self.total_of(identity.name).session_s >= 60 * limit

    def check_minutes(self, identity: Identity) -> None:
        """Raises: AccessRefusedError if the minutes of today are used up."""
        if self.has_used_minutes(identity):
            expected = f"at most {identity.limits.minutes_per_day:g}"
            raise self._refusal(Limit.DAY_MINUTES, "minutes of sessions", expected)

    def add_session(self, identity: Identity, seconds: float) -> None:
        """Count seconds of a session with a slot."""
        if identity.has_key and seconds > 0:
            self.of(identity.name).session_s += seconds
            self._is_saved = False

    def _refusal(self, limit: Limit, what: str, expected: str) -> AccessRefusedError:
        return limit_reached(
            limit, f"{what} of this key today", expected=expected, got="more", retry_after_s=self.until_tomorrow_s
        )

    async def save(self) -> None:
        """Write the file if there is something new. A failure is logged; the counters stay in memory."""
        if self._is_saved:
            return
        self._is_saved = True
        try:
            await asyncio.to_thread(_write, self._path, json.dumps(self._stored.model_dump()).encode())
        except OSError as error:
            self._is_saved = False
            LOG.warning("usage of keys: expected to write %s, got %s", self._path, error)


class UsageTask:
    """Writes the counters every `SAVE_S` seconds and at the end."""

    def __init__(self, usage: DayUsage):
        self._usage = usage
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start writing."""
        self._task = asyncio.create_task(self._run(), name="usage")

    async def stop(self) -> None:
        """Stop, and write once more."""
        await end_task(self._task)
        await self._usage.save()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            await self._usage.save()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)


def _read(path: Path) -> _StoredUsage | None:
    if not path.exists():
        return None
    try:
        return _StoredUsage.model_validate(read_json(path))
    except (ConfigError, ValidationError) as error:
        LOG.warning("usage of keys: expected the file of an earlier run, got %s; counting starts again", error)
        return None
