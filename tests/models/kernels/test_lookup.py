"""Rows of a table by index, in device and in pinned memory, against PyTorch indexing."""

import pytest
import torch

pytest.importorskip("triton")

DEVICES = (
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are built for the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)], ids=str)
@pytest.mark.parametrize("width", [24, 1300])
def test_rows_equal_indexing_the_table(device: str, shape: tuple[int, ...], width: int) -> None:
    from models.kernels.lookup import table_rows

    table = torch.randn(40, width)
    ids = torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(1))
    if device == "cuda":
        table = table.pin_memory()
    got = table_rows(table, ids.to(device))
    assert got.device.type == device and torch.equal(got.cpu(), table[ids])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_stored_where_they_have_a_place(device: str) -> None:
    from models.kernels.lookup import store_rows
    from models.layers.backend import TORCH

    rows, slots = torch.randn(4, 40, device=device), torch.tensor([3, 0, 2, 4], device=device)
    places, active = torch.tensor([2, 0, -1, 1], device=device), torch.tensor([True, True, True, False], device=device)
    got, expected = torch.zeros(2, 6, 3, 40, device=device)  # the last slot is the scratch slot
    store_rows(got, slots, places, active, rows)
    TORCH.keep_hidden(expected, slots, places, active, rows)
    assert torch.equal(got[:-1], expected[:-1]) and torch.equal(got[3, 2], rows[0]) and got[2].count_nonzero() == 0
