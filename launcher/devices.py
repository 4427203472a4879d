"""The GPUs that workers may use: those in CUDA_VISIBLE_DEVICES, otherwise those that `nvidia-smi` lists.

Imports no torch and starts no worker.
"""

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from models.errors import SettingsError

GPU_VARIABLE, ORDER_VARIABLE = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
NONE_VISIBLE = ("", "-1", "NoDevFiles")
SMI_TIMEOUT_S = 30  # includes the time that an idle driver takes to initialize
MIB = 1 << 20
# Runs a command. Returns its output, or None if the program is missing or fails.
RunProgram = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True)
class DriverGpu:
    """One GPU as the driver lists it.

    uuid: `GPU-...`, or `MIG-...` for a MIG instance. total, free: memory in bytes, 0 if unknown.
    """

    index: int
    uuid: str
    name: str
    total: int = 0
    free: int = 0


@dataclass(frozen=True)
class Device:
    """The device of one worker.

    visible: value for CUDA_VISIBLE_DEVICES; None for the CPU. gpu: the driver's entry for it, if it is known.
    is_listed: `visible` is an index in the driver's order.
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
        """Environment variables that make this the only device a process sees."""
        if self.visible is None:
            return {}
        # By default CUDA numbers the fastest GPU first; PCI_BUS_ID selects the driver's order.
        return {GPU_VARIABLE: self.visible, **({ORDER_VARIABLE: "PCI_BUS_ID"} if self.is_listed else {})}


CPU = Device(None)


def find_devices(setting: str, environ: Mapping[str, str], run: RunProgram) -> list[Device]:
    """The devices for workers, one for each; only the CPU if there is no GPU.

    Args:
        setting: value of `model.device`.
        environ: environment variables.
        run: runs `nvidia-smi`.

    Raises: SettingsError if a requested GPU does not exist.
    """
    if setting == "cpu":
        return [CPU]
    visible = environ.get(GPU_VARIABLE)
    listed = [] if visible is not None and visible.strip() in NONE_VISIBLE else list_gpus(run)
    is_same_order = environ.get(ORDER_VARIABLE) == "PCI_BUS_ID" or len({gpu.name for gpu in listed}) < 2
    names = _names(listed) if visible is None else parse_visible(visible, listed)
    found = [
        Device(name, _find_gpu(name, listed, is_same_order or visible is None), is_listed=visible is None)
        for name in names
    ]
    kind, _, number = setting.partition(":")
    if number and int(number) >= len(found):
        raise SettingsError(f"model.device {setting}", expected=f"one of {len(found)} visible GPUs", got=int(number))
    if number:
        return [found[int(number)]]
    if not found and kind == "cuda":
        expected = 'a GPU listed by nvidia-smi or CUDA_VISIBLE_DEVICES, or model.device "cpu"'
        raise SettingsError(f"model.device {setting}", expected=expected, got="none")
    return found or [CPU]


def cpu_fallback_note(setting: str, environ: Mapping[str, str], found: Sequence[Device], run: RunProgram) -> str | None:
    """A note if workers run on the CPU although a driver is installed; None if there is nothing to report."""
    if setting != "auto" or list(found) != [CPU] or GPU_VARIABLE in environ or not shutil.which("nvidia-smi"):
        return None
    output = run(["nvidia-smi", "-L"])
    if output is None:
        return "nvidia-smi is installed but fails (run it to see why), so workers run on the CPU"
    if "UUID" in output:
        return "nvidia-smi lists GPUs but its --query-gpu reports none, so workers run on the CPU"
    return None


def parse_visible(visible: str, listed: Sequence[DriverGpu]) -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES.

    The check is here because CUDA silently ignores everything from the first unknown entry on.

    Raises: SettingsError for an entry that is no GPU of this machine, and for a repeated one.
    """
    if visible.strip() in NONE_VISIBLE:
        return []
    names = [one.strip() for one in visible.split(",")]
    numbers = {str(gpu.index) for gpu in listed}
    has_mig = any(gpu.uuid.startswith("MIG-") for gpu in listed)  # a MIG instance has more names than the listed one
    for name in names:
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", name):
            expected = "numbers, or names that start with GPU- or MIG-"
            raise SettingsError(GPU_VARIABLE, expected=expected, got=repr(visible))
        is_known = name in numbers if name.isdecimal() else any(gpu.uuid.startswith(name) for gpu in listed)
        if listed and not has_mig and not is_known:
            expected = f"GPUs that nvidia-smi lists ({', '.join(sorted(numbers, key=int))})"
            raise SettingsError(GPU_VARIABLE, expected=expected, got=repr(name))
    if len(set(names)) < len(names):
        raise SettingsError(GPU_VARIABLE, expected="each GPU once", got=repr(visible))
    return names


def list_gpus(run: RunProgram) -> list[DriverGpu]:
    """The driver's GPUs, with its MIG instances in place of a GPU that is partitioned. Empty without a driver."""
    known = {}
    table = run(["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits"])
    for line in (table or "").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and cells[0].isdecimal():
            index, uuid, name, total, free = cells
            known[uuid] = DriverGpu(int(index), uuid, name, _bytes(total), _bytes(free))
    if not known:
        return []
    found: list[DriverGpu] = []
    whole: DriverGpu | None = None
    for line in (run(["nvidia-smi", "-L"]) or "").splitlines():
        if not (entry := re.search(r"UUID: ((?:GPU|MIG)-[^)]+)\)", line)):
            continue
        if entry[1] in known:
            whole = known[entry[1]]
            found.append(whole)
        elif whole is not None and entry[1].startswith("MIG-"):
            if found[-1] is whole:
                found.pop()
            profile = line.partition(":")[0].rpartition("Device")[0].strip()
            found.append(DriverGpu(whole.index, entry[1], f"{whole.name} {profile}"))
    return found or list(known.values())


def run_program(command: Sequence[str]) -> str | None:
    """The standard output of a command; None if the program is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _names(listed: Sequence[DriverGpu]) -> list[str]:
    return [gpu.uuid if gpu.uuid.startswith("MIG-") else str(gpu.index) for gpu in listed]


def _find_gpu(name: str, listed: Sequence[DriverGpu], is_same_order: bool) -> DriverGpu | None:
    """The entry for a number or UUID prefix. is_same_order: CUDA and the driver number the GPUs in the same order."""
    for gpu in listed:
        if name.isdecimal():
            if is_same_order and gpu.index == int(name) and not gpu.uuid.startswith("MIG-"):
                return gpu
        elif gpu.uuid.startswith(name):
            return gpu
    return None


def _bytes(cell: str) -> int:
    return int(cell) * MIB if cell.isdecimal() else 0
