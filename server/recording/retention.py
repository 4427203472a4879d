"""Removal of old recordings and traces: first those above the age limit, then the oldest ones above the size limit.

Recordings in progress, those that are being completed, and folders without `meta.json` are never removed.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from server.background import end_task
from server.recording.files import META, folder_bytes, read_json
from server.recording.store import RecordingStore
from server.recording.timeline import FILE_NAME, RecordingBusyError, TimelineFile

LOG = logging.getLogger(__name__)
FIRST_S, INTERVAL_S = 60.0, 24 * 3600.0
BYTES_PER_GB = 10**9
IN_USE = timedelta(hours=1)


class RetentionLimits(NamedTuple):
    """days: greatest age. max_gb: greatest size of all recordings. A negative number: no limit."""

    days: float
    max_gb: float

    @property
    def is_set(self) -> bool:
        """Whether there is any limit."""
        return self.days >= 0 or self.max_gb >= 0


class Removed(NamedTuple):
    """What a run removed."""

    n_expired: int
    n_for_space: int
    n_bytes: int


def clean_up_traces(folder: Path, limits: RetentionLimits, now: datetime) -> int:
    """Apply the limits to traces of sessions, which are a total of their own. Returns: number of removed files.

    Args:
        folder: of the traces.
        limits: those of recordings.
        now: in UTC. A file that was written within the last `IN_USE` before it stays.
    Raises: OSError.
    """
    found = [(path, path.stat()) for path in folder.glob("*.trace.jsonl")]
    total, n_removed = sum(stat.st_size for _, stat in found), 0
    for path, stat in sorted(found, key=lambda one: one[1].st_mtime):
        age = now - datetime.fromtimestamp(stat.st_mtime, UTC)
        is_expired = limits.days >= 0 and age > timedelta(days=limits.days)
        is_too_much = limits.max_gb >= 0 and total > limits.max_gb * BYTES_PER_GB
        if age > IN_USE and (is_expired or is_too_much):
            path.unlink(missing_ok=True)
            total, n_removed = total - stat.st_size, n_removed + 1
    return n_removed


class _Stored(NamedTuple):
    recording_id: str
    created_at: datetime
    n_bytes: int


def clean_up(store: RecordingStore, limits: RetentionLimits, now: datetime) -> Removed:
    """Apply the limits. now: in UTC. Raises: OSError."""
    store.remove_deleted()
    stored = sorted((_stored(store, one) for one in store.ids()), key=lambda one: one.created_at)
    total = sum(one.n_bytes for one in stored)
    n_expired = n_for_space = n_bytes = 0
    for one in stored:
        is_expired = limits.days >= 0 and now - one.created_at > timedelta(days=limits.days)
        is_too_much = limits.max_gb >= 0 and total > limits.max_gb * BYTES_PER_GB
        if not is_expired and not is_too_much:
            continue
        if _is_in_use(store.root / one.recording_id) or not store.delete(one.recording_id):
            continue
        total, n_bytes = total - one.n_bytes, n_bytes + one.n_bytes
        n_expired, n_for_space = n_expired + is_expired, n_for_space + (not is_expired)
    return Removed(n_expired, n_for_space, n_bytes)


def _stored(store: RecordingStore, recording_id: str) -> _Stored:
    folder = store.root / recording_id
    meta = read_json(folder / META) or {}
    try:
        created_at = datetime.fromisoformat(str(meta.get("created_at")))
    except ValueError:
        created_at = datetime.strptime(recording_id[:15], "%Y%m%d_%H%M%S")
    if created_at.tzinfo is None:
        created_at = created_at.replace(tzinfo=UTC)
    return _Stored(recording_id, created_at, folder_bytes(folder))


def _is_in_use(folder: Path) -> bool:
    """Whether a process writes or completes the recording."""
    try:
        TimelineFile(folder / FILE_NAME, create=False).close()
    except FileNotFoundError:
        return False
    except RecordingBusyError:
        return True
    return False


class RetentionTask:
    """Runs `clean_up` and `clean_up_traces` a minute after the start and then every day, on a thread."""

    def __init__(
        self,
        store: RecordingStore,
        limits: RetentionLimits,
        traces: Path,
        *,
        now: Callable[[], datetime] | None = None,
    ):
        """traces: folder of traces. now: the current time in UTC."""
        self._store, self._limits, self._traces = store, limits, traces
        self._now = now or (lambda: datetime.now(UTC))
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start, if there is any limit."""
        if self._limits.is_set:
            self._task = asyncio.create_task(self._run(), name="retention")

    async def stop(self) -> None:
        """Stop waiting for the next run."""
        await end_task(self._task)

    async def _run(self) -> None:
        await asyncio.sleep(FIRST_S)
        while True:
            try:
                removed = await asyncio.to_thread(clean_up, self._store, self._limits, self._now())
                LOG.info("recordings removed: %d by age, %d by size, %d bytes", *removed)
                n_traces = await asyncio.to_thread(clean_up_traces, self._traces, self._limits, self._now())
                LOG.info("traces removed: %d", n_traces)
            except OSError as error:
                LOG.error("removing old recordings: %s", error)
            await asyncio.sleep(INTERVAL_S)
