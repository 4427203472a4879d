"""What an authority must not forget, in a SQLite file: its term, its gateways, its workers and the usage of keys.

Leases and tickets are not stored: gateways claim them again, and a worker's /health tells which slots are in use.
"""

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from server.cluster.messages import CountedUse

SCHEMA = """
CREATE TABLE IF NOT EXISTS terms (term INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS gateways (name TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS workers (address TEXT PRIMARY KEY, is_draining INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS usage (
    day INTEGER, gateway TEXT, name TEXT, requests INTEGER NOT NULL, session_s REAL NOT NULL,
    PRIMARY KEY (day, gateway, name)
);
"""


class AuthorityStore:
    """The file of one authority. `close` must follow.

    Args:
        path: of the file, whose folder exists; None: nothing outlives the process.
    """

    def __init__(self, path: Path | None):
        # One thread of the event loop's pool at a time uses it.
        self._db = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
        if path is not None:
            path.chmod(0o600)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.executescript(SCHEMA)

    def next_term(self) -> int:
        """A term higher than all before."""
        (newest,) = self._db.execute("SELECT COALESCE(MAX(term), 0) FROM terms").fetchone()
        self._db.execute("INSERT INTO terms VALUES (?)", (newest + 1,))
        return int(newest) + 1

    @property
    def gateways(self) -> list[str]:
        """Names of the gateways that may have sessions."""
        return [name for (name,) in self._db.execute("SELECT name FROM gateways")]

    def store_gateways(self, names: list[str]) -> None:
        """Replace the names of the gateways."""
        with self._db:
            self._db.execute("BEGIN")
            self._db.execute("DELETE FROM gateways")
            self._db.executemany("INSERT INTO gateways VALUES (?)", [(name,) for name in names])

    @property
    def workers(self) -> list[tuple[str, bool]]:
        """Address of each worker, and whether it drains."""
        found = self._db.execute("SELECT address, is_draining FROM workers ORDER BY rowid")
        return [(address, bool(is_draining)) for address, is_draining in found]

    def store_workers(self, workers: list[tuple[str, bool]]) -> None:
        """Replace the workers."""
        with self._db:
            self._db.execute("BEGIN")
            self._db.execute("DELETE FROM workers")
            self._db.executemany("INSERT INTO workers VALUES (?, ?)", workers)

    def usage(self, day: int) -> dict[str, dict[str, CountedUse]]:
        """Usage of a day: gateway -> name of the key -> use."""
        found: dict[str, dict[str, CountedUse]] = {}
        rows = self._db.execute("SELECT gateway, name, requests, session_s FROM usage WHERE day = ?", (day,))
        for gateway, name, requests, session_s in rows:
            found.setdefault(gateway, {})[name] = CountedUse(requests=requests, session_s=session_s)
        return found

    def store_usage(self, day: int, gateway: str, keys: Mapping[str, CountedUse]) -> None:
        """Store what a gateway has counted, and forget the days before."""
        rows = [(day, gateway, name, one.requests, one.session_s) for name, one in keys.items()]
        with self._db:
            self._db.execute("BEGIN")
            self._db.execute("DELETE FROM usage WHERE day < ?", (day,))
            self._db.executemany("INSERT OR REPLACE INTO usage VALUES (?, ?, ?, ?, ?)", rows)

    def close(self) -> None:
        """Close the file."""
        self._db.close()
