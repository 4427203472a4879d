"""The forward passes of training equal those of the program."""

import math

import torch
from torch import Tensor, nn

from models.token2wav.hift.source import harmonic_rates, held_lines
from models.token2wav.settings import CampPlusConfig, DiTConfig, EncoderConfig, FlowConfig, HiftConfig
from training.flow import encode, velocity, visible
from training.hift import predict_pitch, synthesize
from training.speaker import vectors
from training.weights import derive, new_flow, new_hift, new_speaker_encoder

SMALL_FLOW = FlowConfig(
    speaker_dim=8,
    encoder=EncoderConfig(width=32, heads=2, inner=64, n_layers=1, n_up_layers=1),
    estimator=DiTConfig(width=32, heads=2, head_dim=16, depth=2, mlp_ratio=2.0),
)


def filled(module: nn.Module) -> nn.Module:
    """The module with no weight left at zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in module.parameters():
            if not weight.any():
                weight.normal_(0, 0.1, generator=generator)
        derive(module)
    return module


def largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def test_encoder_and_velocity_of_the_flow() -> None:
    flow = filled(new_flow(SMALL_FLOW))
    B, T = 2, 30
    tokens = torch.randint(6561, (B, T), generator=torch.Generator().manual_seed(1))
    masks = visible(torch.tensor([0, 7]), torch.tensor([True, True]), T)
    n = torch.full((B,), T)
    with torch.no_grad():
        expected = flow.encoder_proj(flow.encoder.offline(flow.input_embedding(tokens), n))
        got = encode(flow, tokens, masks)
        assert largest(got, expected) < 1e-4
        speaker, noise = torch.randn(B, 80), torch.randn(B, 2 * T, 80)
        schedule = flow.schedule(1)
        solved = flow.solve_offline(expected, 2 * n, torch.zeros(B, 2 * T, 80), speaker, noise, schedule)
        condition = flow.estimator.condition(expected, speaker, torch.zeros(B, 2 * T, 80))
        rate, times = flow.config.cfg_rate, torch.zeros(B)
        with_condition, without = (velocity(flow, noise, times, half, masks.frames) for half in condition.chunk(2))
        assert largest(noise + (1 + rate) * with_condition - rate * without, solved) < 1e-4


def test_masks_are_those_of_served_chunks() -> None:
    masks = visible(torch.tensor([10]), torch.tensor([False]), 150)
    seen = masks.tokens[0, 0]
    assert seen[3].nonzero().flatten().tolist() == list(range(10)), "the prompt sees itself"
    chunk = 4  # tokens 110 to 134 see the prompt, 50 tokens before them, themselves
    expected = [*range(10), *range(60, 135)]
    assert seen[10 + 25 * chunk].nonzero().flatten().tolist() == expected
    assert bool((masks.frames[0, 0, ::2, ::2] == seen).all()), "frames see what their tokens see"


def test_vocoder_with_gradients_equals_the_program() -> None:
    hift = filled(new_hift(HiftConfig(base_channels=16, f0_channels=8)))
    mel = torch.randn(2, 12, 80, generator=torch.Generator().manual_seed(3)) - 5
    n_frames = torch.full((2,), 12)
    with torch.no_grad():
        f0 = predict_pitch(hift.f0_predictor, mel)
        assert largest(f0, hift.f0(mel.transpose(1, 2), n_frames).float()) < 1e-3
        torch.manual_seed(4)
        got = synthesize(hift, mel, f0)
        torch.manual_seed(4)
        noise = torch.randn(2, 480 * 12) * hift.m_source.l_linear.weight.norm()
        source, _ = hift.m_source(f0, held_lines(harmonic_rates(f0.double()), n_frames), noise, n_frames)
        assert largest(got, hift.decode(mel.transpose(1, 2), source, n_frames)) < 1e-5
    synthesize(hift, mel, f0).square().sum().backward()
    alpha = hift.resblocks[0].activations1[0].alpha
    assert alpha.grad is not None and float(alpha.grad.abs().sum()) > 0


def test_speaker_vectors_with_gradients_equal_the_program() -> None:
    encoder = new_speaker_encoder(CampPlusConfig(embedding=8, growth=4, bottleneck=2, channels=8, front_channels=4))
    fbank = torch.randn(2, 130, 80, generator=torch.Generator().manual_seed(3))
    n_frames = torch.tensor([130, 90])
    with torch.no_grad():
        got, expected = vectors(encoder, fbank, n_frames), encoder(fbank, n_frames)
    assert largest(got, expected) < 1e-3 * max(1.0, float(expected.abs().max()))
    vectors(encoder, torch.zeros(2, 130, 80), n_frames).sum().backward()
    assert all(math.isfinite(float(weight.grad.sum())) for weight in encoder.parameters() if weight.grad is not None)
