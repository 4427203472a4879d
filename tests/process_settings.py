"""pytest plugin of the processes that run tests: threads, memory, hypothesis profile, the embedded checkpoint."""

import ctypes
import logging
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from models.load import load_model
from models.omni import OmniModel
from tests.models.kernels.interpreter import (
    keep_types,
    let_loops_end,
    multiply_bfloat16,
    patch_once,
    skip_unused_checks,
)

# Inductor probes each vector instruction set with the C++ compiler, ten times in each new cache folder. The processor's
# own flags are enough for tests. Child processes inherit the variable.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Inductor's pool of compiling processes imports torch once more in each process that compiles.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Tracing with symbolic sizes spends a fifth of its time on keys of a cache that it rarely hits, and more on assumptions
# that sympy's cache of 1,000 entries has dropped. Child processes inherit both variables.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
os.environ.setdefault("SYMPY_CACHE_SIZE", "20000")
# Without a GPU, kernels run in Triton's interpreter. The variable must be set before the kernels are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton") is not None:
        let_loops_end()
        multiply_bfloat16()
        patch_once()
        skip_unused_checks()
        keep_types()
# pytest adds its handlers to loggers that do not propagate, and the compiler describes each graph to such a handler.
logging.getLogger("torch.__trace").propagate = True
# The tiny model is too small for more threads, and threads of parallel test processes block each other.
torch.set_num_threads(1)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Let the C library keep freed memory, also of large tensors, for the next allocation.

    glibc returns it to the system, which clears each page again: most of the system's share of the CPU time. Child
    processes are not affected, so their memory may be measured.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            library.mallopt(parameter, KEPT_BYTES)


keep_freed_memory()

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=40,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")


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
    """The embedded checkpoint's model, float32 on the CPU, shared by all tests. Its weights must not be changed."""
    return load_model(tiny, device="cpu")
