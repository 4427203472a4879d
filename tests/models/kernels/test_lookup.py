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
