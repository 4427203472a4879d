"""Three ways of speaking against a plain loop on the host, over slots, turns and chunks."""

from itertools import chain

import pytest
import torch
from torch import Tensor

from models.config import load_config
from models.errors import ContextOverflowError, NumericsError, SettingsError, ShapeError, SlotError
from models.load import load_model
from models.omni import OmniModel
from models.random_weights import random_model
from models.rotary import rotary_angles, rotate
from models.runner import Runner
from models.sampling import TokenSet, TokenSets
from models.sampling_settings import CodeSampling
from models.speaker import CODES_PER_SECOND, CodeStream, Speaker
from models.speech import CODES_PER_CALL
from tests.models.compare import assert_close
from tests.models.plain_speech import PlainSpeaker, PlainStream
from tests.models.slot_copies import assert_same, copy_state

WIDTH = 32
DRAWN, BEST = CodeSampling(), CodeSampling(greedy=True)
# Duplex units draw from all codes; top-k here, so that rounding does not decide a draw.
UNIT = CodeSampling(top_p=1.0, top_k=8, history_per_call=True, repetition_penalty=1.3)
KINDS = ("full_attention", "sliding_window", "sliding_recompute", "reindex")


def make_speaker(model: OmniModel, n_slots: int = 4, tts_len: int = 256) -> Speaker:
    sets = TokenSets.build([TokenSet()], model.config.vocab_size)
    return Speaker(Runner(model, sets, n_slots=n_slots, llm_len=16, tts_len=tts_len))


@pytest.fixture
def speaker(tiny_model: OmniModel) -> Speaker:
    return make_speaker(tiny_model)


@pytest.fixture
def eos(tiny_model: OmniModel) -> int:
    return tiny_model.config.tts_config.eos_code


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))


def new_code(codes: list[int], at_least: int) -> int:
    """A code that occurs first at place `at_least` or behind it."""
    return next(code for place, code in enumerate(codes) if place >= at_least and code not in codes[:place])


@pytest.mark.parametrize("settings", [DRAWN, BEST], ids=["drawn", "best"])
def test_answer_equals_the_plain_loop(speaker: Speaker, eos: int, settings: CodeSampling) -> None:
    tts, own = speaker.runner.model.tts, rows(6)
    speaker.start_turn(1, settings, seed=5)
    got = speaker.answer(1, own, min_codes=3, max_codes=60)
    expected, _ = PlainSpeaker(tts, settings, seed=5, eos=eos).call(own, min_codes=3, max_codes=60)
    assert got == expected[:59], f"at the cap: expected all but the last of {expected}, got {got}"
    assert speaker.rows(1) == speaker.state.cache.lengths[1] == 6 + 59

    end = new_code(expected, 30)
    speaker.start_turn(1, settings, seed=5, eos=end)
    got = speaker.answer(1, own, min_codes=3, max_codes=60)
    expected, ended = PlainSpeaker(tts, settings, seed=5, eos=end).call(own, min_codes=3, max_codes=60)
    assert ended
    assert got == expected, f"at the end code: expected {expected}, got {got}"
    assert speaker.rows(1) == speaker.state.cache.lengths[1] == 6 + len(expected)


def test_an_answer_has_at_least_50_codes(speaker: Speaker) -> None:
    speaker.start_turn(0, BEST)
    free = speaker.answer(0, rows(6), max_codes=80)
    early, late = free[2], new_code(free, 52)
    speaker.start_turn(0, BEST, eos=early)
    assert len(speaker.answer(0, rows(6), max_codes=60)) >= 50
    speaker.start_turn(0, BEST, eos=late)
    assert speaker.answer(0, rows(6), max_codes=80) == free[: free.index(late)]


def test_units_equal_the_plain_loop(speaker: Speaker, eos: int) -> None:
    plain = PlainSpeaker(speaker.runner.model.tts, UNIT, seed=8, eos=eos)
    speaker.start_turn(2, UNIT, seed=8)
    n_rows = 0
    for unit, n in enumerate((9, 1, 4)):
        own = rows(n, seed=unit)
        (call,) = speaker.unit([2], [own], may_end=[unit == 0])
        expected, ended = plain.call(own, min_codes=0 if unit == 0 else 26, max_codes=26)
        assert not ended
        assert call.codes == expected[:25], f"unit {unit}: expected {expected[:25]}, got {call.codes}"
        n_rows += n + 25
        assert speaker.rows(2) == speaker.state.cache.lengths[2] == speaker.state.cache.positions[2] == n_rows


