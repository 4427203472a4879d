"""Random vocoder modules: complete, repeatable, and with audible output."""

import pytest
import torch

from assets.build_tiny_vocoder import FLOW_CONFIG, HIFT_CONFIG, SPEAKER_CONFIG, TOKENIZER_CONFIG
from models.token2wav.load.random_weights import random_parts
from models.token2wav.settings import HiftConfig
from tests.models.token2wav.load.offline_sound import offline_sound
from tests.models.token2wav.load.random_voice_parts import random_voice_parts


def test_same_seed_same_weights() -> None:
    first, again, other = (random_parts(FLOW_CONFIG, HIFT_CONFIG, seed=seed) for seed in (3, 3, 4))
    for part in ("flow", "hift"):
        a, b, c = (getattr(parts, part).state_dict() for parts in (first, again, other))
        assert all(torch.equal(a[name], b[name]) for name in a)
        drawn = [name for name in a if a[name].ndim > 1]
        assert not [name for name in drawn if torch.equal(a[name], c[name])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_complete_finite_and_typed(dtype: torch.dtype) -> None:
    parts = random_parts(FLOW_CONFIG, HIFT_CONFIG, dtype=dtype, hift_dtype=dtype)
    voice = random_voice_parts(SPEAKER_CONFIG, TOKENIZER_CONFIG)
    for module in (parts.flow, parts.hift, voice.speaker_encoder, voice.speech_tokenizer):
        assert not module.training
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            assert not tensor.is_meta, f"expected data, got none for {name}"
            assert tensor.isfinite().all(), f"expected finite values in {name}"
    assert {p.dtype for p in parts.flow.parameters()} == {dtype}
    assert parts.hift.ups[0].weight.dtype == dtype
    assert parts.hift.f0_predictor.classifier.weight.dtype == torch.float32
    assert {p.dtype for p in voice.speaker_encoder.parameters()} == {torch.float32}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("base", [32, 64])
def test_sound_is_neither_silent_nor_clipped(seed: int, base: int) -> None:
    parts = random_parts(FLOW_CONFIG, HiftConfig(base_channels=base, f0_channels=24), seed=seed)
    speech_tokens = torch.randint(0, 6561, (2, 40), generator=torch.Generator().manual_seed(seed))
    f0, wave = offline_sound(parts, speech_tokens)
    rms = wave.square().mean(1).sqrt()
    assert ((rms > 0.03) & (rms < 0.4)).all(), f"expected 0.03 to 0.4, got {rms}"
    clipped = (wave.abs() > 0.98).float().mean()
    assert clipped < 1e-3, f"expected hardly any sample at the limit, got {clipped}"
    assert (f0 > 10).float().mean() > 0.95, "expected nearly all frames voiced"
    assert (f0 < 500).all(), f"expected the pitch of a voice, got {f0.max()} Hz"


def test_voice_parts_run() -> None:
    voice = random_voice_parts(SPEAKER_CONFIG, TOKENIZER_CONFIG, seed=1)
    generator = torch.Generator().manual_seed(0)
    vector = voice.speaker_encoder(torch.randn(2, 150, 80, generator=generator))
    assert vector.shape == (2, SPEAKER_CONFIG.embedding)
    assert vector.isfinite().all()
    assert vector.std() > 1e-2, f"expected different values, got std {vector.std()}"
    speech_tokens, n_speech_tokens = voice.speech_tokenizer(
        torch.randn(1, 128, 200, generator=generator), torch.tensor([200])
    )
    assert n_speech_tokens.tolist() == [50]
    assert len(speech_tokens.unique()) > 20, f"expected different tokens, got {speech_tokens}"
