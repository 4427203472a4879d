"""What torch says of itself and of the GPUs, as JSON on stdout: `python -m worker.doctor.torch_probe`.

It runs as a process of its own, because importing torch on a broken machine may fail, hang or crash. Knows torch and
the CUDA driver; judges nothing.
"""

import ctypes
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Callable
from typing import Any


def probe() -> dict[str, Any]:
    """`worker.doctor.facts.TorchFacts` as plain JSON values."""
    errors: dict[str, str] = {}
    found: dict[str, Any] = {"errors": errors, "driver": _driver()}
    torch = _attempt("torch", lambda: __import__("torch"), errors)
    if torch is None:
        return found
    found.update(version=str(torch.__version__), cuda=torch.version.cuda, triton_wanted=_triton_wanted())
    if importlib.util.find_spec("triton"):
        triton = _attempt("triton", lambda: __import__("triton"), errors)
        found["triton"] = str(triton.__version__) if triton else None
    if importlib.util.find_spec("torchvision"):
        _attempt("torchvision", lambda: __import__("torchvision"), errors)
    _attempt("inductor", _import_inductor, errors)
    if torch.version.cuda:
        gpus = _attempt("cuda", lambda: [_gpu(torch, index) for index in range(torch.cuda.device_count())], errors)
        found.update(gpus=gpus or [], architectures=torch.cuda.get_arch_list())
        if not gpus and "cuda" not in errors:
            _attempt("cuda", torch.cuda.init, errors)
    return found


def _triton_wanted() -> str | None:
    """The version that the installed torch names as its dependency."""
    for line in importlib.metadata.requires("torch") or []:
        if found := re.match(r"triton\s*==\s*([0-9.]+)", line):
            return found[1]
    return None


def _import_inductor() -> object:
    # Kernel templates are where a triton of another torch shows.
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
        gpu["error"] = _first_line(error)
    return gpu


def _driver() -> list[int] | None:
    """The CUDA version that the driver goes up to."""
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
        errors[what] = _first_line(error)
        return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    print(json.dumps(probe()))
