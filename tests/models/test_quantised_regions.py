"""What quantised weights change in the hidden states of each part, against what bfloat16 changes.

Errors are relative to float32, on the embedded weights.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.checkpoint.precision import PRESETS, Weights
from models.layers.backend import TORCH
from models.load import load_model
from models.omni import OmniModel
from tests.parity.build import slot_cache

# Largest error as a multiple of bfloat16's.
BOUNDS: dict[Weights, dict[str, float]] = {
    "fp8": {"llm": 4, "apm": 4},
    "int8": {"llm": 4, "tts": 4, "apm": 4, "vpm": 4},
    "int4": {"llm": 20, "tts": 4, "apm": 4, "vpm": 4},
}


def outputs(model: OmniModel) -> dict[str, Tensor]:
    generator, slot = torch.Generator().manual_seed(1), torch.tensor([0])
    caches = {part: slot_cache(model, part, n_slots=1) for part in ("llm", "tts", "apm")}
    for cache in caches.values():
        cache.k, cache.v = ([one.to(model.dtype) for one in tensors] for tensors in (cache.k, cache.v))
    rows = torch.randn(1, 12, model.config.tts_config.hidden_size, generator=generator)
    mel = torch.randn(1, 80, 104, generator=generator) / 2
    pixels = torch.randint(0, 256, (1, 40, 588), generator=generator).to(torch.uint8)
    place = torch.arange(40)
    coords, mask = torch.stack((place // 8, place % 8), -1)[None], torch.ones(1, 40, dtype=torch.bool)
    with torch.no_grad():
        embeds = model.llm.embed(torch.arange(20, 44)[None], TORCH)
        found = {
            "llm": model.llm.prefill(embeds, caches["llm"], slot, torch.tensor([24]), 32, TORCH)[1],
            "tts": model.tts.model(rows.to(model.dtype), caches["tts"], slot, torch.tensor([12]), 16, TORCH),
            "apm": model.encode_unit(mel, torch.tensor([2]), torch.tensor([104]), caches["apm"], slot)[0],
            "vpm": model.encode_images(pixels, place[None], coords, mask),
        }
    return {name: tensor.double() for name, tensor in found.items()}


@pytest.fixture(scope="module")
def exact(tiny: Path) -> dict[str, Tensor]:
    return outputs(load_model(tiny))


@pytest.fixture(scope="module")
def rounded(tiny: Path, exact: dict[str, Tensor]) -> dict[str, float]:
    """Errors of bfloat16."""
    return errors(outputs(load_model(tiny, dtype=torch.bfloat16)), exact)


def errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((got[name] - want).norm() / want.norm()) for name, want in exact.items()}


@pytest.mark.parametrize("weights", BOUNDS)
def test_errors_stay_bounded(tiny: Path, exact: dict[str, Tensor], rounded: dict[str, float], weights: Weights) -> None:
    found = errors(outputs(load_model(tiny, precision=PRESETS[weights])), exact)
    for name, most in BOUNDS[weights].items():
        times = found[name] / rounded[name]
        assert 0.5 < times < most, (
            f"{name} in {weights}: expected 0.5 to {most} times bfloat16's error, got {times:.2f}"
        )
    if weights == "fp8":
        assert found["tts"] == found["vpm"] == 0, f"expected tts and vpm that are not quantised, got errors of {found}"
    if weights == "int4":
        assert found["llm"] > 3 * found["vpm"], "expected the language model alone in int4"
