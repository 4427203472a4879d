"""The text sampler kernels against PyTorch: chosen tokens, flags, and the state after each step."""

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from models.sampling.settings import CHAT_TEXT, DUPLEX_TEXT, HALF_DUPLEX_TEXT, TextSampling
from models.sampling.text import SamplerState, TokenSet, TokenSets
from models.stages.regions import choose
from tests.models.compare import assert_same

pytest.importorskip("triton")

DEVICES = (
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are built for the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
)
VOCAB, HISTORY, STEPS = 4500, 1100, 4  # three blocks of columns, the last partly filled; two programs of history
LISTEN, STOP, PAD = 30, 31, 2
DUPLEX = TokenSet(
    forbidden=(STOP, 32), length_ids=(40, 41), unremembered=(60,), listen_id=LISTEN, stop_id=STOP, pad_id=PAD
)
TURNS = TokenSet(forbidden=(50,), length_ids=(51,), pad_id=1)
ALONE = 77  # the only id that a slot may choose
MUST = TokenSet(allowed={ALONE}, pad_id=PAD)
SETTINGS = {
    "duplex": DUPLEX_TEXT,
    "duplex, greedy": replace(DUPLEX_TEXT, greedy=True),
    "half duplex": replace(HALF_DUPLEX_TEXT, set_index=1),
    "chat": replace(CHAT_TEXT, set_index=1, repetition_window=HISTORY),
    "greedy": TextSampling(greedy=True, repetition_penalty=1.3, set_index=1),
    "everything kept": TextSampling(set_index=1),  # more than RANKED candidates
    "top-p of everything": TextSampling(top_p=0.6, temperature=2.5, set_index=1),
    "top-k of thousands": TextSampling(top_k=3000, top_p=0.95, temperature=4.0, set_index=1),
    "k of a few pieces": TextSampling(top_k=18, top_p=0.0, temperature=0.3),
    "the best alone": TextSampling(top_k=1, top_p=0.9),
    "cold": TextSampling(temperature=0.01, set_index=1),
    "listens by rank": TextSampling(listen_top_k=4, listen_scale=1.4, sign_blind=True, repetition_penalty=1.2),
    "odds of listening": TextSampling(listen_scale=0.5, listen_scale_on_probability=True, top_k=5, length_penalty=1.5),
    "stops, greedy": TextSampling(greedy=True, stop_probe=True),
    "one id": replace(DUPLEX_TEXT, listen_top_k=VOCAB, set_index=2),
    "one id, greedy": TextSampling(greedy=True, stop_probe=True, set_index=2),
}


def new_state(device: str) -> SamplerState:
    """One slot per setting, each with some history; the ring buffer of the chat slot has wrapped."""
    state = SamplerState.allocate(len(SETTINGS), HISTORY, device)
    generator = torch.Generator().manual_seed(1)
    for slot, settings in enumerate(SETTINGS.values()):
        state.configure(slot, settings, seed=2**63 + slot)
        state.history[slot] = torch.randint(0, VOCAB, (HISTORY,), generator=generator).to(device)
        state.count[slot] = 3 * HISTORY + 17 if slot == 3 else 7 * slot
        state.chunk_start[slot] = max(7 * slot - 4, 0)
    return state


def logits_of(step: int, device: str) -> Tensor:
    """Peaked logits with ties; listen is best in step 1, the stop token in step 3; NaN or inf in steps 2 and 3."""
    generator = torch.Generator().manual_seed(step)
    logits = 3 * torch.randn(len(SETTINGS) + 1, VOCAB, generator=generator)
    logits[:, 100:140] = logits[:, 100:101]
    logits[:, 2047:2050] = logits.amax(1, keepdim=True) - 0.25 * (step % 2)  # ties in two blocks
    logits[:, 4000:4100] = float("-inf")
    logits[:, 70], logits[:, 71] = 0.0, -0.0
    if step == 1:
        logits[:, LISTEN] = 13.0
    if step == 3:
        logits[:, STOP] = 40.0
    if step == 2:
        logits[1, 4321], logits[6, 5] = float("nan"), float("inf")
    if step == 3:
        logits[9] = float("-inf")
    return logits.to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_choose_the_same_tokens(device: str) -> None:
    from models.kernels.samplers.text_sampler import choose_tokens

    sets = TokenSets.build([DUPLEX, TURNS, MUST], VOCAB, device)
    order = torch.randperm(len(SETTINGS), generator=torch.Generator().manual_seed(0)).tolist()
    slots = torch.tensor([*order, len(SETTINGS)], device=device)
    fed = slots != len(SETTINGS)
    states = [new_state(device), new_state(device)]
    chosen = []
    for step in range(STEPS):
        logits = logits_of(step, device)[slots]
        sample = fed & ((slots + step) % 5 != 0)
        expected, got = (
            way(state, sets, slots, logits, fed, sample)
            for way, state in zip((choose, choose_tokens), states, strict=True)
        )
        for row, what in enumerate(("ids", "bad", "remembered")):
            assert_same(got[row], expected[row], f"{what} of step {step}, slots {slots.tolist()}")
        for field in fields(SamplerState):
            assert_same(
                getattr(states[1], field.name)[:-1], getattr(states[0], field.name)[:-1], f"{field.name} after {step}"
            )
        chosen.append(expected)
    ids, bad, _ = torch.stack(chosen, 1)
    assert LISTEN in ids[1] and STOP in ids[3], "expected the listen and stop tokens among the chosen ones"
    forced = [slots.tolist().index(list(SETTINGS).index(name)) for name in ("one id", "one id, greedy")]
    assert set(ids[:, forced].flatten().tolist()) <= {ALONE, PAD} and ALONE in ids[:, forced]
    assert int(bad[2].sum()) == 2 and int(bad[3].sum()) == 1
    assert len(ids.unique()) > 15


