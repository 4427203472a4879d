"""Which GPUs workers get, from the environment and from what `nvidia-smi` prints."""

from collections.abc import Sequence

import pytest

from launcher.devices import CPU, find_devices, oddity
from models.errors import SettingsError

GIB = 1 << 30
TABLE = """0, GPU-aaaa, NVIDIA H200, 143771, 140000
1, GPU-bbbb, NVIDIA H200, 143771, 1024
"""
LIST = """GPU 0: NVIDIA H200 (UUID: GPU-aaaa)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb)
"""
DIVIDED = """GPU 0: NVIDIA H200 (UUID: GPU-aaaa)
  MIG 1g.18gb     Device  0: (UUID: MIG-1111)
  MIG 1g.18gb     Device  1: (UUID: MIG-2222)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb)
"""
MIXED = TABLE.replace("0, GPU-aaaa, NVIDIA H200", "0, GPU-aaaa, NVIDIA T4")


def smi(listed: str = LIST, table: str = TABLE):
    def ask(command: Sequence[str]) -> str:
        return listed if command[1] == "-L" else table

    return ask


def no_driver(_: Sequence[str]) -> None:
    return None


def visible(found: Sequence) -> list[str | None]:
    return [one.visible for one in found]


def test_every_gpu_that_the_driver_lists() -> None:
    found = find_devices("auto", {}, smi())
    assert visible(found) == ["0", "1"]
    assert [one.number for one in found] == [0, 1]
    assert found[1].gpu.free == GIB
    # CUDA may count the fastest first; these numbers are the driver's.
    assert found[1].environ == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_parts_instead_of_a_divided_gpu() -> None:
    found = find_devices("auto", {}, smi(DIVIDED))
    assert visible(found) == ["MIG-1111", "MIG-2222", "1"]
    assert [one.number for one in found] == [None, None, 1]
    assert (found[0].gpu.name, found[0].gpu.total) == ("NVIDIA H200 MIG 1g.18gb", 0)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("1", ["1"]),
        ("1,0", ["1", "0"]),
        (" 0 , 1 ", ["0", "1"]),
        ("GPU-bbbb", ["GPU-bbbb"]),
        ("GPU-bb", ["GPU-bb"]),
        ("", [None]),
        ("-1", [None]),
        ("NoDevFiles", [None]),
    ],
)
def test_the_environment_chooses(variable: str, expected: list[str | None]) -> None:
    found = find_devices("auto", {"CUDA_VISIBLE_DEVICES": variable}, smi())
    assert visible(found) == expected
    assert "CUDA_DEVICE_ORDER" not in found[0].environ


def test_parts_may_be_chosen() -> None:
    found = find_devices("auto", {"CUDA_VISIBLE_DEVICES": "MIG-2222"}, smi(DIVIDED))
    assert visible(found) == ["MIG-2222"]
    assert found[0].label == "GPU MIG-2222"


def test_the_environment_is_believed_where_no_driver_program_is() -> None:
    found = find_devices("auto", {"CUDA_VISIBLE_DEVICES": "3"}, no_driver)
    assert visible(found) == ["3"] and found[0].gpu is None


@pytest.mark.parametrize(("variable", "got"), [("7", "'7'"), ("0,first", "'0,first'"), ("0,0", "'0,0'"), ("0,,1", "")])
def test_what_is_no_gpu_here_is_told(variable: str, got: str) -> None:
    with pytest.raises(SettingsError, match=f"CUDA_VISIBLE_DEVICES: expected .*{got}"):
        find_devices("auto", {"CUDA_VISIBLE_DEVICES": variable}, smi())


def test_memory_is_only_looked_up_where_numbers_mean_the_same() -> None:
    chosen = {"CUDA_VISIBLE_DEVICES": "0"}
    assert find_devices("auto", chosen, smi(table=MIXED))[0].gpu is None
    by_bus = {**chosen, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert find_devices("auto", by_bus, smi(table=MIXED))[0].gpu.name == "NVIDIA T4"


def test_the_cpu() -> None:
    assert find_devices("auto", {}, no_driver) == [CPU]
    assert find_devices("cpu", {}, smi()) == [CPU]
    assert (CPU.label, CPU.environ, CPU.number) == ("CPU", {}, None)


def test_a_driver_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert "nvidia-smi" in oddity("auto", {}, [CPU], no_driver)
    assert oddity("cpu", {}, [CPU], no_driver) is None
    assert oddity("auto", {"CUDA_VISIBLE_DEVICES": ""}, [CPU], no_driver) is None
    assert oddity("auto", {}, [CPU], smi("No devices found.\n", "")) is None
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert oddity("auto", {}, [CPU], no_driver) is None


def test_one_gpu_by_its_number() -> None:
    assert visible(find_devices("cuda:1", {}, smi())) == ["1"]
    assert visible(find_devices("cuda:1", {"CUDA_VISIBLE_DEVICES": "1,0"}, smi())) == ["0"]
    with pytest.raises(SettingsError, match=r"model.device cuda:2: expected one of 2 visible GPUs, got 2"):
        find_devices("cuda:2", {}, smi())


def test_a_gpu_that_is_asked_for_has_to_be_there() -> None:
    with pytest.raises(SettingsError, match=r"model.device cuda: expected a GPU"):
        find_devices("cuda", {}, no_driver)
