"""Backend flags: the process's settings of TF32, cuDNN and attention kernels, and the choice of the project's kernels.

They apply to a GPU. On a CPU none of them changes, so that float32 results stay bit-identical.
"""

import logging
import os

import torch

from models.graphs.kernel_support import supports_kernels
from worker.config.compile import CompileConfig
from worker.config.session import EngineConfig

LOG = logging.getLogger(__name__)

# attention -> PyTorch's kernels that are enabled: flash, memory-efficient, cuDNN, math. Most calls have a mask, which
# flash does not support, so math stays enabled with it: a call without a kernel fails.
KERNELS = {
    "sdpa": (True, True, True, True),
    "flash": (True, False, False, True),
    "eager": (False, False, False, True),
}


def apply_backend_flags(config: CompileConfig, device: torch.device) -> dict[str, str | bool]:
    """Set the process's flags for a model on `device`. Call it before tracing, because graphs depend on the flags.

    A model that is not compiled keeps PyTorch's defaults but for the flags that the settings name.

    Returns: setting -> value in force; `not on a CPU` for a model on a CPU.
    """
    in_force: dict[str, str | bool] = dict.fromkeys(("tf32", "cudnn_benchmark", "attention"), "not on a CPU")
    if device.type == "cuda":
        is_default = {name for name in in_force if name not in config.model_fields_set}
        kept = is_default if not config.enabled_on(device.type) else set()
        if "tf32" not in kept:
            torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = config.tf32
        if "cudnn_benchmark" not in kept:
            torch.backends.cudnn.benchmark = config.cudnn_benchmark
        if config.attention != "auto":  # auto leaves PyTorch's choice, and flags that the caller has set
            _allow(*KERNELS[config.attention])
        in_force = {
            "tf32": torch.get_float32_matmul_precision() != "highest",
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "attention": f"{config.attention} ({_allowed()})",
        }
    LOG.info("backend flags: %s", ", ".join(f"{name} {value}" for name, value in in_force.items()))
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


def uses_kernels(config: CompileConfig, device: torch.device) -> bool:
    """Whether the project's own kernels run the layers of a model on `device`."""
    return config.enabled_on(device.type) and config.allows_kernels and supports_kernels(device)


def limit_threads(device_type: str) -> None:
    """Limit torch to half of the cores, and to one thread beside a GPU, unless OMP_NUM_THREADS is set.

    The threads of one matrix product wait for each other, and stall when another thread takes the core of one of them.
    Beside a GPU they copy inputs, and the engine's thread would wait for them: with 32 clients on one H200 the model
    took 201 ms to a first sound with eight threads, 174 with one. CPU kernels are compiled for a number of threads, so
    every program that compiles calls this first.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2) if device_type == "cpu" else 1)


def reset_backend_flags() -> None:
    """Restore PyTorch's defaults, before another model is loaded."""
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
        "math": backend.math_sdp_enabled(),
    }
    return ", ".join(name for name, is_on in kernels.items() if is_on)
