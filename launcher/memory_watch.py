"""When a worker holds so much memory that it is replaced. Pure function of readings; measures nothing itself."""

GROWTH, ROOM = 2, 4 * 2**30  # without a setting: so many times what it held when it became ready, and so many bytes
N_READINGS = 3  # above the limit in a row: a peak is no leak
GB = 10**9


class MemoryWatch:
    """Readings of one process since it became ready. limit: bytes; None: as many as the first reading allows."""

    def __init__(self, limit: int | None):
        self._limit = limit
        self._n_above = 0

    def record(self, n_bytes: int) -> str:
        """Record a reading. Returns: why the process is replaced; empty while it is not."""
        if self._limit is None:
            self._limit = GROWTH * n_bytes + ROOM
        self._n_above = self._n_above + 1 if n_bytes > self._limit else 0
        if self._n_above < N_READINGS:
            return ""
        return f"holds {n_bytes / GB:.1f} GB of memory, expected at most {self._limit / GB:.1f} GB, and was ended"
