"""Copies of golden directories with wrong or missing values in one file."""

import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from tests.parity.golden import PLAIN, read_tensors
from tests.parity.packed import SUFFIX as PACKED

OTHER_SETS = {"token2wav", "duplex", "qwen3_tts"}
Edit = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def change(golden: Path, folder: Path, stem: str, edit: Edit) -> Path:
    """Copy the golden directory to `folder`, once, and replace one file's tensors by the result of `edit`."""
    if not folder.exists():
        shutil.copytree(golden, folder, ignore=lambda _, names: OTHER_SETS & set(names))
    tensors, header = read_tensors(golden, stem)
    (folder / f"{stem}{PACKED}").unlink(missing_ok=True)
    save_file(edit(tensors), folder / f"{stem}{PLAIN}", metadata=header)
    return folder


def without(*patterns: str) -> Edit:
    return lambda tensors: {name: t for name, t in tensors.items() if not any(fnmatch(name, p) for p in patterns)}


def moved(name: str, by: float) -> Edit:
    """Change one value in the middle of a tensor: an integer by 1, another by `by`."""

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        wrong = tensors[name].flatten().clone()
        wrong[len(wrong) // 2] += by if wrong.is_floating_point() else 1
        return tensors | {name: wrong.view(tensors[name].shape)}

    return edit