@pytest.mark.parametrize("may_end", [True, False])
def test_only_some_units_may_end(speaker: Speaker, eos: int, may_end: bool) -> None:
    tts, own = speaker.runner.model.tts, rows(4)
    speaker.start_turn(0, UNIT, seed=1)
    free = speaker.unit([0], [own], may_end=[True])[0].codes
    end = new_code(free, 9)
    speaker.start_turn(0, UNIT, seed=1, eos=end)
    got = speaker.unit([0], [own], may_end=[may_end])[0].codes
    expected, ended = PlainSpeaker(tts, UNIT, seed=1, eos=end).call(own, min_codes=0 if may_end else 26, max_codes=26)
    assert ended == may_end
    assert got == expected[:25]
    assert len(got) == (free.index(end) if may_end else 25)


def test_an_end_at_the_last_code_costs_none(speaker: Speaker) -> None:
    speaker.start_turn(0, UNIT, seed=1)
    (call,) = speaker.call([0], [rows(4)], min_codes=[0], max_codes=[26])
    assert new_code(call.codes, 25) == call.codes[25]
    speaker.start_turn(0, UNIT, seed=1, eos=call.codes[25])
    (again,) = speaker.call([0], [rows(4)], min_codes=[0], max_codes=[26])
    assert again.ended
    assert again.codes == call.codes[:25]
    speaker.start_turn(0, UNIT, seed=1, eos=call.codes[25])
    assert speaker.unit([0], [rows(4)], may_end=[True])[0].codes == call.codes[:25]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reachable", [False, True], ids=["capped", "ends"])
def test_a_stream_equals_the_plain_loop(speaker: Speaker, eos: int, kind: str, reachable: bool) -> None:
    cap, window, turn = 32, 20, [rows(n, seed=n) for n in (7, 3, 6, 5, 4)]
    if reachable:
        speaker.start_turn(1, BEST)
        first = CodeStream(speaker, 1, kind, window, cap).push(turn[0], final=False)
        eos = new_code(list(chain(*first)), 11)
    speaker.start_turn(1, BEST, eos=eos)
    stream = CodeStream(speaker, 1, kind, window, max_codes=cap)
    plain = PlainStream(
        PlainSpeaker(
            speaker.runner.model.tts, BEST, seed=0, eos=eos, window=window if kind == "sliding_window" else None
        ),
        kind,
        cap,
        CODES_PER_SECOND,
    )
    before = 0
    for number, chunk in enumerate(turn):
        final = number == len(turn) - 1
        got, expected = stream.push(chunk, final), plain.push(chunk, final)
        assert got == expected, f"chunk {number}: expected {expected}, got {got}"
        cache, model = speaker.state.cache, plain.speaker.model
        held = (speaker.rows(1), int(cache.lengths[1]), int(cache.positions[1]))
        n_rows = len(model.positions)
        if kind == "sliding_window":  # rows out of sight when a chunk begins make room
            n_rows -= max(0, before - window)
        before = len(model.positions)
        assert held == (n_rows, n_rows, model.next_position), f"chunk {number}"
    assert stream.flush() == plain.left
    assert stream.flush() == [], "expected nothing after a flush"
    assert sum(map(len, plain.spoken)) == 5 * cap or reachable
    assert len(plain.spoken[0]) < cap or not reachable


def test_ways_of_attention_differ(speaker: Speaker) -> None:
    said = {}
    for kind in KINDS:
        speaker.start_turn(0, BEST)
        stream = CodeStream(speaker, 0, kind, window=20, max_codes=32)
        for seed in range(4):
            stream.push(rows(5, seed), final=False)
        said[kind] = tuple(stream.flush())
    assert len(set(said.values())) == len(KINDS), f"expected four different ends, got {said}"


def test_codes_are_carried_over_and_flushed(speaker: Speaker) -> None:
    speaker.start_turn(0, DRAWN, seed=2)
    stream = CodeStream(speaker, 0, "full_attention", window=300, max_codes=40)
    calls = []
    for number, sizes in enumerate(([25], [25, 25], [25])):
        batches = stream.push(rows(4, number), final=number == 2)
        assert [len(batch) for batch in batches] == sizes
        calls += batches
    rest = stream.flush()
    assert len(rest) == 3 * 40 - 4 * 25

    plain = PlainSpeaker(speaker.runner.model.tts, DRAWN, seed=2, eos=int(speaker.state.sampler.eos_id[0]))
    once = PlainStream(plain, "full_attention", 40, 10**6)
    for number in range(3):
        once.push(rows(4, number), final=False)
    assert [*chain(*calls), *rest] == once.left


