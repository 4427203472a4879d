"""Which GPUs workers may have: what CUDA_VISIBLE_DEVICES names, else what the driver's own program lists.

Knows that variable and `nvidia-smi`; imports no torch, and does not know what runs on a GPU.
"""

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from models.errors import SettingsError

GPU_VARIABLE, ORDER_VARIABLE = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
NONE_VISIBLE = ("", "-1", "NoDevFiles")
SMI_S = 30  # a sleeping driver included
MIB = 1 << 20
# What a program prints, or None if it is missing or fails.
Ask = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True)
class DriverGpu:
    """One GPU as the driver lists it. uuid: `GPU-...`; `MIG-...` of a part of one. total, free: bytes, 0: unknown."""

    index: int
    uuid: str
    name: str
    total: int = 0
    free: int = 0


@dataclass(frozen=True)
class Device:
    """What one worker runs on.

    visible: for CUDA_VISIBLE_DEVICES, None on the CPU. gpu: what is known of it. is_listed: `visible` is the driver's
    number for it.
    """

    visible: str | None
    gpu: DriverGpu | None = None
    is_listed: bool = False

    @property
    def label(self) -> str:
        return "CPU" if self.visible is None else f"GPU {self.visible}"

    @property
    def number(self) -> int | None:
        return int(self.visible) if self.visible is not None and self.visible.isdecimal() else None

    @property
    def environ(self) -> dict[str, str]:
        """Variables that make it the only one for a process."""
        if self.visible is None:
            return {}
        # CUDA counts the fastest first unless told to count as the driver does.
        return {GPU_VARIABLE: self.visible, **({ORDER_VARIABLE: "PCI_BUS_ID"} if self.is_listed else {})}


CPU = Device(None)


def find_devices(asked: str, environ: Mapping[str, str], ask: Ask) -> list[Device]:
    """Where workers may run, one each; the CPU alone where there is no GPU.

    asked: `model.device`. Raises: SettingsError for GPUs that are not there.
    """
    if asked == "cpu":
        return [CPU]
    visible = environ.get(GPU_VARIABLE)
    listed = [] if visible is not None and visible.strip() in NONE_VISIBLE else list_gpus(ask)
    is_sure = environ.get(ORDER_VARIABLE) == "PCI_BUS_ID" or len({gpu.name for gpu in listed}) < 2
    names = _numbers(listed) if visible is None else named(visible, listed)
    found = [Device(name, _of(name, listed, is_sure or visible is None), is_listed=visible is None) for name in names]
    kind, _, number = asked.partition(":")
    if number and int(number) >= len(found):
        raise SettingsError(f"model.device {asked}", expected=f"one of {len(found)} visible GPUs", got=int(number))
    if number:
        return [found[int(number)]]
    if not found and kind == "cuda":
        expected = 'a GPU, which nvidia-smi or CUDA_VISIBLE_DEVICES names, or model.device "cpu"'
        raise SettingsError(f"model.device {asked}", expected=expected, got="none")
    return found or [CPU]


def oddity(asked: str, environ: Mapping[str, str], found: Sequence[Device], ask: Ask) -> str | None:
    """What is strange about running on the CPU, if anything: a driver that is there and does not answer."""
    if asked != "auto" or list(found) != [CPU] or GPU_VARIABLE in environ or not shutil.which("nvidia-smi"):
        return None
    said = ask(["nvidia-smi", "-L"])
    if said is None:
        return "nvidia-smi is there and fails (run it to see why), so workers run on the CPU"
    if "UUID" in said:
        return "nvidia-smi lists GPUs and does not tell of them (--query-gpu), so workers run on the CPU"
    return None


def named(visible: str, listed: Sequence[DriverGpu]) -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES. CUDA stops reading at the first one it does not know, without a word.

    Raises: SettingsError for one that is not a GPU here, and for one that is there twice.
    """
    if visible.strip() in NONE_VISIBLE:
        return []
    names = [one.strip() for one in visible.split(",")]
    numbers = {str(gpu.index) for gpu in listed}
    is_whole = not any(gpu.uuid.startswith("MIG-") for gpu in listed)  # divided ones have more names than are listed
    for name in names:
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", name):
            expected = "numbers, or names that begin with GPU- or MIG-"
            raise SettingsError(GPU_VARIABLE, expected=expected, got=repr(visible))
        is_known = name in numbers if name.isdecimal() else any(gpu.uuid.startswith(name) for gpu in listed)
        if listed and is_whole and not is_known:
            expected = f"GPUs that nvidia-smi lists ({', '.join(sorted(numbers, key=int))})"
            raise SettingsError(GPU_VARIABLE, expected=expected, got=repr(name))
    if len(set(names)) < len(names):
        raise SettingsError(GPU_VARIABLE, expected="each GPU once", got=repr(visible))
    return names


def list_gpus(ask: Ask) -> list[DriverGpu]:
    """What the driver has; the parts instead of a GPU that is divided. Empty without a driver."""
    known = {}
    said = ask(["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits"])
    for line in (said or "").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and cells[0].isdecimal():
            index, uuid, name, total, free = cells
            known[uuid] = DriverGpu(int(index), uuid, name, _bytes(total), _bytes(free))
    if not known:
        return []
    found: list[DriverGpu] = []
    whole: DriverGpu | None = None
    for line in (ask(["nvidia-smi", "-L"]) or "").splitlines():
        if not (entry := re.search(r"UUID: ((?:GPU|MIG)-[^)]+)\)", line)):
            continue
        if entry[1] in known:
            whole = known[entry[1]]
            found.append(whole)
        elif whole is not None and entry[1].startswith("MIG-"):
            if found[-1] is whole:
                found.pop()
            part = line.partition(":")[0].rpartition("Device")[0].strip()
            found.append(DriverGpu(whole.index, entry[1], f"{whole.name} {part}"))
    return found or list(known.values())


def run_program(command: Sequence[str]) -> str | None:
    """What it prints; None if it is not there, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _numbers(listed: Sequence[DriverGpu]) -> list[str]:
    return [gpu.uuid if gpu.uuid.startswith("MIG-") else str(gpu.index) for gpu in listed]


def _of(name: str, listed: Sequence[DriverGpu], is_sure: bool) -> DriverGpu | None:
    """is_sure: numbers mean the same to CUDA, which may put the fastest GPU first, and to the driver."""
    for gpu in listed:
        if name.isdecimal():
            if is_sure and gpu.index == int(name) and not gpu.uuid.startswith("MIG-"):
                return gpu
        elif gpu.uuid.startswith(name):
            return gpu
    return None


def _bytes(cell: str) -> int:
    return int(cell) * MIB if cell.isdecimal() else 0
