"""Fixtures of tests that compare kernels with exact products."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def exact_products() -> Iterator[None]:
    """Products in float32 without TF32."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed
