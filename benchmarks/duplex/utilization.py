"""Utilisation of the GPU, the process and one of its threads over a time span.

The GPU figure is NVML's utilisation: the fraction of the last sample period (1/6 s to 1 s) in which a kernel ran,
regardless of how much of the chip the kernel filled. Contains the NVML calls. Does not contain the measured work.
"""

import ctypes
import threading
import time
from typing import Any

import torch

SAMPLE_INTERVAL_S = 0.1
SOURCE = "NVML utilisation, every 100 ms"


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Nvml:
    """NVML readings of one GPU. Raises: OSError if NVML is missing or a call fails."""

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
        self._call("nvmlDeviceGetClockInfo", self._handle, 1, ctypes.byref(value))  # 1: clock of the multiprocessors
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise OSError(f"{name}: NVML status {status}")


class UtilizationMeter:
    """Measures the body of a `with` statement; call `report()` afterwards.

    thread: its share of a core is reported separately.
    """

    def __init__(self, device: torch.device, thread: threading.Thread | None = None):
        self._thread, self._samples, self._stop = thread, list[tuple[int, float, int]](), threading.Event()
        self._nvml: _Nvml | None = None
        self._unavailable = "no GPU"
        if device.type == "cuda":
            try:
                self._nvml = _Nvml(device)
            except (OSError, AttributeError, ctypes.ArgumentError) as error:
                self._unavailable = f"no NVML: {error}"

    def __enter__(self) -> "UtilizationMeter":
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._begin = self._clocks()
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end = self._clocks()
        self._stop.set()
        self._sampler.join()

    def report(self) -> dict[str, Any]:
        """Per cent of the GPU, and of one core for the process and for the thread; None if unknown."""
        wall, process, thread = (after - before for before, after in zip(self._begin, self._end, strict=True))
        has_samples = bool(self._samples)
        columns = list(zip(*self._samples, strict=True)) if has_samples else []
        return {
            "gpu_percent": sum(columns[0]) / len(columns[0]) if has_samples else None,
            "gpu_source": SOURCE if has_samples else self._unavailable,
            "watts": sum(columns[1]) / len(columns[1]) if has_samples else None,
            "clock_mhz_least": min(columns[2]) if has_samples else None,
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
        while self._nvml is not None and not self._stop.wait(SAMPLE_INTERVAL_S):
            try:
                self._samples.append((self._nvml.utilisation(), self._nvml.watts(), self._nvml.clock_mhz()))
            except OSError as error:
                self._unavailable = str(error)
                return
