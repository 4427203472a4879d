"""Copies of all state tensors, to tell whether a call left slots as they were, bit for bit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.stages.state import SlotState


def copy_state(state: SlotState) -> list[Tensor]:
    return [tensor.clone() for tensor in state.tensors()]


def assert_same(state: SlotState, expected: list[Tensor], slots: Sequence[int] | None = None) -> None:
    """Every tensor's rows `slots` (None: all, scratch too) hold the bits they held; NaN equals itself."""
    rows = list(range(state.n_slots + 1)) if slots is None else list(slots)
    for number, (tensor, before) in enumerate(zip(state.tensors(), expected, strict=True)):
        for row in rows:
            got, old = tensor[row].reshape(-1), before[row].reshape(-1)
            if not torch.equal(got.view(torch.uint8), old.view(torch.uint8)):
                difference = (got.double() - old.double()).abs().max()
                what = f"tensor {number} of shape {tuple(tensor.shape)}, slot {row}"
                raise AssertionError(f"{what}: expected {old}, got {got}, max difference {difference}")


def assert_fresh(state: SlotState, slots: Sequence[int]) -> None:
    """`slots` hold what reset gives them."""
    before = copy_state(state)
    state.reset(torch.tensor(list(slots)))
    assert_same(state, before, slots)
