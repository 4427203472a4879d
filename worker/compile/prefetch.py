"""Compile prefetch: loads compilers and their processes early, and builds kernels of several targets at once.

Failures are ignored: what is missing later is loaded or built at its first use.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Thread

import torch

from worker.assembly.backend_flags import uses_kernels
from worker.compile.targets import compiles
from worker.config.compile import CompileConfig, Target
from worker.config.service import INDUCTOR_VARIABLE

LOG = logging.getLogger(__name__)
TRITON_VARIABLE = "TRITON_CACHE_DIR"
BINARIES = "*.cubin"  # Triton's files of built kernels


def prefetch_triton(config: CompileConfig, device: torch.device) -> None:
    """Import Triton on a background thread and let it hash its own files, if the project's kernels run on `device`."""

    def load() -> None:
        with suppress(Exception):
            import_module("triton")
            import_module("triton.runtime.cache").triton_key()  # kept; part of every kernel's key

    if uses_kernels(config, device):
        Thread(target=load, name="triton", daemon=True).start()


def prefetch_compiler(config: CompileConfig, device: torch.device) -> None:
    """Import torch's compiler and start its worker processes, if anything compiles on `device`.

    This takes seconds. Without Triton the compiler has no worker processes.
    """
    by_kernels = config.targets if uses_kernels(config, device) else ()
    if not (
        config.enabled_on(device.type) and compiles(config.targets, is_gpu=device.type == "cuda", by_kernels=by_kernels)
    ):
        return
    with suppress(Exception):
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


def wait_for_compiler() -> None:
    """Wait for the compiler's worker processes; before they run, it compiles kernels one by one in this process."""
    with suppress(Exception):
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wait_pool_ready()


def set_triton_folder(device: torch.device) -> bool:
    """Make Triton store kernels in Inductor's folder, so that one folder has all of them.

    Returns: whether the folder has no kernels; if false, some may still be missing.
    """
    if TRITON_VARIABLE not in os.environ:
        os.environ[TRITON_VARIABLE] = str(_inductor_folder() / "triton" / str(device.index or 0))
    folder = os.environ[TRITON_VARIABLE]
    return next(Path(folder).rglob(BINARIES), None) is None


def _inductor_folder() -> Path:
    if folder := os.environ.get(INDUCTOR_VARIABLE):  # without importing the compiler
        return Path(folder).absolute()
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def build_kernels(device: torch.device, calls: Mapping[Target, Sequence[Callable[[], None]]]) -> None:
    """Run every target's calls, each target on its own thread and stream.

    A kernel is built at its first use, mostly outside the interpreter's lock, so that targets build in parallel. An
    error ends its target's calls; the later warm-up raises it again.
    """

    def run(target: Target) -> None:
        start = time.perf_counter()
        try:
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                for call in calls[target]:
                    call()
        except Exception as error:
            LOG.info("kernels of %s ahead of time: %s", target, error)
        else:
            LOG.info("kernels of %s: ready after %.1f s", target, time.perf_counter() - start)

    torch.cuda.synchronize(device)
    with ThreadPoolExecutor(max(len(calls), 1), "kernels") as threads:
        list(threads.map(run, calls))
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