def test_a_final_chunk_that_ends_gives_all(speaker: Speaker) -> None:
    speaker.start_turn(0, BEST)
    free = speaker.answer(0, rows(4), min_codes=0, max_codes=40)
    speaker.start_turn(0, BEST, eos=new_code(free, 28))
    stream = CodeStream(speaker, 0, "full_attention", window=300, max_codes=40)
    said = free[: free.index(new_code(free, 28))]
    assert stream.push(rows(4), final=True) == [said[:25], said[25:]]
    assert stream.buffer == []

    speaker.start_turn(0, BEST, eos=new_code(free, 28))
    stream = CodeStream(speaker, 0, "full_attention", window=300, max_codes=40)
    assert stream.push(rows(4), final=False) == [said[:25]]
    assert stream.buffer == said[25:]


def test_a_batch_equals_each_alone(tiny_model: OmniModel) -> None:
    together = make_speaker(tiny_model)
    own, settings = [rows(8), rows(1, 1), rows(30, 2)], [DRAWN, BEST, UNIT]
    order, ends, calls = [3, 0, 2], [None] * 3, []
    for ask in ("free", "ends"):
        for slot, how, end in zip(order, settings, ends, strict=True):
            together.start_turn(slot, how, seed=slot, eos=end)
        # Slot 0 has spoken before the others start.
        together.unit([0], [rows(3, 9)], may_end=[False])
        calls = together.call(order, own, min_codes=[0, 4, 0], max_codes=[50, 7, 26])
        if ask == "free":
            ends = [new_code(calls[0].codes, 30), None, new_code(calls[2].codes, 5)]
    assert [call.ended for call in calls] == [True, False, True]
    for place, slot in enumerate(order):
        alone = make_speaker(tiny_model, n_slots=1)
        alone.start_turn(0, settings[place], seed=slot, eos=ends[place])
        if slot == 0:
            alone.unit([0], [rows(3, 9)], may_end=[False])
        (call,) = alone.call([0], [own[place]], min_codes=[[0, 4, 0][place]], max_codes=[[50, 7, 26][place]])
        assert calls[place] == call, f"slot {slot}: expected {call}, got {calls[place]}"
        assert together.rows(slot) == alone.rows(0) == together.state.cache.lengths[slot]


def test_a_call_leaves_other_slots_alone(speaker: Speaker) -> None:
    for slot in range(4):
        speaker.start_turn(slot, DRAWN, seed=slot)
    speaker.unit([0, 1, 3], [rows(2), rows(3), rows(4)], may_end=[True] * 3)
    before = copy_state(speaker.runner.state)
    speaker.unit([2, 0, 3], [rows(2), rows(5), rows(6)], may_end=[False] * 3)
    assert_same(speaker.runner.state, before, [1])


def test_seeds_decide(speaker: Speaker) -> None:
    def say(slot: int, seed: int) -> list[int]:
        speaker.start_turn(slot, DRAWN, seed=seed)
        return speaker.answer(slot, rows(6), max_codes=40)

    assert say(0, 7) == say(3, 7)
    assert say(0, 7) != say(0, 8)
    assert say(0, 2**64 - 1) == say(1, 2**64 - 1)


@pytest.mark.parametrize("settings", [DRAWN, UNIT])
def test_a_new_turn_equals_a_fresh_slot(tiny_model: OmniModel, settings: CodeSampling) -> None:
    used, fresh = make_speaker(tiny_model), make_speaker(tiny_model)
    used.start_turn(0, CodeSampling(greedy=True, temperature=2.0, min_keep=9), seed=1, eos=17)
    stream = CodeStream(used, 0, "sliding_window", window=5, max_codes=30)
    stream.push(rows(9, 3), final=False)
    stream.push(rows(9, 4), final=True)
    said = []
    for speaker in (used, fresh):
        speaker.start_turn(0, settings, seed=6)
        said.append([speaker.unit([0], [rows(n, n)], may_end=[False]) for n in (5, 3)])
        state = speaker.state
        said[-1] += [int(t[0]) for t in (state.cache.lengths, state.cache.positions, state.cache.windows)]
    assert said[0] == said[1], f"expected {said[1]}, got {said[0]}"


