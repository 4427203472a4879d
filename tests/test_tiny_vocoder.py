"""The committed tiny vocoder equals what its script builds, and produces sound."""

from pathlib import Path

import pytest
import torch

from assets.build_tiny_vocoder import FLOW_CONFIG, HIFT_CONFIG, SPEAKER_CONFIG, SPEAKER_DIM, TOKENIZER_CONFIG, main
from models.token2wav.load.parts import (
    FLOW,
    FLOW_YAML,
    HIFT,
    SPEAKER_ENCODER,
    SPEECH_TOKENIZER,
    Token2WavParts,
    load_token2wav,
)
from tests.models.token2wav.load.offline_sound import offline_sound

MAX_BYTES = 3_000_000
FILES = {FLOW_YAML, FLOW, HIFT, SPEAKER_ENCODER, SPEECH_TOKENIZER}


@pytest.fixture(scope="module")
def committed(tiny: Path) -> Path:
    return tiny / "assets/token2wav"


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("vocoder")
    main(out)
    return out


@pytest.fixture(scope="module")
def parts(committed: Path) -> Token2WavParts:
    return load_token2wav(committed)


def test_script_builds_the_committed_files(committed: Path, rebuilt: Path) -> None:
    for folder in (committed, rebuilt):
        assert {file.name for file in folder.iterdir()} == FILES
    for name in FILES - {FLOW, HIFT}:  # compared by value below, because the zip container depends on the torch version
        assert (committed / name).read_bytes() == (rebuilt / name).read_bytes(), f"{name} differs from what is built"


@pytest.mark.parametrize("name", [FLOW, HIFT])
def test_script_builds_the_committed_weights(committed: Path, rebuilt: Path, name: str) -> None:
    got, expected = (torch.load(folder / name, weights_only=True) for folder in (committed, rebuilt))
    assert list(got) == list(expected)
    for key, tensor in expected.items():
        assert got[key].dtype == tensor.dtype == torch.float32
        assert torch.equal(got[key], tensor), f"{key}: max diff {(got[key] - tensor).abs().max()}"


def test_two_builds_are_the_same_bytes(rebuilt: Path, tmp_path: Path) -> None:
    main(tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (rebuilt / name).read_bytes(), f"{name} differs between two builds"


def test_size(committed: Path) -> None:
    n_bytes = sum(file.stat().st_size for file in committed.iterdir())
    assert n_bytes < MAX_BYTES, f"expected less than {MAX_BYTES} bytes, got {n_bytes}"


def test_loads_with_the_expected_sizes(parts: Token2WavParts) -> None:
    assert parts.config == FLOW_CONFIG
    assert parts.hift.conv_pre.weight.shape[:2] == (HIFT_CONFIG.base_channels, HIFT_CONFIG.n_mels)
    assert parts.speaker_encoder.config == SPEAKER_CONFIG
    assert parts.speech_tokenizer.config == TOKENIZER_CONFIG
    assert parts.config.speaker_dim == parts.speaker_encoder.config.embedding == SPEAKER_DIM


def test_no_weight_is_trivial(parts: Token2WavParts) -> None:
    single = {"m_source.l_linear.bias", "f0_predictor.classifier.bias"}
    for module in (parts.flow, parts.hift, parts.speaker_encoder, parts.speech_tokenizer):
        for name, tensor in module.named_parameters():
            assert tensor.abs().max() > 1e-3, f"{name}: expected values, got zeros"
            assert name in single or tensor.std() > 1e-3, f"{name}: expected varied values, got std {tensor.std()}"


def test_produces_finite_sound(parts: Token2WavParts) -> None:
    speech_tokens = torch.randint(0, 6561, (3, 50), generator=torch.Generator().manual_seed(5))
    f0, wave = offline_sound(parts, speech_tokens, n_steps=10)
    rms = wave.square().mean(1).sqrt()
    assert ((rms > 0.05) & (rms < 0.3)).all(), f"expected 0.05 to 0.3, got {rms}"
    assert (wave.abs() < 0.98).float().mean() > 0.9999, f"expected no clipping, got a peak of {wave.abs().max()}"
    assert ((f0 > 80) & (f0 < 320)).all(), f"expected a pitch of 80 to 320 Hz, got {f0.min()} to {f0.max()}"
    change = (f0[0] - f0[1]).abs().mean()
    assert change > 5, f"expected pitch to follow the codes by over 5 Hz, got {change}"
    difference = (wave[0] - wave[1]).square().mean().sqrt()
    assert difference > 0.02, f"expected other codes to sound otherwise, got an rms difference of {difference}"


def test_speech_tokenizer_distinguishes_sounds(parts: Token2WavParts) -> None:
    mel = torch.randn(1, 128, 400, generator=torch.Generator().manual_seed(1))
    speech_tokens, _ = parts.speech_tokenizer(mel, torch.tensor([400]))
    assert speech_tokens.unique().numel() > 30, f"expected codes that vary, got {speech_tokens}"
    louder, _ = parts.speech_tokenizer(2 * mel, torch.tensor([400]))
    assert not torch.equal(speech_tokens, louder)
