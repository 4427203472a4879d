"""Random models for measurements: complete, reproducible and finite."""

from pathlib import Path

import torch

from models.checkpoint.config import load_config
from models.random_weights import random_model


def test_the_same_seed_gives_the_same_weights(tiny: Path) -> None:
    config = load_config(tiny)
    first, again, other = (random_model(config, seed=seed) for seed in (3, 3, 4))
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), f"expected equal draws, got different {name}"
    query = "resampler.query"
    assert not torch.equal(first.state_dict()[query], other.state_dict()[query])


def test_every_weight_is_finite_and_has_its_dtype(tiny: Path) -> None:
    model = random_model(load_config(tiny), dtype=torch.bfloat16)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert not tensor.is_meta, f"expected data, got none for {name}"
        assert not tensor.is_floating_point() or tensor.isfinite().all(), f"expected finite values in {name}"
    types = {name: p.dtype for name, p in model.named_parameters()}
    assert types == {name: torch.float32 if "parametrizations" in name else torch.bfloat16 for name in types}
    assert not model.training
