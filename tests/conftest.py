"""Settings every test runs under: threads, hypothesis profile, what to skip without a GPU."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from models.load import load_model
from models.omni import OmniModel

# The tiny model gains nothing from more, and two threads on a busy machine wait for each other.
torch.set_num_threads(1)

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=40,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")


# Files that take minutes and cannot be shared out: begun last, they would have one core run while the others are idle.
LONG = ("test_worker_life.py", "test_compile_equivalence.py", "test_vocoder_graphs.py", "test_tuning.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root folder."""
    return Path(__file__).parent.parent


@pytest.fixture(scope="session")
def tiny(root: Path) -> Path:
    """The embedded checkpoint."""
    return root / "assets" / "tiny"


@pytest.fixture(scope="session")
def tiny_model(tiny: Path) -> OmniModel:
    """The embedded checkpoint's model, float32 on the CPU. All tests share it: nobody changes its weights."""
    return load_model(tiny, device="cpu")
