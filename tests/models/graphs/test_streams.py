"""Side streams: order of work; copies between host and device."""

import pytest
import torch

from models.graphs.streams import AsyncHostCopy, SideStream, tensor_to_device

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BUSY = 200_000_000  # cycles: some 100 ms


def keep_busy(device: torch.device) -> None:
    """Occupy the current stream long enough that missing synchronization changes results."""
    if device.type == "cuda":
        torch.cuda._sleep(BUSY)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.mark.parametrize("high_priority", [False, True])
def test_streams_are_ordered_by_work_and_join(device: torch.device, high_priority: bool) -> None:
    side, table = SideStream(device, high_priority=high_priority), torch.zeros(3, device=device)
    keep_busy(device)
    table += 1
    with side.work():
        keep_busy(device)
        table *= 2
        made = table + 10
    side.join(made)
    table += 1
    assert torch.equal(table.cpu(), torch.full((3,), 3.0))
    assert torch.equal(made.cpu(), torch.full((3,), 12.0))


def test_recorded_tensors_may_be_freed_early(device: torch.device) -> None:
    side = SideStream(device)
    given = torch.full((1000,), 7.0, device=device)
    side.record_use(given)
    with side.work():
        keep_busy(device)
        copy = given.clone()
    del given
    other = torch.full((1000,), 8.0, device=device)  # would reuse the memory if it were free
    side.join(copy)
    assert torch.equal(copy.cpu(), torch.full((1000,), 7.0))
    assert torch.equal(other.cpu(), torch.full((1000,), 8.0))


@pytest.mark.gpu
def test_caller_does_not_wait_without_join() -> None:
    side, table = SideStream(torch.device("cuda")), torch.zeros(2, device="cuda")
    with side.work():
        torch.cuda._sleep(BUSY)
        copy = AsyncHostCopy(table + 1)
    assert torch.equal((table + 2).cpu(), torch.full((2,), 2.0))
    assert not copy.is_ready, "expected the other stream to be busy"
    assert torch.equal(copy.result(), torch.ones(2))
    assert copy.is_ready


def test_copy_holds_the_value_at_its_start(device: torch.device) -> None:
    table = torch.arange(4, device=device)
    keep_busy(device)
    copy = AsyncHostCopy(table + 1)
    table += 100
    assert copy.result().tolist() == [1, 2, 3, 4]
    assert copy.is_ready and copy.result().device.type == "cpu"


def test_tensor_to_device_keeps_values(device: torch.device) -> None:
    table = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(tensor_to_device(device, table).cpu(), table)
