"""A program in which faults can be caused: `python -m benchmarks.chaos.injected FOLDER MODULE ARGUMENTS`.

FOLDER/PID.json asks for a fault: {"fault": "memory", "bytes": N}, {"fault": "clock", "seconds": S} or
{"fault": "device", "calls": N}. The time at which it was caused, monotonic s, is in FOLDER/PID.done.
"""

import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_S = 0.02
STEP_BYTES = 100 * 2**20
REGION = "unit_step"  # a token of a unit, after its prefill
DEVICE_ERROR = "CUDA error: an illegal memory access was encountered (injected)"

held: list[bytes] = []
offset_s = 0.0  # added to the wall clock


def shift_clock() -> None:
    """Let `time.time` follow `offset_s`. `datetime.now` is not changed."""
    true_time = time.time
    time.time = lambda: true_time() + offset_s


def hold_memory(n_bytes: int) -> None:
    """Allocate and keep so many more bytes."""
    while n_bytes > 0:
        held.append(b"x" * STEP_BYTES)
        n_bytes -= STEP_BYTES


def jump(seconds: float) -> None:
    """Set the wall clock forward, or back."""
    global offset_s
    offset_s += seconds


def break_device(n_calls: int) -> None:
    """Let the next calls of regions raise, from the middle of a unit on. n_calls: how many; 0: all from then on."""
    import torch

    from models.graphs.region_graphs import RegionTable

    run, left = RegionTable.__call__, [n_calls or sys.maxsize]
    is_broken = threading.Event()

    def call(self: RegionTable, name: str, *given: Any, **static: Any) -> Any:
        if left[0] > 0 and (is_broken.is_set() or name == REGION):
            is_broken.set()
            left[0] -= 1
            raise torch.AcceleratorError(DEVICE_ERROR)
        return run(self, name, *given, **static)

    def synchronize(*_: object) -> None:
        if left[0] > 0 and is_broken.is_set():
            raise torch.AcceleratorError(DEVICE_ERROR)

    RegionTable.__call__ = call
    torch.cuda.synchronize = torch.cpu.synchronize = synchronize


FAULTS: dict[str, Callable[..., None]] = {
    "memory": lambda bytes: hold_memory(bytes),
    "clock": lambda seconds: jump(seconds),
    "device": lambda calls: break_device(calls),
}


def watch(folder: Path) -> None:
    """Cause the faults that are asked for, until the process ends."""
    asked, done = folder / f"{os.getpid()}.json", folder / f"{os.getpid()}.done"
    while True:
        time.sleep(POLL_S)
        if not asked.exists():
            continue
        request = json.loads(asked.read_text())
        asked.unlink()
        done.with_suffix(".new").write_text(str(time.monotonic()))
        done.with_suffix(".new").replace(done)
        FAULTS[request.pop("fault")](**request)


def main() -> None:
    folder, module, *arguments = sys.argv[1:]
    shift_clock()
    threading.Thread(target=watch, args=(Path(folder),), name="faults", daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
