"""How much memory a worker's process may hold before its launcher replaces it. Torch-free; measures nothing itself."""

GROWTH, ROOM = 2, 4 * 2**30  # without a setting: this multiple of what it held when it became ready, plus so many bytes


class MemoryLimit:
    """The limit of one process. n_bytes: None: as many as its first reading, once it is ready, allows."""

    def __init__(self, n_bytes: int | None):
        self.n_bytes = n_bytes

    def share(self, n_bytes: int) -> float:
        """A reading as a share of the limit."""
        if self.n_bytes is None:
            self.n_bytes = GROWTH * n_bytes + ROOM
        return n_bytes / self.n_bytes
