"""What quantised weights change in the hidden states of each part, against what bfloat16 changes.

Errors are relative to float32, on the embedded weights.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.checkpoint.precision import PRESETS, Kind, Precision, Weights
from models.layers.backend import TORCH
from models.load import load_model
from models.omni import OmniModel
from models.token2wav.flow.flow import Flow
from models.token2wav.load.parts import load_flow_and_hift
from tests.parity.build import slot_cache

# Largest error as a multiple of bfloat16's.
BOUNDS: dict[Weights, dict[str, float]] = {
    "fp8": {"llm": 4, "apm": 4},
    "int8": {"llm": 4, "tts": 4, "apm": 4, "vpm": 4},
    "int4": {"llm": 20, "tts": 4, "apm": 4, "vpm": 4},
}
FLOW_BOUNDS: dict[Kind, tuple[float, float]] = {"int8": (0.1, 1), "fp8": (0.5, 3)}  # smallest and largest multiple


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


def flow_outputs(flow: Flow) -> dict[str, Tensor]:
    """Hidden states of the encoder, and the mel."""
    generator, n, n_mels = torch.Generator().manual_seed(2), torch.tensor([24]), flow.config.n_mels
    speech_tokens = torch.randint(flow.config.vocab_size, (1, 24), generator=generator)
    prompt, noise = (torch.randn(1, 48, n_mels, generator=generator) for _ in range(2))
    prompt[:, 20:] = 0
    speaker = torch.randn(1, flow.config.speaker_dim, generator=generator)
    with torch.no_grad():
        hidden = flow.encoder.offline(flow.input_embedding(speech_tokens), n)
        inputs = prompt.to(flow.dtype), flow.speaker(speaker), noise, flow.schedule(3)
        mel = flow.offline(speech_tokens, n, *inputs)
    return {"hidden": hidden.double(), "mel": mel.double()}


def test_errors_of_the_flow_stay_bounded(tiny: Path) -> None:
    folder = tiny / "assets" / "token2wav"
    exact = flow_outputs(load_flow_and_hift(folder).flow)
    rounded = errors(flow_outputs(load_flow_and_hift(folder, dtype=torch.bfloat16).flow), exact)
    for kind, (least, most) in FLOW_BOUNDS.items():
        found = errors(flow_outputs(load_flow_and_hift(folder, precision=Precision(flow=kind)).flow), exact)
        times = {name: error / rounded[name] for name, error in found.items()}
        assert all(least < one < most for one in times.values()), (
            f"flow in {kind}: expected {least} to {most} times bfloat16's error, got {times}"
        )
