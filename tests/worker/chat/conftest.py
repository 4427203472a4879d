"""Recorded sentences for half-duplex conversations."""

from pathlib import Path

import numpy as np
import pytest

from tests.worker.chat.half_duplex_driver import load


@pytest.fixture(scope="module")
def greeting(root: Path) -> np.ndarray:
    return load(root, "greeting")


@pytest.fixture(scope="module")
def question(root: Path) -> np.ndarray:
    return load(root, "question")
