"""What compiling can begin with before it is its turn: libraries and the compiler's processes, and kernels of several
stages at once.

Nothing here has to succeed: what is not there when it is needed is made then.

Knows torch's pool of compiling processes, Triton's folder, regions and stages. Does not know what a target holds.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Thread

import torch

from worker.assembly.backend_flags import wants_kernels
from worker.compile.targets import compiles
from worker.config.compile import CompileConfig
from worker.config.service import INDUCTOR_VARIABLE

LOG = logging.getLogger(__name__)
TRITON_VARIABLE = "TRITON_CACHE_DIR"
LIBRARIES = "*.cubin"  # what Triton keeps of a kernel


def start_triton(config: CompileConfig, device: torch.device) -> None:
    """Load Triton on a thread of its own if the project's kernels are to run on `device`; whoever needs it waits."""

    def load() -> None:
        with suppress(Exception):
            import_module("triton")

    if wants_kernels(config, device):
        Thread(target=load, name="triton", daemon=True).start()


def start_compiler(config: CompileConfig, device: torch.device) -> None:
    """Load torch's compiler and start its processes, which takes seconds, if anything is to be compiled on `device`;
    without Triton it has no processes.
    """
    by_kernels = config.targets if wants_kernels(config, device) else ()
    if not (
        config.enabled_on(device.type) and compiles(config.targets, is_gpu=device.type == "cuda", by_kernels=by_kernels)
    ):
        return
    with suppress(Exception):
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


def await_compiler() -> None:
    """Until then it would compile one kernel after the other, in this process."""
    with suppress(Exception):
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wait_pool_ready()


def keep_kernels(device: torch.device) -> bool:
    """Let Triton keep kernels where Inductor keeps its own, so that one folder holds all of them.

    Returns: whether there are none yet; that there are some does not say that there are all.
    """
    if TRITON_VARIABLE not in os.environ:
        os.environ[TRITON_VARIABLE] = str(_inductor_folder() / "triton" / str(device.index or 0))
    folder = os.environ[TRITON_VARIABLE]
    return next(Path(folder).rglob(LIBRARIES), None) is None


def _inductor_folder() -> Path:
    if folder := os.environ.get(INDUCTOR_VARIABLE):  # no need to load the compiler to be told
        return Path(folder).absolute()
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def rehearse(device: torch.device, stages: Mapping[str, Sequence[Callable[[], None]]]) -> None:
    """Run every stage's calls, each stage on a thread and a stream of its own.

    A kernel is made at its first use, mostly by programs outside this interpreter: one stage waits while others go on.
    What fails ends its stage; it fails again where it has a name.
    """

    def run(stage: str) -> None:
        try:
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                for call in stages[stage]:
                    call()
        except Exception as error:
            LOG.info("kernels of stage %s ahead of time: %s", stage, error)

    torch.cuda.synchronize(device)
    with ThreadPoolExecutor(max(len(stages), 1), "kernels") as threads:
        list(threads.map(run, stages))
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
