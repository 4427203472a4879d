"""The switches of speed: TF32, cuDNN's trials and attention kernels of the process, and whether our kernels are wanted.

They concern a GPU. On a CPU none of them is touched: float32 there stays what it was, to the last bit.
"""

import logging
import os

import torch

from models.graphs.kernel_support import supports_kernels
from worker.config.compile import CompileConfig
from worker.config.session import EngineConfig

LOG = logging.getLogger(__name__)

# attention -> which of PyTorch's kernels may be taken: flash, memory-efficient, cuDNN's, plain products. Most of our
# calls carry a mask, which flash does not take, so plain products stay beside it: a call with no kernel left fails.
KERNELS = {
    "sdpa": (True, True, True, True),
    "flash": (True, False, False, True),
    "eager": (False, False, False, True),
}


def apply_backend_flags(config: CompileConfig, device: torch.device) -> dict[str, str | bool]:
    """Set the process's switches for a model on `device`, before anything is traced: graphs depend on them.

    Returns: what is in force, by the setting's name; `not on a CPU` for what does not concern it.
    """
    in_force: dict[str, str | bool] = dict.fromkeys(("tf32", "cudnn_benchmark", "attention"), "not on a CPU")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.tf32
        torch.backends.cudnn.benchmark = config.cudnn_benchmark
        if config.attention != "auto":  # as PyTorch chooses, which leaves what somebody else has set
            _allow(*KERNELS[config.attention])
        in_force = {
            "tf32": config.tf32,
            "cudnn_benchmark": config.cudnn_benchmark,
            "attention": f"{config.attention} ({_allowed()})",
        }
    LOG.info("toggles: %s", ", ".join(f"{name} {value}" for name, value in in_force.items()))
    return in_force


def resolve_compile(config: EngineConfig, device_type: str) -> EngineConfig:
    """`config` with `compile.enabled` true or false; a value of `auto` is replaced, and the choice is logged.

    Args:
        device_type: `cuda` or `cpu`, of the device that the model is loaded on.
    """
    if config.compile.enabled != "auto":
        return config
    compile = config.compile.resolved(device_type)
    LOG.info("service.compile auto: %s on %s", "on" if compile.enabled else "off", device_type)
    return config.model_copy(update={"compile": compile})


def wants_kernels(config: CompileConfig, device: torch.device) -> bool:
    """Whether the project's own kernels are to run the layers of a model on `device`; hundreds of launches that nobody
    captures would be slower than layers that are compiled.
    """
    as_they_come = config.mode == "default" and config.attention == "auto" and config.cuda_graphs != "off"
    return config.enabled_on(device.type) and config.kernels == "auto" and as_they_come and supports_kernels(device)


def limit_threads() -> None:
    """On a CPU, threads that wait for each other's share of a product stall when anything else wants their core: half
    of the cores, unless OMP_NUM_THREADS says otherwise. Kernels are written for a number of threads, so that every
    program that compiles has to call this first.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))


def reset_backend_flags() -> None:
    """As PyTorch comes, for a model that is loaded next."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = True, False
    _allow(True, True, True, True)


def _allow(flash: bool, efficient: bool, cudnn: bool, math: bool) -> None:
    backend = torch.backends.cuda
    backend.enable_flash_sdp(flash)
    backend.enable_mem_efficient_sdp(efficient)
    backend.enable_cudnn_sdp(cudnn)
    backend.enable_math_sdp(math)


def _allowed() -> str:
    backend = torch.backends.cuda
    kernels = {
        "flash": backend.flash_sdp_enabled(),
        "memory-efficient": backend.mem_efficient_sdp_enabled(),
        "cudnn": backend.cudnn_sdp_enabled(),
        "products": backend.math_sdp_enabled(),
    }
    return ", ".join(name for name, is_on in kernels.items() if is_on)