def test_refused_calls_change_nothing(speaker: Speaker) -> None:
    for slot in range(4):
        speaker.start_turn(slot, DRAWN, seed=slot)
    speaker.unit([0, 1], [rows(5), rows(200)], may_end=[False, False])
    before, held = copy_state(speaker.runner.state), [speaker.rows(slot) for slot in range(4)]
    room = 256 - speaker.rows(1)
    refused = [
        (SettingsError, [0, 1], [4, 4], [10, 0]),
        (SettingsError, [0], [4], [CODES_PER_CALL + 1]),
        (ContextOverflowError, [0, 1], [4, 4], [10, room - 4 + 2]),
        (ContextOverflowError, [0, 1], [4, room], [10, 2]),
        (SlotError, [0, 0], [4, 4], [10, 10]),
        (SlotError, [4], [4], [10]),
        (SlotError, [0, 1], [4, 4], [10]),
        (SlotError, [], [], []),
        (ShapeError, [0], [0], [10]),
    ]
    for error, slots, sizes, most in refused:
        with pytest.raises(error, match=r"expected .+, got "):
            speaker.call(slots, [rows(n) for n in sizes], min_codes=[0] * len(slots), max_codes=most)
        assert_same(speaker.runner.state, before)
        assert [speaker.rows(slot) for slot in range(4)] == held
    # To the last row it fits.
    (call,) = speaker.call([1], [rows(4)], min_codes=[99], max_codes=[room - 4 + 1])
    assert len(call.codes) == room - 4 + 1
    assert speaker.rows(1) == 256


def test_more_rows_than_any_bucket_are_refused(tiny_model: OmniModel) -> None:
    speaker = make_speaker(tiny_model, n_slots=1, tts_len=512)
    speaker.start_turn(0, DRAWN)
    before = copy_state(speaker.runner.state)
    with pytest.raises(ShapeError, match=r"tokens: expected at most .+, got 1025"):
        speaker.call([0], [rows(1027)], min_codes=[0], max_codes=[2])
    assert_same(speaker.runner.state, before)


def test_dropped_rows_close_up(speaker: Speaker) -> None:
    speaker.start_turn(0, BEST)
    speaker.unit([0], [rows(5)], may_end=[False])
    cache, before = speaker.state.cache, copy_state(speaker.runner.state)
    values = [layer[0].clone() for layer in cache.v]
    speaker.drop_rows(0, keep=3, drop=11, turn=True)
    assert speaker.rows(0) == cache.lengths[0] == cache.positions[0] == 30 - 11
    for layer, old in zip(cache.v, values, strict=True):
        assert torch.equal(layer[0, :, :3], old[:, :3])
        assert torch.equal(layer[0, :, 3:19], old[:, 14:30])
    assert_same(speaker.runner.state, before, [1, 2, 3])


def test_code_rows_are_what_a_step_feeds(speaker: Speaker) -> None:
    weights = speaker.runner.model.tts.emb_code[0].weight
    got = speaker.code_rows([5, 0, 6561])
    assert torch.equal(got, weights[[5, 0, 6561]])
    assert speaker.code_rows([]).shape == (0, WIDTH)


def test_no_speech_without_its_part(tiny) -> None:
    config = load_config(tiny).model_copy(update={"init_tts": False})
    with pytest.raises(SettingsError, match="expected a checkpoint with tts, got init_tts false"):
        make_speaker(random_model(config))


@pytest.mark.parametrize("bad", [{"seed": -1}, {"seed": 2**64}, {"eos": -1}])
def test_a_refused_turn_changes_nothing(speaker: Speaker, bad: dict[str, int]) -> None:
    speaker.start_turn(0, DRAWN, seed=1)
    speaker.unit([0], [rows(5)], may_end=[False])
    before = copy_state(speaker.runner.state)
    with pytest.raises(SettingsError, match=r"expected .+, got"):
        speaker.start_turn(0, BEST, **bad)
    assert speaker.rows(0) == 30
    assert_same(speaker.runner.state, before)


def test_nan_ends_one_slots_call_and_no_other(tiny_model: OmniModel) -> None:
    speaker, alone = make_speaker(tiny_model), make_speaker(tiny_model)
    for each in (speaker, alone):
        each.start_turn(0, UNIT, seed=1)
        each.start_turn(1, UNIT, seed=2)
    bad, good = speaker.unit([0, 1], [rows(5) * float("nan"), rows(4)], may_end=[False, False])
    assert bad.bad and bad.codes == [] and not bad.ended
    assert [good] == alone.unit([1], [rows(4)], may_end=[False])
    speaker.start_turn(0, UNIT, seed=1)
    with pytest.raises(NumericsError, match="speech of slot 0: expected finite logits, got NaN"):
        speaker.answer(0, rows(3) * float("nan"), max_codes=60)
    speaker.start_turn(0, UNIT, seed=1)
    assert speaker.unit([0], [rows(4)], may_end=[False]) == alone.unit([0], [rows(4)], may_end=[False])


