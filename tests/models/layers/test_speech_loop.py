"""The speech-token loop over slots: what ends a call, and that a finished slot does not change."""

import pytest
import torch
from torch import Tensor

from models.layers import speech_loop as speech
from models.layers.speech_state import SpeechState
from models.omni import OmniModel
from models.sampling.settings import SpeechSampling
from models.sampling.text import TokenSet, TokenSets
from models.stages.runner import Runner
from tests.models.layers.speech_reference import PlainSpeaker
from tests.models.stages.slot_copies import assert_fresh, assert_same, copy_state

KV = 128
# top-k leaves few borders between tokens, far apart, so that rounding does not change a draw.
DRAWN, BEST = SpeechSampling(), SpeechSampling(greedy=True)


@pytest.fixture
def runner(tiny_model: OmniModel) -> Runner:
    sets = TokenSets.build([TokenSet()], tiny_model.config.vocab_size)
    return Runner(tiny_model, sets, n_slots=3, llm_len=16, tts_len=KV)


@pytest.fixture
def state(runner: Runner) -> SpeechState:
    return runner.state.speech


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 32, generator=torch.Generator().manual_seed(seed))


def begin(
    runner: Runner, slots: list[int], own: list[Tensor], *, min_speech_tokens: int = 0, limit: int = 40
) -> Tensor:
    n_rows = torch.tensor([len(part) for part in own])
    padded = torch.full((len(own), int(n_rows.max()) + 2, 32), 7.0)  # padding that is not read
    for row, part in enumerate(own):
        padded[row, : len(part)] = part
    every = torch.ones(len(own), dtype=torch.int64)
    call = speech.SpeechInputs(padded, n_rows, every * min_speech_tokens, every * limit)
    model, state = runner.model, runner.state.speech
    return speech.begin(model.tts, model.backend, state, torch.tensor(slots), call, KV)


def step(runner: Runner, slots: list[int], times: int = 1) -> list[list[int]]:
    model, state = runner.model, runner.state.speech
    return [speech.step(model.tts, model.backend, state, torch.tensor(slots), KV).tolist() for _ in range(times)]


def drawn(state: SpeechState, slot: int) -> list[int]:
    return state.speech_tokens[slot, : state.sampler.step[slot]].tolist()


@pytest.mark.parametrize("settings", [DRAWN, BEST], ids=["drawn", "best"])
def test_loop_equals_plain_loop(runner: Runner, state: SpeechState, eos: int, settings: SpeechSampling) -> None:
    state.sampler.configure(1, settings, eos, seed=4)
    own = rows(5)
    first = begin(runner, [1], [own], limit=12)
    later = step(runner, [1], 11)
    expected, ended = PlainSpeaker(runner.model.tts, settings, seed=4, eos=eos).call(
        own, min_speech_tokens=0, max_speech_tokens=12
    )
    assert not ended
    assert [first.tolist(), *later] == [[token] for token in expected]
    assert drawn(state, 1) == expected
    assert state.done[1], "expected the limit to end the call"
    assert state.cache.lengths[1] == 5 + 11, f"expected an unfed last token, got {state.cache.lengths[1]} rows"


def test_end_token_ends_a_call(runner: Runner, state: SpeechState, eos: int) -> None:
    state.sampler.configure(0, BEST, eos)
    begin(runner, [0], [rows(5)])
    step(runner, [0], 9)
    spoken = drawn(state, 0)
    end = spoken[6]
    assert end not in spoken[:6]

    state.reset(torch.tensor([0]))
    state.sampler.configure(0, BEST, end)
    begin(runner, [0], [rows(5)])
    for n_drawn in range(1, 7):
        assert not state.done[0], f"done after {n_drawn} of 7 tokens"
        step(runner, [0])
    assert state.done[0]
    assert drawn(state, 0) == spoken[:7]
    assert state.cache.lengths[0] == 5 + 6


def test_end_token_is_not_drawn_before_the_minimum(runner: Runner, state: SpeechState, eos: int) -> None:
    state.sampler.configure(0, BEST, eos)
    begin(runner, [0], [rows(5)], limit=5)
    step(runner, [0], 4)
    end = drawn(state, 0)[3]
    for fewest, n_drawn in ((3, 4), (4, 12)):
        state.reset(torch.tensor([0]))
        state.sampler.configure(0, BEST, end)
        begin(runner, [0], [rows(5)], min_speech_tokens=fewest, limit=12)
        step(runner, [0], 11)
        got = drawn(state, 0)
        assert end not in got[:fewest]
        assert len(got) == n_drawn, f"at least {fewest}: expected {n_drawn} tokens, got {got}"


