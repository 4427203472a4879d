"""The speech sampler kernel against PyTorch: drawn tokens, and the state after each step."""

import pytest
import torch
from torch import Tensor

from models.layers.backend import TORCH
from models.layers.kv_cache import KVCache
from models.layers.speech_loop import draw_speech_tokens
from models.layers.speech_state import SpeechState
from models.sampling.settings import DUPLEX_SPEECH, TURN_SPEECH, SpeechSampling
from tests.models.compare import assert_same

pytest.importorskip("triton")

DEVICES = (
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are built for the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
)
N_SPEECH_TOKENS, EOS, STEPS = 62, 61, 7
SETTINGS = (
    DUPLEX_SPEECH,
    TURN_SPEECH,
    SpeechSampling(greedy=True),
    SpeechSampling(top_p=0.5, top_k=0, min_keep=1),
    SpeechSampling(top_p=1.0, top_k=4, repetition_penalty=1.6),
    SpeechSampling(top_p=0.2, top_k=2, min_keep=5, history_per_call=True),
)


def new_state(device: str) -> SpeechState:
    """One slot per setting; the third may draw 4 tokens, the others more; the history of the fourth fills up."""
    cache = KVCache(
        n_layers=1, n_slots=len(SETTINGS), max_len=8, kv_heads=1, head_dim=4, dtype=torch.float32, device=device
    )
    state = SpeechState.allocate(cache)
    for slot, settings in enumerate(SETTINGS):
        state.sampler.configure(slot, settings, EOS, seed=2**63 + slot)
    state.sampler.history[3] = torch.arange(16, device=device) * 3
    state.sampler.count[3] = 13
    state.sampler.min_speech_tokens[:4] = 5
    state.limit.fill_(STEPS)
    state.limit[2] = 4
    state.done.fill_(False)
    return state


def everything(state: SpeechState) -> dict[str, Tensor]:
    sampler = state.sampler
    parts = {name: getattr(state, name) for name in ("speech_tokens", "newest", "done", "bad")}
    return parts | {name: getattr(sampler, name) for name in ("history", "count", "step", "draws")}


def logits_of(step: int, device: str) -> Tensor:
    """Peaked logits with ties; NaN or inf in steps 2 and 3; an early end token in step 1, a valid one in 5 and 6."""
    generator = torch.Generator().manual_seed(step)
    logits = 3 * torch.randn(len(SETTINGS) + 1, N_SPEECH_TOKENS, generator=generator)
    logits[:, 20:26] = logits[:, 20:21]
    logits[1, 7] = float("nan") if step == 2 else logits[1, 7]
    logits[3, 9] = float("inf") if step == 3 else logits[3, 9]
    logits[4, EOS] = 30.0 if step == 5 else logits[4, EOS]
    logits[5, EOS] = 30.0 if step == 1 else logits[5, EOS]
    logits[0, EOS] = 30.0 if step == 6 else logits[0, EOS]
    return logits.to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_kernel_draws_the_same_tokens(device: str) -> None:
    from models.kernels.samplers.speech_sampler import draw_speech_tokens as draw_by_kernel

    slots = torch.tensor([3, 0, 5, 1, 4, 2, len(SETTINGS)], device=device)
    states = [new_state(device), new_state(device)]
    for step in range(STEPS):
        logits = logits_of(step, device)
        drawn = []
        for draw, state in zip((draw_speech_tokens, draw_by_kernel), states, strict=True):
            active = ~state.done[slots] & (slots != len(SETTINGS))
            drawn.append(draw(state, slots, logits, active))
        assert_same(drawn[1], drawn[0], f"tokens of step {step}")
        expected, got = map(everything, states)
        for name, tensor in expected.items():
            assert_same(got[name][:-1], tensor[:-1], f"{name} after step {step}")
    assert states[1].bad.tolist()[:-1] == [True, True, False, False, False, False]
    assert states[1].sampler.step.tolist()[:-1] == [2, 3, 4, 7, 6, STEPS]
    assert (states[1].newest[:-1] == EOS).tolist() == [False, False, False, True, True, False]


@pytest.mark.parametrize("device", DEVICES)
def test_top_p_at_the_border_of_equal_weights(device: str) -> None:
    """Of four tokens of equal weight, the last two contain exactly the weight that top-p drops."""
    from models.kernels.samplers.speech_sampler import draw_speech_tokens as draw_by_kernel

    slots = torch.arange(len(SETTINGS), device=device)
    logits = torch.full((len(SETTINGS), N_SPEECH_TOKENS), float("-inf"), device=device)
    logits[:, 20:24] = 1.0
    drawn = []
    for draw in (draw_speech_tokens, draw_by_kernel):
        state = new_state(device)
        for slot in range(len(SETTINGS)):
            state.sampler.configure(slot, SpeechSampling(top_p=0.5, top_k=0, min_keep=1), EOS, seed=slot)
        state.sampler.count.fill_(1)
        drawn.append(draw(state, slots, logits, slots >= 0))
    assert_same(drawn[1], drawn[0], "speech_tokens")
    assert set(drawn[0].tolist()) == {20, 21}


@pytest.mark.parametrize("device", DEVICES)
def test_any_settings_and_many_equal_scores(device: str) -> None:
    from models.kernels.samplers.speech_sampler import draw_speech_tokens as draw_by_kernel

    generator = torch.Generator().manual_seed(4)
    slots = torch.arange(len(SETTINGS), device=device)
    for case in range(6):
        logits = (2 * torch.randn(len(SETTINGS), N_SPEECH_TOKENS, generator=generator)).round().to(device)
        logits[case % len(SETTINGS), case:] = float("-inf")
        logits = logits.bfloat16() if case % 2 else logits
        numbers = torch.rand(len(SETTINGS), 3, generator=generator).tolist()
        drawn = []
        for draw in (draw_speech_tokens, draw_by_kernel):
            state = new_state(device)
            for slot, (p, k, least) in enumerate(numbers):
                own = SpeechSampling(top_p=0.02 + 0.98 * p, top_k=int(k * 90), min_keep=1 + int(least**3 * 90))
                state.sampler.configure(slot, own, EOS, seed=100 * case + slot)
            state.sampler.count.fill_(1)
            drawn.append(draw(state, slots, logits, slots >= 0))
        assert_same(drawn[1], drawn[0], f"case {case}, settings {numbers}")


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_of_a_step_equal_those_of_pytorch(device: str) -> None:
    from models.kernels.lookup import newest_rows

    embedding = torch.nn.Embedding(N_SPEECH_TOKENS, 48, device=device).requires_grad_(False)
    state = new_state(device)
    state.newest.copy_(torch.arange(len(state.newest)) * 7)
    state.done[[1, 4]] = True
    slots = torch.tensor([4, 0, 1, 5], device=device)
    got = newest_rows(embedding.weight, slots, state.newest, state.done)
    for one, expected in zip(got, TORCH.speech_inputs(embedding, state, slots), strict=True):
        assert_same(one, expected, "rows, whether a call goes on")
    assert got[1].tolist() == [False, True, False, True]
