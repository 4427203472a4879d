"""Launch options of products: which of them let the next kernel start early. Launches nothing."""

import pytest
import torch

pytest.importorskip("triton")

from models.kernels import launch
from models.kernels.launch import SMALL_WEIGHT, product_options


@pytest.mark.parametrize(("n_rows", "has_pdl", "early"), [(1, True, True), (2, True, False), (1, False, False)])
def test_only_products_of_small_weights_start_the_next_kernel_early(
    n_rows: int, has_pdl: bool, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "launch_options", lambda device: {"PDL": has_pdl})
    weight = torch.empty(n_rows, SMALL_WEIGHT, device="meta")
    assert product_options(weight) == {"PDL": has_pdl, "EARLY": early}
