"""Copies of golden directories with something wrong or missing in one file."""

import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Edit = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def change(golden: Path, folder: Path, stem: str, edit: Edit) -> Path:
    """`folder`, a copy of the golden directory, made if not there; one file's tensors are as `edit` returns them."""
    if not folder.exists():
        shutil.copytree(golden, folder, ignore=lambda _, names: {"token2wav"} & set(names))
    with safe_open(golden / f"{stem}.safetensors", framework="pt") as file:
        tensors, header = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(edit(tensors), folder / f"{stem}.safetensors", metadata=header)
    return folder


def without(*patterns: str) -> Edit:
    return lambda tensors: {name: t for name, t in tensors.items() if not any(fnmatch(name, p) for p in patterns)}


def moved(name: str, by: float) -> Edit:
    """One value in the middle of a tensor is off: by 1 if it is an integer, else by `by`."""

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        wrong = tensors[name].flatten().clone()
        wrong[len(wrong) // 2] += by if wrong.is_floating_point() else 1
        return tensors | {name: wrong.view(tensors[name].shape)}

    return edit
