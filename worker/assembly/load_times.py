"""How long a checkpoint's weights took from their files to the device. Torch-free."""

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class Loading:
    """n_bytes: of the folder's tensors, as the files hold them. seconds: until every weight was where it runs.

    On a CPU a weight of the right type stays mapped to its file, and is read when it is used first.
    """

    n_bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """What a disk's rate is held against; files that the system still has in memory are quicker than any disk."""
        return self.n_bytes / GB / self.seconds

    def __str__(self) -> str:
        return f"weights: {self.n_bytes / GB:.3g} GB in {self.seconds:.2f} s, {self.gb_per_s:.3g} GB/s"
