"""GPUs for workers, from CUDA_VISIBLE_DEVICES and the output of `nvidia-smi`."""

from collections.abc import Sequence

import pytest

from launcher.devices import CPU, cpu_fallback_note, find_devices
from models.errors import SettingsError

GIB = 1 << 30
TABLE = """0, GPU-aaaa, NVIDIA H200, 143771, 140000
1, GPU-bbbb, NVIDIA H200, 143771, 1024
"""
LIST = """GPU 0: NVIDIA H200 (UUID: GPU-aaaa)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb)
"""
PARTITIONED = """GPU 0: NVIDIA H200 (UUID: GPU-aaaa)
  MIG 1g.18gb     Device  0: (UUID: MIG-1111)
  MIG 1g.18gb     Device  1: (UUID: MIG-2222)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb)
"""
MIXED = TABLE.replace("0, GPU-aaaa, NVIDIA H200", "0, GPU-aaaa, NVIDIA T4")


def smi(listed: str = LIST, table: str = TABLE):
    def run(command: Sequence[str]) -> str:
        return listed if command[1] == "-L" else table

    return run


def no_driver(_: Sequence[str]) -> None:
    return None


def visible(found: Sequence) -> list[str | None]:
    return [one.visible for one in found]


def test_uses_every_gpu_the_driver_lists() -> None:
    found = find_devices("auto", {}, smi())
    assert visible(found) == ["0", "1"]
    assert [one.number for one in found] == [0, 1]
    assert found[1].gpu.free == GIB
    # The indices are in the driver's order, which CUDA uses only with PCI_BUS_ID.
    assert found[1].environ == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_uses_mig_instances_of_partitioned_gpu() -> None:
    found = find_devices("auto", {}, smi(PARTITIONED))
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
def test_visible_devices_variable_selects_gpus(variable: str, expected: list[str | None]) -> None:
    found = find_devices("auto", {"CUDA_VISIBLE_DEVICES": variable}, smi())
    assert visible(found) == expected
    assert "CUDA_DEVICE_ORDER" not in found[0].environ


def test_visible_devices_variable_selects_mig_instance() -> None:
    found = find_devices("auto", {"CUDA_VISIBLE_DEVICES": "MIG-2222"}, smi(PARTITIONED))
    assert visible(found) == ["MIG-2222"]
    assert found[0].label == "GPU MIG-2222"


def test_visible_devices_variable_is_trusted_without_nvidia_smi() -> None:
    found = find_devices("auto", {"CUDA_VISIBLE_DEVICES": "3"}, no_driver)
    assert visible(found) == ["3"] and found[0].gpu is None


@pytest.mark.parametrize(("variable", "got"), [("7", "'7'"), ("0,first", "'0,first'"), ("0,0", "'0,0'"), ("0,,1", "")])
def test_refuses_unknown_visible_devices(variable: str, got: str) -> None:
    with pytest.raises(SettingsError, match=f"CUDA_VISIBLE_DEVICES: expected .*{got}"):
        find_devices("auto", {"CUDA_VISIBLE_DEVICES": variable}, smi())


def test_gpu_entry_is_known_only_where_orders_agree() -> None:
    chosen = {"CUDA_VISIBLE_DEVICES": "0"}
    assert find_devices("auto", chosen, smi(table=MIXED))[0].gpu is None
    in_driver_order = {**chosen, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert find_devices("auto", in_driver_order, smi(table=MIXED))[0].gpu.name == "NVIDIA T4"


def test_uses_cpu_without_gpu_or_on_request() -> None:
    assert find_devices("auto", {}, no_driver) == [CPU]
    assert find_devices("cpu", {}, smi()) == [CPU]
    assert (CPU.label, CPU.environ, CPU.number) == ("CPU", {}, None)


def test_reports_failing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert "nvidia-smi" in cpu_fallback_note("auto", {}, [CPU], no_driver)
    assert cpu_fallback_note("cpu", {}, [CPU], no_driver) is None
    assert cpu_fallback_note("auto", {"CUDA_VISIBLE_DEVICES": ""}, [CPU], no_driver) is None
    assert cpu_fallback_note("auto", {}, [CPU], smi("No devices found.\n", "")) is None
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert cpu_fallback_note("auto", {}, [CPU], no_driver) is None


def test_device_setting_selects_visible_gpu() -> None:
    assert visible(find_devices("cuda:1", {}, smi())) == ["1"]
    assert visible(find_devices("cuda:1", {"CUDA_VISIBLE_DEVICES": "1,0"}, smi())) == ["0"]
    with pytest.raises(SettingsError, match=r"model.device cuda:2: expected one of 2 visible GPUs, got 2"):
        find_devices("cuda:2", {}, smi())


def test_refuses_missing_gpu() -> None:
    with pytest.raises(SettingsError, match=r"model.device cuda: expected a GPU"):
        find_devices("cuda", {}, no_driver)
