"""The facts that checks read: plain values about this machine.

Imports nothing that may be missing on a broken machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from models.checkpoint.precision import BYTES, Place, Precision


class UnknownFact(Exception):
    """A fact that cannot be collected on this machine; the text is the reason."""


@dataclass(frozen=True)
class Requirement:
    """One dependency. bounds: such as `>=2.10,<2.14`. installed: its version; None if it is not installed."""

    name: str
    bounds: str
    installed: str | None


@dataclass(frozen=True)
class TorchGpu:
    """A GPU that torch lists. total, free: bytes. error: why it cannot be used."""

    name: str
    capability: tuple[int, int]
    total: int
    free: int
    error: str | None = None


@dataclass(frozen=True)
class TorchFacts:
    """The output of `torch_probe`, a process that imports torch.

    Attributes:
        version: None if torch does not import.
        cuda: version that torch was built with; None for a CPU build.
        architectures: of the kernels in torch, such as sm_90.
        driver_cuda: newest CUDA version that the driver supports; None without a driver.
        triton: None if it is not installed.
        triton_required: the version that torch depends on.
        libraries: torchvision, torchaudio and flash-attn, as far as they are installed -> version.
        errors: what failed (torch, inductor, triton, torchvision, cuda) -> first line of the error.
    """

    version: str | None = None
    cuda: str | None = None
    architectures: tuple[str, ...] = ()
    gpus: tuple[TorchGpu, ...] = ()
    driver_cuda: tuple[int, int] | None = None
    triton: str | None = None
    triton_required: str | None = None
    libraries: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ProgramFacts:
    """A program. path: None if it was not found. error: why it does not run."""

    path: str | None
    version: str = ""
    error: str | None = None


@dataclass(frozen=True)
class FolderFacts:
    """A folder to write to.

    Attributes:
        exists: if false, the other fields describe the nearest existing folder above.
        free: bytes on its disk.
        error: why it cannot be written to.
        runs_code: it is not mounted noexec.
    """

    path: Path
    exists: bool
    free: int
    n_files: int = 0
    n_bytes: int = 0
    error: str | None = None
    runs_code: bool = True


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint folder.

    Attributes:
        n_values: numbers in its weights.
        place_values: of them, those that `model.weights` quantises, by place (`models.checkpoint.precision`).
        stored: kind of quantised matrices that the folder declares, such as int8 or awq; empty for none.
        row_values: numbers in one row of context.
        has_side_lane: its model calls functions beside its speech.
        remedy: of the problems, if it is not that of an incomplete folder.
    """

    n_files: int = 0
    n_bytes: int = 0
    n_values: int = 0
    place_values: Mapping[Place, int] = field(default_factory=dict)
    stored: str = ""
    row_values: int = 0
    problems: tuple[str, ...] = ()
    remedy: str = ""
    has_side_lane: bool = False

    def weight_bytes(self, width: int, precision: Precision) -> int:
        """Bytes of the weights in memory. width: bytes of a number that is not quantised."""
        kinds = {place: precision.at(place) for place in self.place_values}
        saved = sum((width - BYTES[kind]) * self.place_values[place] for place, kind in kinds.items() if kind)
        return int(width * self.n_values - saved)


@dataclass(frozen=True)
class MediaFacts:
    """A sound or video file. text: its streams and length. error: why it cannot be used."""

    text: str = ""
    error: str | None = None
