"""Time grids of the flow."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.errors import SettingsError
from models.token2wav.flow.solver import time_grid
from tests.models.compare import assert_close


@given(n_steps=st.integers(1, 40))
def test_cosine_grid_equals_its_formula(n_steps):
    expected = [1 - math.cos(math.pi * k / (2 * n_steps)) for k in range(n_steps + 1)]
    assert_close(time_grid(n_steps), torch.tensor(expected, dtype=torch.float64), 1e-12)


def test_cosine_grid_of_ten_steps():
    expected = [0, 0.0123, 0.0489, 0.1090, 0.1910, 0.2929, 0.4122, 0.5460, 0.6910, 0.8436, 1]
    assert_close(time_grid(10), torch.tensor(expected, dtype=torch.float64), 5e-5)


@given(n_steps=st.integers(1, 40))
def test_linear_grid_is_evenly_spaced(n_steps):
    expected = [k / n_steps for k in range(n_steps + 1)]
    assert_close(time_grid(n_steps, "linear"), torch.tensor(expected, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("n_steps", [0, -3])
def test_refuses_grids_without_steps(n_steps):
    with pytest.raises(SettingsError, match=rf"euler steps: expected at least 1, got {n_steps}"):
        time_grid(n_steps)
