"""Assertions on tensors that print what was expected, what came and the largest difference."""

import torch
from torch import Tensor


def assert_close(got: Tensor, expected: Tensor, tolerance: float, what: str = "values") -> None:
    """Same shape, and no element further off than `tolerance`; NaN is never close."""
    assert got.shape == expected.shape, f"{what}: expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    if not got.numel():
        return
    off = (got.double() - expected.double()).abs().max().item()
    assert off <= tolerance, f"{what}: max diff {off:.3g} above {tolerance}\nexpected {expected}\ngot {got}"


def assert_same(got: Tensor, expected: Tensor, what: str = "values") -> None:
    """The same bits: NaN equals NaN, 0 does not equal -0."""
    assert got.dtype == expected.dtype, f"{what}: expected {expected.dtype}, got {got.dtype}"
    if torch.equal(_bits(got), _bits(expected)):
        return
    assert got.shape == expected.shape, f"{what}: expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    off = (got.double() - expected.double()).abs().max()
    raise AssertionError(f"{what}: expected the same bits, got max diff {off:.3g}\nexpected {expected}\ngot {got}")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dtype.is_floating_point else tensor