def test_call_may_be_limited_to_one_token(runner: Runner, state: SpeechState, eos: int) -> None:
    state.sampler.configure(0, BEST, eos)
    begin(runner, [0], [rows(5)], limit=1)
    assert state.done[0]
    assert state.cache.lengths[0] == 5
    assert len(drawn(state, 0)) == 1


def test_finished_slots_do_not_change(runner: Runner, state: SpeechState, eos: int) -> None:
    for slot in (0, 2):
        state.sampler.configure(slot, DRAWN, eos, seed=slot)
    begin(runner, [0], [rows(5)], limit=4)
    begin(runner, [2], [rows(7, seed=1)], limit=11)
    step(runner, [0, 2], 3)
    assert state.done.tolist()[:3] == [True, True, False]
    before = copy_state(runner.state)
    returned = step(runner, [0, 2], 7)
    assert_same(runner.state, before, [0, 1])
    assert all(speech_tokens[0] == eos for speech_tokens in returned), (
        f"expected the end token for a finished slot, got {returned}"
    )
    assert len(drawn(state, 2)) == 11
    before = copy_state(runner.state)
    step(runner, [0, 2], 2)
    assert_same(runner.state, before, [0, 1, 2])


def test_slots_in_different_phases_equal_single_runs(runner: Runner, state: SpeechState, eos: int) -> None:
    pad = runner.state.scratch
    own = {0: rows(3), 1: rows(9, seed=1), 2: rows(1, seed=2)}
    settings = {0: DRAWN, 1: BEST, 2: SpeechSampling(temperature=0.5, top_k=5, history_per_call=True)}
    for slot in own:
        state.sampler.configure(slot, settings[slot], eos, seed=40 + slot)
    begin(runner, [0], [own[0]], limit=30)
    step(runner, [0, pad], 4)
    begin(runner, [2, 1], [own[2], own[1]], limit=9)
    step(runner, [1, 0, 2, pad], 8)
    step(runner, [0, 2], 17)
    assert state.done[:3].all()
    for slot in own:
        alone = PlainSpeaker(runner.model.tts, settings[slot], seed=40 + slot, eos=eos)
        expected, _ = alone.call(own[slot], min_speech_tokens=0, max_speech_tokens=30 if slot == 0 else 9)
        assert drawn(state, slot) == expected, f"slot {slot}: expected {expected}, got {drawn(state, slot)}"


def test_slot_without_a_call_does_not_change(runner: Runner, state: SpeechState, eos: int) -> None:
    for slot in (0, 1):
        state.sampler.configure(slot, DRAWN, eos, seed=slot)
    begin(runner, [0], [rows(5)], limit=4)
    step(runner, [0], 1)
    before = copy_state(runner.state)
    cache = [tensor[0].clone() for tensor in state.cache.tensors()]
    draws, history = int(state.sampler.draws[0]), state.sampler.history[0].clone()
    speech_tokens = begin(runner, [0, 1], [rows(0), rows(3)])
    assert speech_tokens[0] == eos
    assert_same(runner.state, before, [0])
    step(runner, [1], 3)
    assert drawn(state, 1) != []
    for tensor, before in zip(state.cache.tensors(), cache, strict=True):
        assert torch.equal(tensor[0], before), "expected an unchanged cache of a slot without a call"
    assert int(state.sampler.draws[0]) == draws
    assert torch.equal(state.sampler.history[0], history)
    # Its own call continues unchanged.
    step(runner, [0], 2)
    expected, _ = PlainSpeaker(runner.model.tts, DRAWN, seed=0, eos=eos).call(
        rows(5), min_speech_tokens=0, max_speech_tokens=4
    )
    assert drawn(state, 0) == expected


def test_no_token_is_drawn_before_a_call(runner: Runner, state: SpeechState) -> None:
    before = copy_state(runner.state)
    step(runner, [0, 1, 2])
    assert_same(runner.state, before, [0, 1, 2])
    assert state.done.all()


def test_reset_clears_the_state(runner: Runner, state: SpeechState, eos: int) -> None:
    for slot in (0, 1):
        state.sampler.configure(slot, DRAWN, eos, seed=9)
    state.cache.windows[0] = 3
    begin(runner, [0, 1], [rows(4), rows(6)], limit=9)
    step(runner, [0, 1], 3)
    before = copy_state(runner.state)
    state.reset(torch.tensor([0]))
    assert_same(runner.state, before, [1, 2])
    assert_fresh(runner.state, [0])
    for name, empty in (("speech_tokens", 0), ("newest", 0), ("limit", 0), ("done", True)):
        assert (getattr(state, name)[0] == empty).all(), f"{name}: expected {empty}, got {getattr(state, name)[0]}"
