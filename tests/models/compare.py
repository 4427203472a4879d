"""Assertions on tensors whose messages contain the expected tensor, the actual one and the largest difference."""

import torch
from torch import Tensor


def assert_close(got: Tensor, expected: Tensor, tolerance: float, what: str = "values") -> None:
    """The shapes are equal and no element differs by more than `tolerance`; NaN is never close."""
    assert got.shape == expected.shape, f"{what}: expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    if not got.numel():
        return
    difference = (got.double() - expected.double()).abs().max().item()
    assert difference <= tolerance, (
        f"{what}: max diff {difference:.3g} above {tolerance}\nexpected {expected}\ngot {got}"
    )


def assert_same(got: Tensor, expected: Tensor, what: str = "values") -> None:
    """The tensors are bit-identical: NaN equals NaN, 0 does not equal -0."""
    assert got.dtype == expected.dtype, f"{what}: expected {expected.dtype}, got {got.dtype}"
    if torch.equal(_bits(got), _bits(expected)):
        return
    assert got.shape == expected.shape, f"{what}: expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    difference = (got.double() - expected.double()).abs().max()
    raise AssertionError(
        f"{what}: expected the same bits, got max diff {difference:.3g}\nexpected {expected}\ngot {got}"
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dtype.is_floating_point else tensor
