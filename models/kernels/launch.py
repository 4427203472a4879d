"""How a kernel is launched: after the one before it, or while that still runs, to wait for it on the device.

From its import on, kernels that are made are counted: after warm-up there must be none. Knows devices. Does not know
what kernels compute. Import only where Triton is.
"""

from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from models.graphs.kernel_support import Made

FEW_PROGRAMS = 1024  # of kernels that are over in a few microseconds


def launch_options(device: torch.device, n_programs: int = 0) -> dict[str, bool]:
    """Launch arguments of a kernel that takes PDL, for programmatic dependent launch where the device has it.

    Such a kernel is started while the one before it still runs. It must let `tl.extra.cuda.gdc_wait` return in every
    program before it touches anything but weights: what comes after it counts on all before it being over.

    n_programs: above FEW_PROGRAMS they would sit where the kernel before still works, and there is none.
    """
    if n_programs <= FEW_PROGRAMS and device.type == "cuda" and _may_overlap(device.index):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


# Of what a thread made last: whether Triton had it, and in what folder. Told while it is made, counted behind.
_newest: ContextVar[tuple[bool, str]] = ContextVar("newest", default=(False, ""))


def _note(*, metadata_group: dict[str, str], cache_hit: bool, **_: Any) -> None:
    _newest.set((cache_hit, next((Path(path).parent.name for path in metadata_group.values()), "")))


def _count(*_: Any, **__: Any) -> None:
    Made.one_more(*_newest.get())


triton.knobs.compilation.listener = _note
triton.knobs.runtime.jit_post_compile_hook = _count


@cache
def _may_overlap(index: int) -> bool:
    return not triton.knobs.runtime.interpret and torch.cuda.get_device_capability(index) >= (9, 0)
