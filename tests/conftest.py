"""Settings every test runs under: threads, hypothesis profile, what to skip without a GPU."""

import gc
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from models.load import load_model
from models.omni import OmniModel
from tests.models.kernels.interpreter import let_loops_end, patch_once

# Nothing that is imported to collect tests is garbage: looking for some there, over and over, takes nearly half the
# time.
gc.disable()
# Inductor tries out each vector unit of the processor with the C++ compiler, ten times in each new cache folder. What
# the processor says of itself is enough here; processes that tests start inherit this.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Without a GPU, kernels run in Triton's interpreter, which has to be said before they are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton") is not None:
        let_loops_end()
        patch_once()
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


# Files that take longest, and cannot be shared out, longest first: begun last, they would have one core run while the
# others are idle. xdist keeps to this order with --no-loadscope-reorder; by itself it begins with those of many tests.
LONG = (
    *("test_worker_life.py", "test_compile_equivalence.py", "test_page_life.py", "test_worker_session.py"),
    *("test_graphs.py", "test_tuning.py", "test_vocoder_graphs.py", "test_soak.py", "test_faults.py", "test_traces.py"),
    *("test_worker_bad_input.py", "test_cli.py", "test_offline.py", "test_code_stream.py", "test_fixes_windows.py"),
    *("test_fused.py", "test_compile_cache.py", "test_precompile.py", "test_warmup.py", "test_tuning_kernels.py"),
    "test_worker_options.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Asked for tests that run alone, files without any are not imported: all of them take a while."""
    if config.option.markexpr != "alone" or not collection_path.name.startswith("test_"):
        return None
    return "mark.alone" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What was collected stays to the end: collections in tests, and such that tests ask for, do not go through it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Or what extensions hold is told as leaked."""
    gc.unfreeze()


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
