"""What checks look at: facts about this machine, as plain values.

Imports nothing that may be missing on a broken machine.
"""

from dataclasses import dataclass, field
from pathlib import Path


class NotKnown(Exception):
    """A fact that cannot be had here; the text says why."""


@dataclass(frozen=True)
class Requirement:
    """One dependency. bounds: as `>=2.10,<2.14`. installed: its version, None if it is not there."""

    name: str
    bounds: str
    installed: str | None


@dataclass(frozen=True)
class TorchGpu:
    """A GPU that torch sees. total, free: bytes. error: why it cannot be used."""

    name: str
    capability: tuple[int, int]
    total: int
    free: int
    error: str | None = None


@dataclass(frozen=True)
class TorchFacts:
    """What a process of its own said that imported torch.

    version: None if it could not. cuda: version that torch was built with, None for a CPU build. architectures: of the
    kernels inside, such as sm_90. driver: CUDA version that the driver goes up to, None without one. triton: None if
    it is not there. triton_wanted: the version torch asks for. errors: what failed (torch, inductor, triton,
    torchvision, cuda) -> the first line of why.
    """

    version: str | None = None
    cuda: str | None = None
    architectures: tuple[str, ...] = ()
    gpus: tuple[TorchGpu, ...] = ()
    driver: tuple[int, int] | None = None
    triton: str | None = None
    triton_wanted: str | None = None
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ProgramFacts:
    """A program that was looked for. path: None if there is none. error: why it does not run."""

    path: str | None
    version: str = ""
    error: str | None = None


@dataclass(frozen=True)
class FolderFacts:
    """A folder to write to. exists: otherwise the rest is about the nearest folder above. free: bytes on its disk."""

    path: Path
    exists: bool
    free: int
    n_files: int = 0
    n_bytes: int = 0
    error: str | None = None  # why nothing can be written
    runs_code: bool = True  # not mounted noexec


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint folder. n_values: numbers in its weights. row_values: numbers that a context row takes."""

    n_files: int = 0
    n_bytes: int = 0
    n_values: int = 0
    row_values: int = 0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class MediaFacts:
    """A sound or video file. text: what it holds. error: why it cannot be used."""

    text: str = ""
    error: str | None = None
