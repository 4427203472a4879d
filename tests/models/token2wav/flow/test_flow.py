"""Tokens to mel against plain Euler steps, offline and by chunk; speaker, schedule, half precision."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.errors import SettingsError
from models.layers.weights import assign_weights, on_meta
from models.token2wav.flow.flow import Flow
from models.token2wav.flow.flow_state import ChunkSlots, ChunkTokens, SolveInputs, encode, solve
from models.token2wav.flow.solver import time_grid
from models.token2wav.settings import FRAMES_PER_TOKEN
from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.flow.flow_reference import Conformer, Estimator
from tests.models.token2wav.flow.flows import CONFIG, LOOKAHEAD, Rig, random_flow, random_tokens, split

FLOW = random_flow()
N_MELS = CONFIG.n_mels
TOLERANCE = 1e-4  # float32 against float64 over three steps, mel values of about 4; measured 5e-6


def noise_like(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class SlowSolve:
    """The flow of one session by its formula, with a separate estimator for every step and each half."""

    def __init__(self, noise: Tensor, n_steps: int):
        self.noise, self.times, self.n_cached = noise, time_grid(n_steps), 0
        self.pairs = [(Estimator(FLOW.decoder.estimator), Estimator(FLOW.decoder.estimator)) for _ in range(n_steps)]

    def __call__(self, mu: Tensor, speaker: Tensor, prompt: Tensor) -> Tensor:
        """mu, prompt [T, n_mels], speaker [n_mels]. Returns: [T, n_mels]."""
        x = self.noise[self.n_cached : self.n_cached + len(mu)].double()
        self.n_cached += len(mu)
        rate, nothing = FLOW.config.cfg_rate, torch.zeros_like(mu)
        for (now, then), (conditioned, free) in zip(pairwise(self.times.tolist()), self.pairs, strict=True):
            conditional = conditioned(now, x, mu, speaker, prompt)
            unconditional = free(now, x, nothing, torch.zeros_like(speaker), nothing)
            x = x + (then - now) * ((1 + rate) * conditional - rate * unconditional)
        return x


@pytest.mark.parametrize("n_steps", [1, 3])
def test_chunks_equal_plain_euler_steps(n_steps):
    """Noise columns, guidance, and separate keys, values and tails for every step; the first chunk has a prompt."""
    rig, slots = Rig(FLOW, prompts=(30,), n_steps=n_steps), torch.tensor([1])
    rig.state.speaker[1] = speaker = noise_like(0, N_MELS)
    rig.state.prompt[1] = 60  # longer than the turn, so nothing is trimmed
    slow = SlowSolve(rig.noise, n_steps)
    for i, (speech_tokens, last) in enumerate(split(random_tokens(1, 24), [7, 1, 9])):
        n = len(speech_tokens) if last else len(speech_tokens) - LOOKAHEAD
        padded, n_speech_tokens = (
            F.pad(speech_tokens, (0, 12 - len(speech_tokens)))[None],
            torch.tensor([len(speech_tokens)]),
        )
        chunk = ChunkSlots(slots, 80)
        mu = encode(FLOW, rig.state, chunk, ChunkTokens(padded, n_speech_tokens, torch.tensor([last])))
        prompt = noise_like(2, *mu.shape) if i == 0 else None
        n_frames = torch.tensor([2 * n])
        inputs = SolveInputs(rig.schedule, rig.noise, mu, n_frames, prompt)
        got = solve(FLOW, rig.state, chunk, inputs)[0, : 2 * n]
        given_prompt = torch.zeros_like(mu) if prompt is None else prompt
        expected = slow(mu[0, : 2 * n], speaker, given_prompt[0, : 2 * n])
        assert_close(got, expected.float(), TOLERANCE, f"{n_steps} steps, chunk {i}")


def test_offline_equals_plain_euler_steps_of_each_row():
    """Rows of different length in one batch."""
    lengths, n_steps = [8, 5], 2
    speech_tokens = torch.stack([F.pad(random_tokens(n, n), (0, 8 - n)) for n in lengths])
    prompt, speaker, noise = noise_like(1, 2, 16, N_MELS), noise_like(2, 2, N_MELS), noise_like(3, 2, 16, N_MELS)
    got = FLOW.offline(speech_tokens, torch.tensor(lengths), prompt, speaker, noise, FLOW.schedule(n_steps))
    for row, n in enumerate(lengths):
        hidden = Conformer(FLOW.encoder, CONFIG.encoder.heads)(FLOW.input_embedding(speech_tokens[row, :n]), last=True)
        mu = hidden @ FLOW.encoder_proj.weight.double().T + FLOW.encoder_proj.bias
        expected = SlowSolve(noise[row], n_steps)(mu, speaker[row], prompt[row, : 2 * n])
        assert_close(got[row, : 2 * n], expected.float(), TOLERANCE, f"row {row}")


def test_speaker_projection_ignores_the_length():
    weight, bias = (part.double() for part in FLOW.spk_embed_affine_layer.parameters())
    embedding = noise_like(0, 2, CONFIG.speaker_dim)
    expected = (embedding / embedding.square().sum(1, keepdim=True).sqrt()).double() @ weight.T + bias
    for scale in (1, 40):
        assert_close(FLOW.speaker(scale * embedding), expected.float(), 1e-6, f"times {scale}")
    assert_close(FLOW.speaker(torch.zeros(1, CONFIG.speaker_dim)), bias.float()[None], 0.0, "no speaker")


def test_schedule_contains_step_widths_and_modulations():
    """The modulations are those of the time at the beginning of each step."""
    schedule, times = FLOW.schedule(4), time_grid(4)
    assert_close(torch.stack([width for width, _ in schedule.steps]), times.diff().float(), 1e-7)
    for number, (_, got) in enumerate(schedule.steps):
        expected = FLOW.decoder.estimator.modulation(times[number : number + 1])
        for a, b, what in zip(got, expected, ("blocks", "final"), strict=True):
            assert_close(a, b[0], 1e-5, f"{what} of step {number}")
    with pytest.raises(SettingsError, match="euler steps: expected at least 1, got 0"):
        FLOW.schedule(0)


def test_half_precision_keeps_the_solve_in_float32():
    """Weights and caches in bfloat16, mel and noise in float32; mel values of about 1.6 differ by 0.01 on average."""
    with on_meta():
        half = Flow(CONFIG)
    weights = {name: weight.bfloat16() for name, weight in FLOW.state_dict().items()}
    rigs = Rig(assign_weights(half, weights, "cpu", torch.bfloat16)), Rig(FLOW)
    for rig in rigs:
        rig.begin({0: 0})
    kept = rigs[0].state
    for rows in (kept.token_rows, kept.mel_rows, *kept.dit_rows, kept.up_tail, kept.lookahead_tail, *kept.dit_tails):
        assert rows.dtype == torch.bfloat16, f"expected bfloat16, got {rows.dtype}"
    assert kept.speaker.dtype == torch.float32, f"expected float32, got {kept.speaker.dtype}"
    for i in range(3):
        got, expected = (rig.step({0: (random_tokens(i, 28), False)})[0] for rig in rigs)
        assert got.dtype == torch.float32, f"expected float32, got {got.dtype}"
        assert_close((got - expected).abs().mean(), torch.tensor(0.0), 0.05, f"mean difference of chunk {i}")


def test_offline_rows_are_independent():
    """Bit-identical for other tokens, prompt and noise of another row."""
    lengths = torch.tensor([9, 6])
    speech_tokens, noise = random_tokens(0, 18).view(2, 9), noise_like(0, 2, 18, N_MELS)
    other = speech_tokens.clone(), noise.clone()
    other[0][0], other[1][0] = 3, 1e3
    speaker, schedule = noise_like(1, 2, N_MELS), FLOW.schedule(2)
    got, expected = (
        FLOW.offline(given[0], lengths, given[1], speaker, given[1], schedule)[1, : FRAMES_PER_TOKEN * 6]
        for given in (other, (speech_tokens, noise))
    )
    assert_same(got, expected)