def test_nan_after_some_codes_keeps_count(tiny) -> None:
    model = load_model(tiny)
    speaker = make_speaker(model)
    speaker.start_turn(0, BEST)
    (call,) = speaker.call([0], [rows(6)], min_codes=[0], max_codes=[10])
    assert call.codes.index(call.codes[4]) == 4
    weight = model.tts.emb_code[0].weight.clone()
    weight[call.codes[4]] = float("nan")
    model.tts.emb_code[0].weight = torch.nn.Parameter(weight, requires_grad=False)
    speaker.start_turn(0, BEST)
    (broken,) = speaker.call([0], [rows(6)], min_codes=[0], max_codes=[10])
    assert broken.bad and broken.codes == call.codes[:5]
    assert speaker.rows(0) == speaker.state.cache.lengths[0] == 6 + 5


def test_a_long_chunk_can_be_fed_again(tiny_model: OmniModel) -> None:
    speaker = make_speaker(tiny_model, n_slots=1, tts_len=1200)
    speaker.start_turn(0, DRAWN, eos=7000)
    stream = CodeStream(speaker, 0, "sliding_recompute")
    stream.push(rows(6), False)
    assert len(stream.push(rows(6), True)) == 20, "500 codes in batches of 25"
    assert speaker.rows(0) == 6 + 500 + 6 + 499


@pytest.mark.parametrize("kind", ["sliding_recompute", "reindex", "sliding_window"])
def test_a_refused_chunk_leaves_the_turn_as_it_was(speaker: Speaker, kind: str) -> None:
    speaker.start_turn(0, DRAWN, eos=7000)
    stream = CodeStream(speaker, 0, kind, window=20, max_codes=30)
    for _ in range(3):
        stream.push(rows(6), False)
    before, held = copy_state(speaker.runner.state), speaker.rows(0)
    with pytest.raises(ContextOverflowError):
        stream.push(rows(240), True)
    assert speaker.rows(0) == held
    assert_same(speaker.runner.state, before)


def test_a_sliding_stream_never_fills_its_slot(speaker: Speaker) -> None:
    speaker.start_turn(0, DRAWN, eos=7000)
    stream = CodeStream(speaker, 0, "sliding_window", window=40, max_codes=30)
    for _ in range(20):
        stream.push(rows(6), False)
    assert speaker.rows(0) == 40 + 6 + 29
    assert int(speaker.state.cache.positions[0]) == 20 * 36


def test_a_stream_follows_the_checkpoint_unless_told(speaker: Speaker) -> None:
    stream = CodeStream(speaker, 0)
    assert (stream.attention_type, stream.window) == ("full_attention", 300)
    for wrong in ({"attention_type": "slidingwindow"}, {"compat": "upstream"}):
        with pytest.raises(SettingsError, match=r"expected one of .+, got"):
            CodeStream(speaker, 0, **wrong)


def test_a_window_survives_the_start_of_a_turn(speaker: Speaker) -> None:
    stream = CodeStream(speaker, 0, "sliding_window", window=20, max_codes=30)
    speaker.start_turn(0, DRAWN)
    stream.push(rows(4), False)
    assert int(speaker.state.cache.windows[0]) == 20


@pytest.mark.parametrize(("compat", "turned"), [("fixed", True), ("reference", False)])
def test_reindexed_keys_are_turned_unless_the_reference_is_asked_for(
    speaker: Speaker, compat: str, turned: bool
) -> None:
    speaker.start_turn(0, BEST)
    stream = CodeStream(speaker, 0, "reindex", max_codes=8, compat=compat)
    for seed in range(3):
        stream.push(rows(4, seed), False)
    keys, frequencies = speaker.state.cache.k[0][0].clone(), speaker.runner.model.tts.model.frequencies
    first, second, third = stream._chunks
    stream._between_chunks(rows(4))
    got = speaker.state.cache.k[0][0][:, first : first + third]
    moved = keys[:, first + second : first + second + third]
    expected = rotate(moved, *rotary_angles(torch.tensor(-second), frequencies)) if turned else moved
    assert_close(got, expected, 1e-5)
