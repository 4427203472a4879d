"""Codes to mel against plain Euler steps, offline and by chunk; speaker, schedule, half precision."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.errors import SettingsError
from models.layers.weights import assign_weights
from models.token2wav.flow.flow import Flow
from models.token2wav.flow.flow_state import encode, solve
from models.token2wav.flow.solver import time_grid
from models.token2wav.settings import FRAMES_PER_TOKEN
from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.flow.flow_reference import Conformer, Estimator
from tests.models.token2wav.flow.flows import CONFIG, LOOKAHEAD, Rig, random_codes, random_flow, split

FLOW = random_flow()
N_MELS = CONFIG.n_mels
TOLERANCE = 1e-4  # float32 against float64 over three steps, mel about 4 large; measured 5e-6


def noise_like(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class SlowSolve:
    """The flow of one session by its formula: an estimator of its own for every step and for both halves."""

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
def test_chunks_are_plain_euler_steps(n_steps):
    """Noise columns, guidance, and for every step its own keys, values and tails; the first chunk has a prompt."""
    rig, slots = Rig(FLOW, prompts=(30,), n_steps=n_steps), torch.tensor([1])
    rig.state.speaker[1] = speaker = noise_like(0, N_MELS)
    rig.state.prompt[1] = 60  # as if all were prompt: nothing is cut
    slow = SlowSolve(rig.noise, n_steps)
    for i, (speech_tokens, last) in enumerate(split(random_codes(1, 24), [7, 1, 9])):
        n = len(speech_tokens) if last else len(speech_tokens) - LOOKAHEAD
        padded, n_speech_tokens = (
            F.pad(speech_tokens, (0, 12 - len(speech_tokens)))[None],
            torch.tensor([len(speech_tokens)]),
        )
        mu = encode(FLOW, rig.state, slots, padded, n_speech_tokens, torch.tensor([last]), width=80)
        prompt = noise_like(2, *mu.shape) if i == 0 else None
        n_frames = torch.tensor([2 * n])
        got = solve(FLOW, rig.state, rig.schedule, rig.noise, slots, mu, n_frames, 80, prompt)[0, : 2 * n]
        given_prompt = torch.zeros_like(mu) if prompt is None else prompt
        expected = slow(mu[0, : 2 * n], speaker, given_prompt[0, : 2 * n])
        assert_close(got, expected.float(), TOLERANCE, f"{n_steps} steps, chunk {i}")


def test_offline_is_plain_euler_steps_of_each_row():
    """Rows of different length in one batch."""
    lengths, n_steps = [8, 5], 2
    speech_tokens = torch.stack([F.pad(random_codes(n, n), (0, 8 - n)) for n in lengths])
    prompt, speaker, noise = noise_like(1, 2, 16, N_MELS), noise_like(2, 2, N_MELS), noise_like(3, 2, 16, N_MELS)
    got = FLOW.offline(speech_tokens, torch.tensor(lengths), prompt, speaker, noise, FLOW.schedule(n_steps))
    for row, n in enumerate(lengths):
        hidden = Conformer(FLOW.encoder, CONFIG.encoder.heads)(FLOW.input_embedding(speech_tokens[row, :n]), last=True)
        mu = hidden @ FLOW.encoder_proj.weight.double().T + FLOW.encoder_proj.bias
        expected = SlowSolve(noise[row], n_steps)(mu, speaker[row], prompt[row, : 2 * n])
        assert_close(got[row, : 2 * n], expected.float(), TOLERANCE, f"row {row}")


def test_only_the_direction_of_a_speaker_counts():
    weight, bias = (part.double() for part in FLOW.spk_embed_affine_layer.parameters())
    embedding = noise_like(0, 2, CONFIG.speaker_dim)
    expected = (embedding / embedding.square().sum(1, keepdim=True).sqrt()).double() @ weight.T + bias
    for scale in (1, 40):
        assert_close(FLOW.speaker(scale * embedding), expected.float(), 1e-6, f"times {scale}")
    assert_close(FLOW.speaker(torch.zeros(1, CONFIG.speaker_dim)), bias.float()[None], 0.0, "no speaker")


def test_a_schedule_is_its_grid():
    """Widths of the steps, and what the time contributes at the beginning of each."""
    schedule, times = FLOW.schedule(4), time_grid(4)
    assert_close(torch.stack([width for width, _ in schedule.steps]), times.diff().float(), 1e-7)
    for number, (_, got) in enumerate(schedule.steps):
        expected = FLOW.decoder.estimator.modulation(times[number : number + 1])
        for a, b, what in zip(got, expected, ("blocks", "final"), strict=True):
            assert_close(a, b[0], 1e-5, f"{what} of step {number}")
    with pytest.raises(SettingsError, match="euler steps: expected at least 1, got 0"):
        FLOW.schedule(0)


def test_half_precision_keeps_the_solve_in_float32():
    """Weights and caches in bfloat16, mel and noise not; mel of size 1.6 is off by 0.01 in the mean."""
    with torch.device("meta"):
        half = Flow(CONFIG)
    weights = {name: weight.bfloat16() for name, weight in FLOW.state_dict().items()}
    rigs = Rig(assign_weights(half, weights, "cpu", torch.bfloat16)), Rig(FLOW)
    for rig in rigs:
        rig.begin({0: 0})
    kept = rigs[0].state
    for rows in (kept.code_rows, kept.mel_rows, *kept.dit_rows, kept.up_tail, kept.lookahead_tail, *kept.dit_tails):
        assert rows.dtype == torch.bfloat16, f"expected bfloat16, got {rows.dtype}"
    assert kept.speaker.dtype == torch.float32, f"expected float32, got {kept.speaker.dtype}"
    for i in range(3):
        got, expected = (rig.step({0: (random_codes(i, 28), False)})[0] for rig in rigs)
        assert got.dtype == torch.float32, f"expected float32, got {got.dtype}"
        assert_close((got - expected).abs().mean(), torch.tensor(0.0), 0.05, f"mean difference of chunk {i}")


def test_offline_rows_do_not_see_each_other():
    """Another row's codes, prompt and noise change nothing: the same bits."""
    lengths = torch.tensor([9, 6])
    speech_tokens, noise = random_codes(0, 18).view(2, 9), noise_like(0, 2, 18, N_MELS)
    other = speech_tokens.clone(), noise.clone()
    other[0][0], other[1][0] = 3, 1e3
    speaker, schedule = noise_like(1, 2, N_MELS), FLOW.schedule(2)
    got, expected = (
        FLOW.offline(given[0], lengths, given[1], speaker, given[1], schedule)[1, : FRAMES_PER_TOKEN * 6]
        for given in (other, (speech_tokens, noise))
    )
    assert_same(got, expected)
