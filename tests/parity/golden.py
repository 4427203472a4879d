"""A golden directory: tensors and manifest by file stem, and the checkpoint that produced them.

Knows the file formats only, each of which may be the plain one or a smaller one of the same content: `.packed` for
`.safetensors`, `.json.xz` for `.json`. The stages define the meaning of the tensors.
"""

import json
import lzma
import shutil
import tempfile
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.parity.packed import SUFFIX as PACKED
from tests.parity.packed import load_packed

PLAIN, XZ = ".safetensors", ".xz"
WEIGHTS = "model"  # stem of a checkpoint's weights


class GoldenDir:
    """Read access to one golden directory. Sizes, seeds and case names come from the files."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        manifest = self.path / "manifest.json"
        self._models: dict[str, Path] = {}
        self._scratch: list[tempfile.TemporaryDirectory[str]] = []
        self.manifest: dict[str, Any] = json.loads(manifest.read_text()) if manifest.exists() else {}

    def stems(self, prefix: str = "") -> list[str]:
        files = (file for suffix in (PLAIN, PACKED) for file in self.path.glob(f"{prefix}*{suffix}"))
        return sorted({file.stem for file in files})

    def tensors(self, stem: str) -> dict[str, torch.Tensor]:
        """All tensors of a file, with trimmed tables completed; empty if the file does not exist."""
        tensors, header = read_tensors(self.path, stem)
        return completed(tensors, json.loads(header.get("trimmed", "{}")))

    def config(self, stem: str) -> dict[str, Any]:
        """The settings in the file's own header (`config`, JSON); empty if it has none."""
        _, header = read_tensors(self.path, stem)
        return json.loads(header.get("config", "{}"))

    def meta(self, stem: str) -> dict[str, Any]:
        return self.manifest.get(stem, {}).get("meta") or {}

    def json(self, name: str) -> Any | None:
        plain, small = self.path / name, self.path / f"{name}{XZ}"
        if plain.exists():
            return json.loads(plain.read_text(encoding="utf-8"))
        return json.loads(lzma.decompress(small.read_bytes())) if small.exists() else None

    @cached_property
    def checkpoint(self) -> Path:
        """The checkpoint folder, or a completed copy if tables were trimmed or files are packed."""
        return self.model(self._checkpoint_folder.name)

    def model(self, name: str) -> Path:
        """One of several checkpoint folders, or a completed copy; as `checkpoint`."""
        if name not in self._models:
            self._models[name] = self._complete(self.path / name)
        return self._models[name]

    def _complete(self, folder: Path) -> Path:
        trimmed = trimmed_tables(folder)
        if not trimmed and not any(file.suffix in (PACKED, XZ) for file in folder.iterdir()):
            return folder
        self._scratch.append(tempfile.TemporaryDirectory(prefix="golden-"))
        full = Path(self._scratch[-1].name)
        for file in folder.iterdir():
            if file.suffix == XZ:
                (full / file.stem).write_bytes(lzma.decompress(file.read_bytes()))
            elif file.suffix not in (PLAIN, PACKED):
                shutil.copy(file, full / file.name)
        tensors, _ = read_tensors(folder, WEIGHTS)
        if not tensors:
            raise FileNotFoundError(f"{folder}: expected {WEIGHTS}{PLAIN} or {WEIGHTS}{PACKED}, got neither")
        save_file(completed(tensors, trimmed), full / f"{WEIGHTS}{PLAIN}")
        return full

    def kept_rows(self, table: str, model: str | None = None) -> list[int] | slice:
        """Rows of a table that the stored checkpoint has; for an output head, the columns with valid logits.

        model: as for `model`; None = the only checkpoint.
        """
        trimmed = trimmed_tables(self._checkpoint_folder if model is None else self.path / model)
        return trimmed[table]["kept"] if table in trimmed else slice(None)

    @cached_property
    def _checkpoint_folder(self) -> Path:
        folders = [p.parent for p in sorted(self.path.glob("*/config.json"))]
        if len(folders) != 1:
            found = [str(folder) for folder in folders]
            raise FileNotFoundError(f"{self.path}: expected one folder with config.json, got {found}")
        return folders[0]


def trimmed_tables(folder: Path) -> dict[str, Any]:
    """By table of a checkpoint: its number of rows, the stored rows, and the fill value of the others."""
    file = folder / "trimmed.json"
    return json.loads(file.read_text()) if file.exists() else {}


def read_tensors(folder: Path, stem: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Stored tensors of a file and its header; empty if the file does not exist."""
    plain, packed = folder / f"{stem}{PLAIN}", folder / f"{stem}{PACKED}"
    if plain.exists():
        with safe_open(plain, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    if not packed.exists():
        return {}, {}
    tensors, header = unpacked(packed, packed.stat().st_mtime_ns)
    return {name: tensor.clone() for name, tensor in tensors.items()}, dict(header)


@cache
def unpacked(file: Path, _changed: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and header of a packed file, not to be changed: decompression takes longer than most comparisons."""
    return load_packed(file)


def completed(tensors: dict[str, torch.Tensor], trimmed: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same tensors with complete tables instead of trimmed ones, so that a strict loader finds all rows.

    trimmed: by table, how many `rows` it has, which ones are `kept`, and what to `fill` the others with, 0 if not said.
    """
    whole = dict(tensors)
    for name, table in trimmed.items():
        whole[name] = torch.full((table["rows"], *tensors[name].shape[1:]), table.get("fill", 0.0))
        whole[name][table["kept"]] = tensors[name]
    return whole
