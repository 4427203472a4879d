"""bf12: encoded weights against the numbers they came from, by a decoder written from the description of the format."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.kernels.bf12 import GROUP, LEAST_ENTRIES, MOST_ENTRIES, Bf12Matrix, bf12_bytes, encode
from tests.models.compare import assert_same


def decoded(matrix: Bf12Matrix) -> Tensor:
    """The weight [N, K] bfloat16, number by number."""
    K, words = matrix.shape[1], matrix.values.numpy().view(np.uint32)
    own, half = np.arange(K), GROUP // 2
    group, half_index, place = own // GROUP, own % GROUP // half, own % half
    quarter, j = place // 32, place % 32
    word = group * 96 + j - j % 2 + quarter // 2
    shift = (8 * (2 * (quarter % 2) + j % 2)).astype(np.uint32)
    low = (words[:, word + 32 * half_index] >> shift) & 255
    bits = words[:, word + 64]
    turned = (bits << np.uint32(4)) | (bits >> np.uint32(28))
    code = (np.where(half_index == 1, turned, bits) >> shift) & 255
    smallest = matrix.smallest.numpy().astype(np.uint32)[:, None]
    numbers = ((code & 128 | (code & 7) + smallest) << 8 | low).astype(np.uint16)
    for entries in matrix.exceptions.numpy().view(np.uint32):
        for row, entry in enumerate(entries):
            if (entry & 0x7FFF) != smallest[row, 0] << 8:
                numbers[row, entry >> 16] = entry & 0xFFFF
    return torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16)


def bits(weight: Tensor) -> Tensor:
    return weight.view(torch.int16)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def encoded(weight: Tensor) -> Bf12Matrix:
    matrix = encode(weight)
    assert matrix is not None, f"{tuple(weight.shape)}: expected a matrix in 12 bits, got none"
    return matrix


def test_normally_distributed_numbers_keep_every_bit() -> None:
    weight = noise(300, 2 * GROUP) * torch.logspace(-3, 3, 300)[:, None].bfloat16()
    matrix = encoded(weight)
    assert_same(bits(decoded(matrix)), bits(weight), "decoded numbers")
    assert matrix.nbytes == bf12_bytes(300, 2 * GROUP) + 300 * 4 * (len(matrix.exceptions) - LEAST_ENTRIES)
    assert matrix.nbytes < 0.78 * weight.nbytes
    assert_same(decoded(encoded(weight.float())), weight, "from float32")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_finite_numbers_keep_every_bit(data: st.DataObject) -> None:
    weight = noise(3, GROUP, seed=data.draw(st.integers(0, 3)))
    finite = st.integers(0, 0xFFFF).filter(lambda one: one >> 7 & 255 != 255)
    changes = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, GROUP - 1), finite), max_size=12))
    for row, column, number in changes:
        weight[row, column] = torch.tensor([number], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[0]
    matrix = encode(weight)
    if matrix is None:  # one large number makes all others of its row exceptions
        top = weight.abs().float().amax(1)
        assert (top > weight.abs().float().quantile(0.3, dim=1) * 2**13).any()
        return
    assert_same(bits(decoded(matrix)), bits(weight), "decoded numbers")


def test_zeros_and_equal_numbers() -> None:
    weight = torch.zeros(4, GROUP).bfloat16()
    weight[1], weight[2, 5], weight[3, 7] = 1.5, -0.0, -2.0
    weight[3, 0] = 2.0**-20
    with_zeros = encode(weight)
    assert with_zeros is None, "row 3: expected more exceptions than entries, got a matrix"
    weight[3] = torch.where(weight[3] == 0, 1.0, weight[3])
    assert_same(bits(decoded(encoded(weight))), bits(weight), "decoded numbers")


def test_blocks_of_rows_are_encoded_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = noise(40, GROUP)
    weight[33, :9] = 2.0**-30  # more exceptions than the other rows have
    whole = encoded(weight)
    monkeypatch.setattr("models.kernels.bf12._ENCODED_AT_ONCE", 16 * GROUP)
    for name, got, expected in zip(whole._fields, encoded(weight), whole, strict=True):
        assert_same(got, expected, name)
    assert len(whole.exceptions) >= 9
    assert_same(bits(decoded(whole)), bits(weight), "decoded numbers")


@pytest.mark.parametrize("shape", [(4, GROUP // 2), (4, GROUP + 16), (4, 1 << 15), (0, GROUP), (GROUP,)])
def test_other_shapes_are_not_encoded(shape: tuple[int, ...]) -> None:
    assert encode(torch.zeros(shape).bfloat16()) is None
    if len(shape) == 2:
        assert bf12_bytes(*shape) == 0


def test_numbers_that_12_bits_cannot_hold_are_not_encoded() -> None:
    weight = noise(4, GROUP)
    wide = weight.clone()
    wide[2, : MOST_ENTRIES + 1] = 2.0**-30
    infinite = weight.clone()
    infinite[1, 3] = torch.inf
    finer = weight.float()
    finer[0, 0] += 2.0**-12
    assert [encode(one) for one in (wide, infinite, finer)] == [None] * 3
