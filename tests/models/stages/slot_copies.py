"""Copies of all state tensors, to check bit for bit that a call left slots unchanged, and data to fill slots with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.stages.state import SlotState


def scribble(state: SlotState, slot: int, seed: int) -> None:
    """Write bits that no slot has by itself, NaN included, to every tensor of a slot."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in state.tensors():
        shape = tensor[slot].shape
        if tensor.dtype == torch.bool:
            tensor[slot] = torch.rand(shape, generator=generator) < 0.5
        elif tensor.is_floating_point():
            tensor[slot] = torch.where(torch.rand(shape, generator=generator) < 0.5, float("nan"), 3.0)
        else:
            tensor[slot] = torch.randint(1, 10**6, shape, generator=generator)


def copy_state(state: SlotState) -> list[Tensor]:
    return [tensor.clone() for tensor in state.tensors()]


def assert_same(state: SlotState, expected: list[Tensor], slots: Sequence[int] | None = None) -> None:
    """Assert that `slots` (None: all and scratch) have the same bits in every tensor; NaN equals itself."""
    rows = list(range(state.n_slots + 1)) if slots is None else list(slots)
    for number, (tensor, before) in enumerate(zip(state.tensors(), expected, strict=True)):
        for row in rows:
            got, old = tensor[row].reshape(-1), before[row].reshape(-1)
            if not torch.equal(got.view(torch.uint8), old.view(torch.uint8)):
                difference = (got.double() - old.double()).abs().max()
                what = f"tensor {number} of shape {tuple(tensor.shape)}, slot {row}"
                raise AssertionError(f"{what}: expected {old}, got {got}, max difference {difference}")


def assert_fresh(state: SlotState, slots: Sequence[int]) -> None:
    """Assert that `slots` are as after a reset."""
    before = copy_state(state)
    state.reset(torch.tensor(list(slots)))
    assert_same(state, before, slots)
