"""When a worker holds so much memory that it is replaced. Pure function of readings; measures nothing itself."""

from worker.memory_limit import MemoryLimit

N_READINGS = 3  # above the limit in a row: a peak is no leak
GB = 10**9


class MemoryWatch:
    """Readings of one process since it became ready. limit: bytes; None: as many as the first reading allows."""

    def __init__(self, limit: int | None):
        self._limit = MemoryLimit(limit)
        self._n_above = 0

    def record(self, n_bytes: int) -> str:
        """Record a reading. Returns: why the process is replaced; empty while it is not."""
        self._n_above = self._n_above + 1 if self._limit.share(n_bytes) > 1 else 0
        if self._n_above < N_READINGS or self._limit.n_bytes is None:
            return ""
        most = self._limit.n_bytes / GB
        return f"holds {n_bytes / GB:.1f} GB of memory, expected at most {most:.1f} GB, and was ended"
