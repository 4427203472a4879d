"""A folder of recorded sessions: a checkpoint, sounds, images, and the recorded calls and results.

    tiny/ (any name)     the checkpoint, with config.json
    inputs/              audio_pool, ref_audio (int16; .npy, or .flac with the same samples), frame_K.png
    TRACE/               input.json, expected.json, tensors.safetensors
    cases/               recorded parts without a session, for `tests.parity`

Files may be the compact forms that `tests.parity.golden` reads.

Reads files. Does not interpret the fields and assumes nothing about names, counts or sizes.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image
from torch import Tensor

from models.inputs.audio_sizes import SAMPLE_RATE
from models.inputs.image import open_image
from tests.parity.golden import GoldenDir

FULL_SCALE = 32768.0


class TraceError(ValueError):
    """A folder or trace that cannot be read; the message names the file or field."""

    def __init__(self, what: object, *, expected: object, got: object):
        super().__init__(f"{what}: expected {expected}, got {got}")


@dataclass(frozen=True)
class Trace:
    """One recorded session. given: `input.json`. expected: `expected.json`. tensors: by name."""

    name: str
    given: dict[str, Any]
    expected: dict[str, Any]
    tensors: dict[str, Tensor]


class TraceFolder:
    """Reads files on first use. Raises: TraceError if a file is missing or invalid."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise TraceError(self.path, expected="a folder with traces", got="no such folder")
        self.golden = GoldenDir(self.path)
        self.names = sorted(file.parent.name for file in self.path.glob("*/input.json"))
        if not self.names:
            raise TraceError(self.path, expected="folders with input.json", got="none")

    @property
    def checkpoint(self) -> Path:
        try:
            return self.golden.checkpoint
        except FileNotFoundError as error:
            raise TraceError(self.path, expected="one folder with config.json", got="none or several") from error

    def trace(self, name: str) -> Trace:
        if name not in self.names:
            raise TraceError(f"trace {name}", expected=f"one of {', '.join(self.names)}", got="no such folder")
        folder = self.path / name
        given, expected = (_json(folder, file) for file in ("input.json", "expected.json"))
        units = len(_field(folder / "input.json", given, "units"))
        recorded = len(_field(folder / "expected.json", expected, "units"))
        if units != recorded:
            raise TraceError(folder / "expected.json", expected=f"{units} units, as in input.json", got=recorded)
        tensors = GoldenDir(folder).tensors("tensors")
        if not tensors:
            raise TraceError(folder, expected="tensors.safetensors with tensors", got="none")
        return Trace(name, given, expected, tensors)

    def sound(self, about: dict[str, Any] | None) -> np.ndarray | None:
        """[n] float32: concatenated pieces of the pool, cut to the requested samples."""
        if about is None:
            return None
        pool, indices = self._pool, about["pool"]
        if not all(0 <= index < len(pool) for index in indices):
            raise TraceError("audio.pool", expected=f"indices below {len(pool)}", got=indices)
        return np.concatenate([pool[index] for index in indices])[: about.get("samples")]

    @cached_property
    def _pool(self) -> np.ndarray:
        """[n, 16000] float32: pieces of one second."""
        return self._samples("audio_pool").reshape(-1, SAMPLE_RATE)

    @cached_property
    def reference_sound(self) -> np.ndarray:
        """[n] float32."""
        return self._samples("ref_audio")

    def frame(self, number: int) -> Image.Image:
        file = self._file(f"inputs/frame_{number}.png")
        return open_image(file.read_bytes())

    def _samples(self, name: str) -> np.ndarray:
        small = self.path / "inputs" / f"{name}.flac"
        if small.is_file():
            samples, _ = soundfile.read(small, dtype="int16")
        else:
            samples = np.load(self._file(f"inputs/{name}.npy"))
        return samples.astype(np.float32) / FULL_SCALE

    def _file(self, name: str) -> Path:
        file = self.path / name
        if not file.is_file():
            raise TraceError(file, expected="a file", got="none")
        return file


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        held = GoldenDir(folder).json(name)
    except json.JSONDecodeError as error:
        raise TraceError(folder / name, expected="JSON", got=str(error)) from error
    if not isinstance(held, dict):
        raise TraceError(folder / name, expected="an object", got="no file" if held is None else type(held).__name__)
    return held


def _field(file: Path, held: dict[str, Any], name: str) -> Any:
    if name not in held:
        raise TraceError(file, expected=f"a field {name}", got=", ".join(held) or "none")
    return held[name]
