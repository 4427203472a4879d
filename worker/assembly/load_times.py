"""Time to load a checkpoint's weights from files to the device. Torch-free."""

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class Loading:
    """Size and duration of one load.

    Attributes:
        n_bytes: bytes of the folder's tensors, as stored in the files.
        seconds: time until every weight was on its device. On a CPU a weight of the right type stays mapped to its
            file and is read on first use.
    """

    n_bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """Loading rate, to compare with that of the disk; files in the page cache load faster than from any disk."""
        return self.n_bytes / GB / self.seconds

    def __str__(self) -> str:
        return f"weights: {self.n_bytes / GB:.3g} GB in {self.seconds:.2f} s, {self.gb_per_s:.3g} GB/s"
