"""Folding of weight norm against PyTorch's layers, for both formats, and refused inputs."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from models.errors import CheckpointError
from models.token2wav.load.weight_norm import fold_weight_norm
from tests.models.compare import assert_close

LENGTH, DIRECTION = ".parametrizations.weight.original0", ".parametrizations.weight.original1"


@pytest.mark.parametrize("layer", [nn.Conv1d(4, 6, 3), nn.ConvTranspose1d(4, 6, 5), nn.Linear(4, 6)])
@pytest.mark.parametrize("legacy", [False, True])
def test_folded_weight_equals_the_weight_of_the_layer(layer: nn.Module, legacy: bool):
    normed = weight_norm(layer) if not hasattr(layer, "parametrizations") else layer
    with torch.no_grad():
        normed.parametrizations.weight.original0.mul_(torch.rand(normed.parametrizations.weight.original0.shape) + 0.5)
    tensors = {f"a.b{name.removeprefix('x')}": value for name, value in _named(normed).items()}
    if legacy:
        tensors = {name.replace(LENGTH, ".weight_g").replace(DIRECTION, ".weight_v"): v for name, v in tensors.items()}
    folded = fold_weight_norm(tensors | {"plain.weight": torch.ones(2)})
    assert sorted(folded) == ["a.b.bias", "a.b.weight", "plain.weight"]
    assert_close(folded["a.b.weight"], normed.weight, 1e-6)


def test_norm_is_computed_in_float64():
    direction = torch.full((1, 1, 20_000), 0.1)
    direction[0, 0, 0] = 3e19  # its square overflows float32
    folded = fold_weight_norm({f"x{LENGTH}": torch.ones(1, 1, 1), f"x{DIRECTION}": direction})
    assert_close(folded["x.weight"][0, 0, 0], torch.tensor(1.0), 1e-6)
    assert folded["x.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"x{LENGTH}": torch.ones(2, 1, 1)}, "x.parametrizations.weight.original0: expected its direction"),
        ({"x.weight_v": torch.ones(2, 1, 1)}, "x.weight_v: expected its length"),
        ({"x.weight_g": torch.ones(2), "x.weight_v": torch.ones(2, 1, 1)}, r"expected \[2, 1, 1\], got \[2\]"),
        ({"x.weight_g": torch.ones(2, 1, 1), "x.weight_v": torch.zeros(2, 1, 1)}, "expected no zero rows"),
        ({"x.weight_g": torch.ones(()), "x.weight_v": torch.ones(())}, r"expected at least 2 dims, got \[\]"),
        ({"x.weight_g": torch.ones(2), "x.weight_v": torch.ones(2)}, r"expected at least 2 dims, got \[2\]"),
        (
            {"x.weight_g": torch.ones(2, 1, 1), "x.weight_v": torch.ones(2, 1, 1), "x.weight": torch.ones(2, 1, 1)},
            "x.weight: expected stored once",
        ),
    ],
)
def test_refuses_incomplete_pairs(tensors: dict[str, torch.Tensor], message: str):
    with pytest.raises(CheckpointError, match=message):
        fold_weight_norm(tensors)


def _named(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {f".{name}": value.detach().clone() for name, value in layer.state_dict().items()}
