"""Blocks of memory that grow at a fixed address: on a CPU, over a false driver, and on a GPU."""

import ctypes
import gc
from typing import Any

import pytest
import torch

from models.graphs import growing_memory
from models.graphs.growing_memory import GrowingMemory, _Access, _Addresses, _Properties, mapped_bytes

UNIT = 2 << 20
FIRST = 7 << 40
CPU = torch.device("cpu")


class FalseDriver:
    """The driver's functions over counts. failing: the name of a function and its error."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.failing: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            given = [getattr(one, "value", one) for one in arguments if not hasattr(one, "_obj")]
            self.calls.append((name, given))
            if code := self.failing.get(name, 0):
                return code
            results = {"cuMemGetAllocationGranularity": UNIT, "cuMemAddressReserve": FIRST, "cuMemCreate": 5}
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_OF_A_TEST"
            elif name in results:
                arguments[0]._obj.value = results[name]
            return 0

        return call

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FalseDriver:
    driver = FalseDriver()
    monkeypatch.setattr(growing_memory, "_driver", lambda: driver)
    monkeypatch.setattr(growing_memory, "_live", {})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return driver


def held() -> int:
    return mapped_bytes(torch.device("cuda", 3))


def test_structures_have_the_sizes_of_the_driver():
    assert (ctypes.sizeof(_Properties), ctypes.sizeof(_Access)) == (32, 12)
    assert _Properties.location.offset == 8 and _Properties.windows.offset == 16 and _Properties.flags.offset == 24


def test_a_block_on_a_cpu_holds_everything():
    memory = GrowingMemory(1000, 10, CPU)
    address = memory.tensor.data_ptr()
    assert memory.held_bytes == 1000 and not memory.tensor.any()
    memory.tensor.fill_(3)
    memory.grow(1000)
    assert memory.tensor.data_ptr() == address and bool((memory.tensor == 3).all())
    assert mapped_bytes(CPU) == 0


def test_an_unwritten_block_on_a_cpu_takes_no_memory():
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    memory = GrowingMemory(1 << 30, 1, CPU)
    assert memory.tensor.nbytes == 1 << 30 and resident() - before < 1 << 28


def test_memory_is_mapped_in_units_from_the_beginning(driver: FalseDriver):
    addresses = _Addresses(3 * UNIT - 1, 3)
    assert driver.calls[-1] == ("cuMemAddressReserve", [3 * UNIT, 0, 0, 0])
    addresses.map(1)
    assert (addresses.n_mapped, held()) == (UNIT, UNIT)
    driver.calls.clear()
    addresses.map(2 * UNIT + 1)
    assert driver.calls == [
        ("cuMemCreate", [2 * UNIT, 0]),
        ("cuMemMap", [FIRST + UNIT, 2 * UNIT, 0, 5, 0]),
        ("cuMemRelease", [5]),
        ("cuMemSetAccess", [FIRST + UNIT, 2 * UNIT, 1]),
    ]
    assert (addresses.n_mapped, held()) == (3 * UNIT, 3 * UNIT)
    driver.calls.clear()
    addresses.free()
    assert driver.calls == [("cuMemUnmap", [FIRST, 3 * UNIT]), ("cuMemAddressFree", [FIRST, 3 * UNIT])]
    assert held() == 0


@pytest.mark.parametrize(
    ("name", "code", "error", "after"),
    [
        ("cuMemCreate", 2, torch.OutOfMemoryError, ["cuMemCreate", "cuGetErrorName"] * 2),  # torch's cache is freed
        ("cuMemCreate", 999, RuntimeError, ["cuMemCreate", "cuGetErrorName"]),
        ("cuMemMap", 1, RuntimeError, ["cuMemCreate", "cuMemMap", "cuGetErrorName", "cuMemRelease"]),
        (
            "cuMemSetAccess",
            2,
            torch.OutOfMemoryError,
            ["cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess", "cuGetErrorName", "cuMemUnmap"],
        ),
    ],
)
def test_failed_growth_changes_nothing(
    name: str, code: int, error: type[Exception], after: list[str], driver: FalseDriver
):
    addresses = _Addresses(4 * UNIT, 3)
    addresses.map(UNIT)
    driver.calls.clear()
    driver.failing[name] = code
    with pytest.raises(error, match=f"{name}: expected CUDA_SUCCESS, got CUDA_ERROR_OF_A_TEST"):
        addresses.map(3 * UNIT)
    assert driver.names() == after
    assert (addresses.n_mapped, held()) == (UNIT, UNIT)
    driver.failing.clear()
    addresses.map(3 * UNIT)
    assert (addresses.n_mapped, held()) == (3 * UNIT, 3 * UNIT)


@pytest.mark.parametrize("code", [801, None], ids=["refused", "no driver"])
def test_a_driver_without_support_takes_everything_at_once(
    code: int | None, driver: FalseDriver, monkeypatch: pytest.MonkeyPatch
):
    def missing() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(growing_memory, "_has_virtual_memory", lambda device: True)
    if code is None:
        monkeypatch.setattr(growing_memory, "_driver", missing)
    else:
        driver.failing["cuMemAddressReserve"] = code
    assert growing_memory._reserved(UNIT, 3) is None
    driver.failing["cuMemAddressReserve"] = 2
    if code is not None:
        with pytest.raises(torch.OutOfMemoryError):
            growing_memory._reserved(UNIT, 3)


def test_memory_that_cannot_be_given_back_stays_counted(driver: FalseDriver, caplog: pytest.LogCaptureFixture):
    addresses = _Addresses(4 * UNIT, 3)
    addresses.map(UNIT)
    driver.failing["cuMemUnmap"] = 700
    addresses.free()
    assert held() == UNIT and "CUDA_ERROR_OF_A_TEST" in caplog.text


# --- on a GPU ----------------------------------------------------------------------------------


def gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(max(torch.cuda.device_count(), 1))]


def free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("device", gpus(), ids=str)
def test_a_gpu_holds_what_is_needed(device: torch.device):
    torch.zeros(1, device=device)
    before, free = mapped_bytes(device), free_bytes(device)
    memory = GrowingMemory(1 << 30, 10, device)
    assert memory.tensor.device == device and memory.tensor.shape == (1 << 30,)
    address, small = memory.tensor.data_ptr(), memory.held_bytes
    assert 10 <= small < 1 << 25 and mapped_bytes(device) == before + small
    memory.tensor[:10].fill_(7)
    memory.grow(1 << 28)
    assert memory.tensor.data_ptr() == address and memory.held_bytes == 1 << 28
    assert mapped_bytes(device) == before + (1 << 28)
    assert (1 << 28) - (1 << 25) < free - free_bytes(device) < (1 << 28) + (1 << 27)
    new = memory.tensor[: 1 << 28].view(torch.int64)
    assert int((new != 0).sum()) == 2, "expected zeros after the ten bytes written before"
    new.fill_(-1)
    memory.grow(1 << 20)
    assert memory.held_bytes == 1 << 28 and bool((new == -1).all())


@pytest.mark.gpu
def test_a_gpu_gets_memory_back_with_the_last_tensor():
    device = gpus()[0]
    torch.zeros(1, device=device)
    before, free = mapped_bytes(device), free_bytes(device)
    memory = GrowingMemory(1 << 30, 1 << 28, device)
    view = memory.tensor[:100].view(torch.float32)
    del memory
    gc.collect()
    view.fill_(2.0)
    assert float(view.sum()) == 50.0 and mapped_bytes(device) == before + (1 << 28)
    del view
    gc.collect()
    assert mapped_bytes(device) == before and free - free_bytes(device) < 1 << 26


@pytest.mark.gpu
def test_a_graph_reads_memory_mapped_after_its_capture():
    device = gpus()[0]
    memory = GrowingMemory(1 << 28, 1 << 20, device)
    table = memory.tensor.view(torch.float32).view(-1, 1024)  # rows of 4 KiB
    row, out = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, 1024, device=device)
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        out.copy_(table.index_select(0, row))
        with torch.cuda.graph(graph, stream=stream):
            out.copy_(table.index_select(0, row))
    torch.cuda.synchronize(device)
    memory.grow(1 << 28)
    table[-1] = 3.0
    row.fill_(len(table) - 1)
    graph.replay()
    assert bool((out == 3.0).all())
    row.fill_(len(table) - 2)
    graph.replay()
    assert not out.any()


@pytest.mark.gpu
def test_a_gpu_without_memory_left():
    device = gpus()[0]
    total = torch.cuda.mem_get_info(device)[1]
    memory = GrowingMemory(2 * total, 1 << 20, device)
    memory.tensor[: 1 << 20].fill_(9)
    before = memory.held_bytes
    with pytest.raises(torch.OutOfMemoryError, match="cuMemCreate"):
        memory.grow(2 * total)
    assert memory.held_bytes == before and bool((memory.tensor[: 1 << 20] == 9).all())
    memory.grow(before + 1)
    assert memory.held_bytes > before and torch.zeros(100, device=device).sum() == 0


@pytest.mark.gpu
def test_a_gpu_without_virtual_memory_management_holds_everything(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(growing_memory, "_has_virtual_memory", lambda device: False)
    device = gpus()[0]
    before = mapped_bytes(device)
    memory = GrowingMemory(1 << 20, 1, device)
    memory.grow(1 << 20)
    assert memory.held_bytes == 1 << 20 and not memory.tensor.any() and mapped_bytes(device) == before