@pytest.mark.parametrize("device", DEVICES)
def test_ranking_and_bisection_draw_the_same_tokens(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of 16 candidates most settings draw by bisection; the drawn tokens are the same."""
    from models.kernels.samplers import text_sampler as tokens

    monkeypatch.setattr(tokens, "RANKED", 16)
    sets = TokenSets.build([DUPLEX, TURNS, MUST], VOCAB, device)
    slots = torch.arange(len(SETTINGS), device=device)
    yes = torch.ones(len(SETTINGS), dtype=torch.bool, device=device)
    states = [new_state(device), new_state(device)]
    for step in (0, 5):
        logits = logits_of(step, device)[:-1]
        logits = (logits * 4).round() / 4  # ties at every border
        expected = choose(states[0], sets, slots, logits, yes, yes)
        got = tokens.choose_tokens(states[1], sets, slots, logits, yes, yes)
        assert_same(got, expected, f"step {step}")


@pytest.mark.parametrize("device", DEVICES)
def test_infinite_tempered_scores(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are undefined then; ids stay within the vocabulary and writes within the buffers."""
    from models.kernels.samplers.text_sampler import choose_tokens

    settings = [TextSampling(temperature=1e-6), TextSampling(temperature=1e-6, top_k=5, top_p=0.5)] * 3
    slots = torch.arange(len(settings), device=device)
    states = [SamplerState.allocate(len(settings), HISTORY, device) for _ in range(2)]
    for slot, one in enumerate(settings):
        for state in states:
            state.configure(slot, one, seed=slot)
    sets = TokenSets.build([TokenSet(forbidden=(50,))], VOCAB, device)
    logits = logits_of(0, device)[: len(settings)]
    logits[:2, [3000, 50, 900]] = 1e34
    logits[2:4, 4321] = 1e34
    logits[4:6] = -1e34
    yes = torch.ones(len(settings), dtype=torch.bool, device=device)
    expected = choose(states[0], sets, slots, logits, yes, yes)

    made, empty, n_beyond = [], torch.empty, 1000

    def with_room_behind(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        made.append(torch.full((math.prod(shape) + n_beyond,), 77, dtype=dtype, device=device))
        return made[-1][:-n_beyond].view(shape)

    monkeypatch.setattr(torch, "empty", with_room_behind)
    got = choose_tokens(states[1], sets, slots, logits, yes, yes)
    monkeypatch.setattr(torch, "empty", empty)
    assert_same(got, expected, "ids, bad, remembered")
    assert expected[0].tolist() == [900, 900, 4321, 4321, 0, 0]
    assert all(bool((room[-n_beyond:] == 77).all()) for room in made), "written beyond the end of what was made"
    assert len(made) == 8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranked", [256, 2])
def test_borders_of_windows_ranks_and_top_p(device: str, ranked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best id is just inside or just outside the window; listen ranks just high enough or not, among ties; the
    last id that top-p keeps has exactly p above it.
    """
    from models.kernels.samplers import text_sampler as tokens

    monkeypatch.setattr(tokens, "RANKED", ranked)
    window = TextSampling(greedy=True, repetition_penalty=2.0, repetition_window=5)
    chunk = replace(window, repetition_window=3, chunked_window=True)
    rank = TextSampling(greedy=True, repetition_window=0, set_index=1)
    ranks = [replace(rank, listen_top_k=2), replace(rank, listen_top_k=1)]
    settings = [window, window, chunk, chunk, *ranks, *[TextSampling(top_p=0.5, repetition_window=0)] * 16]
    sets = TokenSets.build([TokenSet(), TokenSet(listen_id=9)], 300, device)
    states = [SamplerState.allocate(len(settings), 16, device) for _ in range(2)]
    for state in states:
        for slot, one in enumerate(settings):
            state.configure(slot, one, seed=slot)
        state.count.fill_(20)
        state.chunk_start.fill_(18)
        for slot, number in enumerate((15, 14, 15, 14)):
            state.history[slot, number % 16] = 7
    slots = torch.arange(len(settings), device=device)
    logits = torch.full((len(settings), 300), float("-inf"), device=device)
    logits[:6, 7:10] = torch.tensor([3.0, 2.0, 2.0], device=device)
    logits[6:, 280:284] = 1.0
    yes = torch.ones(len(settings), dtype=torch.bool, device=device)
    expected = choose(states[0], sets, slots, logits, yes, yes)
    assert_same(tokens.choose_tokens(states[1], sets, slots, logits, yes, yes), expected, "ids, bad, remembered")
    assert expected[0, :6].tolist() == [8, 7, 8, 7, 9, 7]
    assert set(expected[0, 6:].tolist()) == {280, 281, 282}
