"""How busy the GPU, the process and one of its threads are over a stretch of time.

The GPU's figure is NVML's utilisation: the part of its last sample period (a sixth of a second to a second) in which a
kernel ran, whatever share of the chip it filled. Knows NVML's C functions. Does not know what runs.
"""

import ctypes
import threading
import time
from typing import Any

import torch

EVERY_S = 0.1
SOURCE = "NVML utilisation, every 100 ms"


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Nvml:
    """The first visible GPU. Raises: OSError where there is no NVML, or it does not answer."""

    def __init__(self, device: torch.device):
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))

    def utilisation(self) -> int:
        value = _Utilisation()
        self._call("nvmlDeviceGetUtilizationRates", self._handle, ctypes.byref(value))
        return value.gpu

    def watts(self) -> float:
        value = ctypes.c_uint()
        self._call("nvmlDeviceGetPowerUsage", self._handle, ctypes.byref(value))
        return value.value / 1000

    def clock_mhz(self) -> int:
        value = ctypes.c_uint()
        self._call("nvmlDeviceGetClockInfo", self._handle, 1, ctypes.byref(value))  # 1: of the multiprocessors
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise OSError(f"{name}: NVML status {status}")


class Busy:
    """`with Busy(device, thread) as busy:` measures what is inside; `busy.report()` afterwards.

    thread: whose share of a core is told apart.
    """

    def __init__(self, device: torch.device, thread: threading.Thread | None = None):
        self._thread, self._samples, self._is_over = thread, list[tuple[int, float, int]](), threading.Event()
        self._nvml: _Nvml | None = None
        self._problem = "no GPU"
        if device.type == "cuda":
            try:
                self._nvml = _Nvml(device)
            except (OSError, AttributeError, ctypes.ArgumentError) as error:
                self._problem = f"no NVML: {error}"

    def __enter__(self) -> "Busy":
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._begin = self._clocks()
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end = self._clocks()
        self._is_over.set()
        self._sampler.join()

    def report(self) -> dict[str, Any]:
        """Per cent: of the GPU, of one core for the process and for the thread; None where it is not known."""
        wall, process, thread = (after - before for before, after in zip(self._begin, self._end, strict=True))
        known = bool(self._samples)
        columns = list(zip(*self._samples, strict=True)) if known else []
        return {
            "gpu_percent": sum(columns[0]) / len(columns[0]) if known else None,
            "gpu_source": SOURCE if known else self._problem,
            "watts": sum(columns[1]) / len(columns[1]) if known else None,
            "clock_mhz_least": min(columns[2]) if known else None,
            "process_core_percent": 100 * process / wall,
            "engine_thread_percent": 100 * thread / wall if self._thread is not None else None,
            "wall_s": wall,
        }

    def _clocks(self) -> tuple[float, float, float]:
        thread = 0.0
        if self._thread is not None and self._thread.ident is not None:
            thread = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
        return time.monotonic(), time.process_time(), thread

    def _sample(self) -> None:
        while self._nvml is not None and not self._is_over.wait(EVERY_S):
            try:
                self._samples.append((self._nvml.utilisation(), self._nvml.watts(), self._nvml.clock_mhz()))
            except OSError as error:
                self._problem = str(error)
                return
