"""Refusals of `.pt` files: they name what is wrong and never advise to switch the check of code off."""

import os
import re
from pathlib import Path

import pytest
import torch

from models.checkpoint.files import read_pt
from models.errors import CheckpointError


class Attack:
    """Runs a command when it is unpickled without a check."""

    def __init__(self, file: Path):
        self._file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self._file}",)


def test_a_file_with_code_is_refused_without_advice(tmp_path: Path) -> None:
    path, trace = tmp_path / "weights.pt", tmp_path / "trace"
    torch.save({"a": torch.zeros(1), "b": Attack(trace)}, path)
    with pytest.raises(CheckpointError) as caught:
        read_pt(path)
    text = str(caught.value)
    assert re.search(r"expected a state dict saved by torch.save, got a file that may run code \(\w+.system\)", text), (
        text
    )
    assert not trace.exists() and not re.search("weights_only|trusted|Re-running|allowlist|safe_globals", text), text


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"saved by torch.save, got Pytorch.* failed reading"):
        read_pt(path)
