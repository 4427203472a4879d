"""State of an authority that outlives its process, in a SQLite file: term, gateways, workers and usage of keys.

Leases and tickets are not stored: gateways claim them again, and a worker's /health reports which slots are in use.
"""

import logging
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

from server.cluster.messages import CountedUse

LOG = logging.getLogger(__name__)
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
        # One thread at a time uses it, which may be another one than this.
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

    def store_gateways(self, names: list[str]) -> bool:
        """Replace the names of the gateways. Returns: whether they are stored."""
        rows = [(name,) for name in names]
        return self._write(("DELETE FROM gateways", [()]), ("INSERT INTO gateways VALUES (?)", rows))

    @property
    def workers(self) -> list[tuple[str, bool]]:
        """Address of each worker, and whether it drains."""
        found = self._db.execute("SELECT address, is_draining FROM workers ORDER BY rowid")
        return [(address, bool(is_draining)) for address, is_draining in found]

    def store_workers(self, workers: list[tuple[str, bool]]) -> None:
        """Replace the workers."""
        self._write(("DELETE FROM workers", [()]), ("INSERT INTO workers VALUES (?, ?)", workers))

    def usage(self, day: int) -> dict[str, dict[str, CountedUse]]:
        """Usage of a day: gateway -> name of the key -> use."""
        found: dict[str, dict[str, CountedUse]] = {}
        rows = self._db.execute("SELECT gateway, name, requests, session_s FROM usage WHERE day = ?", (day,))
        for gateway, name, requests, session_s in rows:
            found.setdefault(gateway, {})[name] = CountedUse(requests=requests, session_s=session_s)
        return found

    def store_usage(self, day: int, gateway: str, keys: Mapping[str, CountedUse]) -> None:
        """Store what a gateway has counted, and delete earlier days."""
        rows = [(day, gateway, name, one.requests, one.session_s) for name, one in keys.items()]
        self._write(
            ("DELETE FROM usage WHERE day < ?", [(day,)]), ("INSERT OR REPLACE INTO usage VALUES (?, ?, ?, ?, ?)", rows)
        )

    def _write(self, *changes: tuple[str, Sequence[tuple[object, ...]]]) -> bool:
        """Make changes together: statements, each with the values of its runs.

        Returns: False after a failure, such as on a full disk. It is logged, and the cluster goes on without the file.
        """
        try:
            with self._db:
                self._db.execute("BEGIN")
                for statement, rows in changes:
                    self._db.executemany(statement, rows)
        except sqlite3.OperationalError as error:
            LOG.error("the state of the cluster was not stored: %s", error)
            return False
        return True

    def close(self) -> None:
        """Close the file."""
        self._db.close()
