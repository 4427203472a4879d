"""Prints facts about torch, its libraries and the GPUs as JSON: `python -m worker.doctor.torch_probe`.

It runs as a separate process, because importing torch on a broken machine may fail, hang or crash. It collects facts;
the checks judge them.
"""

import ctypes
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Callable
from typing import Any

from worker.log import first_line
from worker.version import package_version

LIBRARIES = ("torchvision", "torchaudio", "flash-attn")


def probe() -> dict[str, Any]:
    """The fields of `worker.doctor.facts.TorchFacts` as plain JSON values."""
    errors: dict[str, str] = {}
    libraries = {name: version for name in LIBRARIES if (version := package_version(name))}
    facts: dict[str, Any] = {"errors": errors, "driver_cuda": _driver_cuda(), "libraries": libraries}
    torch = _attempt("torch", lambda: __import__("torch"), errors)
    if torch is None:
        return facts
    facts.update(version=str(torch.__version__), cuda=torch.version.cuda, triton_required=_triton_required())
    if importlib.util.find_spec("triton"):
        triton = _attempt("triton", lambda: __import__("triton"), errors)
        facts["triton"] = str(triton.__version__) if triton else None
    if importlib.util.find_spec("torchvision"):
        _attempt("torchvision", lambda: __import__("torchvision"), errors)
    _attempt("inductor", _import_inductor, errors)
    if torch.version.cuda:
        gpus = _attempt("cuda", lambda: [_gpu(torch, index) for index in range(torch.cuda.device_count())], errors)
        facts.update(gpus=gpus or [], architectures=torch.cuda.get_arch_list())
        if not gpus and "cuda" not in errors:
            _attempt("cuda", torch.cuda.init, errors)
    return facts


def _triton_required() -> str | None:
    """The version that the installed torch depends on."""
    for line in importlib.metadata.requires("torch") or []:
        if found := re.match(r"triton\s*==\s*([0-9.]+)", line):
            return found[1]
    return None


def _import_inductor() -> object:
    # A triton that does not fit torch fails in the kernel templates.
    import torch._inductor.compile_fx
    import torch._inductor.kernel.mm

    return torch._inductor


def _gpu(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    gpu = {"name": properties.name, "capability": [properties.major, properties.minor], "total": 0, "free": 0}
    gpu["total"] = properties.total_memory
    try:
        gpu["free"], gpu["total"] = torch.cuda.mem_get_info(index)
        torch.zeros(1, device=f"cuda:{index}").add_(1).cpu()
    except Exception as error:
        gpu["error"] = first_line(error)
    return gpu


def _driver_cuda() -> list[int] | None:
    """Major and minor number of the newest CUDA version that the driver supports; None without a driver."""
    try:
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return [version.value // 1000, version.value % 1000 // 10]


def _attempt(what: str, action: Callable[[], Any], errors: dict[str, str]) -> Any:
    try:
        return action()
    except BaseException as error:
        errors[what] = first_line(error)
        return None


if __name__ == "__main__":
    print(json.dumps(probe()))
