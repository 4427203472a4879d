"""A golden directory: tensors and manifest by file stem, and the checkpoint they were made with.

Knows the file format only. What a tensor means is the stages' business.
"""

import json
import shutil
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


class GoldenDir:
    """Read access to one golden directory; nothing about dims, seeds or case names is assumed."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        manifest = self.path / "manifest.json"
        self.manifest: dict[str, Any] = json.loads(manifest.read_text()) if manifest.exists() else {}

    def stems(self, prefix: str = "") -> list[str]:
        return sorted(p.stem for p in self.path.glob("*.safetensors") if p.stem.startswith(prefix))

    def tensors(self, stem: str) -> dict[str, torch.Tensor]:
        """All tensors of a file; none if there is no such file."""
        file = self.path / f"{stem}.safetensors"
        return load_file(file) if file.exists() else {}

    def config(self, stem: str) -> dict[str, Any]:
        """The settings in the file's own header (`config`, JSON); empty if it has none."""
        with safe_open(self.path / f"{stem}.safetensors", framework="pt") as file:
            return json.loads((file.metadata() or {}).get("config", "{}"))

    def meta(self, stem: str) -> dict[str, Any]:
        return self.manifest.get(stem, {}).get("meta") or {}

    def json(self, name: str) -> Any | None:
        file = self.path / name
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    @cached_property
    def checkpoint(self) -> Path:
        """The checkpoint folder; where rows of tables were trimmed, a completed copy of it.

        Rows that were trimmed become zero, or what the table's entry says, so that the strict loader sees a full
        checkpoint.
        """
        if not self._trimmed:
            return self._checkpoint_folder
        self._scratch = tempfile.TemporaryDirectory(prefix="golden-")
        full = Path(self._scratch.name)
        for file in self._checkpoint_folder.iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, full / file.name)
        tensors = load_file(self._checkpoint_folder / "model.safetensors")
        for name, table in self._trimmed.items():
            whole = torch.full((table["rows"], *tensors[name].shape[1:]), table.get("fill", 0.0))
            whole[table["kept"]] = tensors[name]
            tensors[name] = whole
        save_file(tensors, full / "model.safetensors")
        return full

    def kept_rows(self, table: str) -> list[int] | slice:
        """Rows of a table that the stored checkpoint has: of an output head, the columns whose logits mean anything."""
        return self._trimmed[table]["kept"] if table in self._trimmed else slice(None)

    @cached_property
    def _checkpoint_folder(self) -> Path:
        folders = [p.parent for p in sorted(self.path.glob("*/config.json"))]
        if len(folders) != 1:
            found = [str(folder) for folder in folders]
            raise FileNotFoundError(f"{self.path}: expected one folder with config.json, got {found}")
        return folders[0]

    @cached_property
    def _trimmed(self) -> dict[str, Any]:
        """By table, how many rows it has, which ones are stored, and what to put in place of the others."""
        file = self._checkpoint_folder / "trimmed.json"
        return json.loads(file.read_text()) if file.exists() else {}
