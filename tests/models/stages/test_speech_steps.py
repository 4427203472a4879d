"""Speech calls of answers and units against a plain loop on the host, over slots, turns and chunks."""

from unittest import mock

import pytest
import torch

from models.checkpoint.config import load_config
from models.errors import ContextOverflowError, NumericsError, SettingsError, ShapeError, SlotError
from models.layers.speech_state import SPEECH_TOKENS_PER_CALL
from models.load import load_model
from models.omni import OmniModel
from models.random_weights import random_model
from models.sampling.settings import SpeechSampling
from models.stages.region_table import Shapes
from models.stages.speech_stream import SpeechStream
from tests.models.layers.speech_reference import PlainSpeaker
from tests.models.stages.slot_copies import assert_same, copy_state
from tests.models.stages.speech_calls import WholeCallSpeaker
from tests.models.stages.speech_helpers import BEST, DRAWN, UNIT, WIDTH, first_new_token, make_speaker, rows


@pytest.mark.parametrize("settings", [DRAWN, BEST], ids=["drawn", "best"])
def test_answer_equals_the_plain_loop(speaker: WholeCallSpeaker, eos: int, settings: SpeechSampling) -> None:
    tts, own = speaker.runner.model.tts, rows(6)
    speaker.start_turn(1, settings, seed=5)
    got = speaker.answer(1, own, min_speech_tokens=3, max_speech_tokens=60)
    expected, _ = PlainSpeaker(tts, settings, seed=5, eos=eos).call(own, min_speech_tokens=3, max_speech_tokens=60)
    assert got == expected[:59], f"at the limit: expected all but the last of {expected}, got {got}"
    assert speaker.rows(1) == speaker.state.cache.lengths[1] == 6 + 59

    end = first_new_token(expected, 30)
    speaker.start_turn(1, settings, seed=5, eos=end)
    got = speaker.answer(1, own, min_speech_tokens=3, max_speech_tokens=60)
    expected, ended = PlainSpeaker(tts, settings, seed=5, eos=end).call(own, min_speech_tokens=3, max_speech_tokens=60)
    assert ended
    assert got == expected, f"at the end token: expected {expected}, got {got}"
    assert speaker.rows(1) == speaker.state.cache.lengths[1] == 6 + len(expected)


def test_answer_has_at_least_50_tokens(speaker: WholeCallSpeaker) -> None:
    speaker.start_turn(0, BEST)
    free = speaker.answer(0, rows(6), max_speech_tokens=80)
    early, late = free[2], first_new_token(free, 52)
    speaker.start_turn(0, BEST, eos=early)
    assert len(speaker.answer(0, rows(6), max_speech_tokens=60)) >= 50
    speaker.start_turn(0, BEST, eos=late)
    assert speaker.answer(0, rows(6), max_speech_tokens=80) == free[: free.index(late)]


def test_units_equal_the_plain_loop(speaker: WholeCallSpeaker, eos: int) -> None:
    plain = PlainSpeaker(speaker.runner.model.tts, UNIT, seed=8, eos=eos)
    speaker.start_turn(2, UNIT, seed=8)
    n_rows = 0
    for unit, n in enumerate((9, 1, 4)):
        own = rows(n, seed=unit)
        (call,) = speaker.unit([2], [own], may_end=[unit == 0])
        expected, ended = plain.call(own, min_speech_tokens=0 if unit == 0 else 26, max_speech_tokens=26)
        assert not ended
        assert call.speech_tokens == expected[:25], f"unit {unit}: expected {expected[:25]}, got {call.speech_tokens}"
        n_rows += n + 25
        assert speaker.rows(2) == speaker.state.cache.lengths[2] == speaker.state.cache.positions[2] == n_rows


@pytest.mark.parametrize("may_end", [True, False])
def test_only_units_that_may_end_are_shorter(speaker: WholeCallSpeaker, eos: int, may_end: bool) -> None:
    tts, own = speaker.runner.model.tts, rows(4)
    speaker.start_turn(0, UNIT, seed=1)
    free = speaker.unit([0], [own], may_end=[True])[0].speech_tokens
    end = first_new_token(free, 9)
    speaker.start_turn(0, UNIT, seed=1, eos=end)
    got = speaker.unit([0], [own], may_end=[may_end])[0].speech_tokens
    expected, ended = PlainSpeaker(tts, UNIT, seed=1, eos=end).call(
        own, min_speech_tokens=0 if may_end else 26, max_speech_tokens=26
    )
    assert ended == may_end
    assert got == expected[:25]
    assert len(got) == (free.index(end) if may_end else 25)


def test_end_token_at_the_limit_drops_no_token(speaker: WholeCallSpeaker) -> None:
    speaker.start_turn(0, UNIT, seed=1)
    (call,) = speaker.call([0], [rows(4)], min_speech_tokens=[0], max_speech_tokens=[26])
    assert first_new_token(call.speech_tokens, 25) == call.speech_tokens[25]
    speaker.start_turn(0, UNIT, seed=1, eos=call.speech_tokens[25])
    (again,) = speaker.call([0], [rows(4)], min_speech_tokens=[0], max_speech_tokens=[26])
    assert again.ended
    assert again.speech_tokens == call.speech_tokens[:25]
    speaker.start_turn(0, UNIT, seed=1, eos=call.speech_tokens[25])
    assert speaker.unit([0], [rows(4)], may_end=[True])[0].speech_tokens == call.speech_tokens[:25]


def test_batch_equals_each_slot_alone(tiny_model: OmniModel) -> None:
    together = make_speaker(tiny_model)
    own, settings = [rows(8), rows(1, 1), rows(30, 2)], [DRAWN, BEST, UNIT]
    order, ends, calls = [3, 0, 2], [None] * 3, []
    for pass_ in ("free", "ends"):
        for slot, how, end in zip(order, settings, ends, strict=True):
            together.start_turn(slot, how, seed=slot, eos=end)
        # Slot 0 has a unit more than the others.
        together.unit([0], [rows(3, 9)], may_end=[False])
        calls = together.call(order, own, min_speech_tokens=[0, 4, 0], max_speech_tokens=[50, 7, 26])
        if pass_ == "free":
            ends = [first_new_token(calls[0].speech_tokens, 30), None, first_new_token(calls[2].speech_tokens, 5)]
    assert [call.ended for call in calls] == [True, False, True]
    for place, slot in enumerate(order):
        alone = make_speaker(tiny_model, n_slots=1)
        alone.start_turn(0, settings[place], seed=slot, eos=ends[place])
        if slot == 0:
            alone.unit([0], [rows(3, 9)], may_end=[False])
        (call,) = alone.call(
            [0], [own[place]], min_speech_tokens=[[0, 4, 0][place]], max_speech_tokens=[[50, 7, 26][place]]
        )
        assert calls[place] == call, f"slot {slot}: expected {call}, got {calls[place]}"
        assert together.rows(slot) == alone.rows(0) == together.state.cache.lengths[slot]


def test_call_does_not_change_other_slots(speaker: WholeCallSpeaker) -> None:
    for slot in range(4):
        speaker.start_turn(slot, DRAWN, seed=slot)
    speaker.unit([0, 1, 3], [rows(2), rows(3), rows(4)], may_end=[True] * 3)
    before = copy_state(speaker.runner.state)
    speaker.unit([2, 0, 3], [rows(2), rows(5), rows(6)], may_end=[False] * 3)
    assert_same(speaker.runner.state, before, [1])


def test_seed_decides_the_draws(speaker: WholeCallSpeaker) -> None:
    def draw(slot: int, seed: int) -> list[int]:
        speaker.start_turn(slot, DRAWN, seed=seed)
        return speaker.answer(slot, rows(6), max_speech_tokens=40)

    assert draw(0, 7) == draw(3, 7)
    assert draw(0, 7) != draw(0, 8)
    assert draw(0, 2**64 - 1) == draw(1, 2**64 - 1)


def test_refused_calls_change_nothing(speaker: WholeCallSpeaker) -> None:
    for slot in range(4):
        speaker.start_turn(slot, DRAWN, seed=slot)
    speaker.unit([0, 1], [rows(5), rows(200)], may_end=[False, False])
    before, held = copy_state(speaker.runner.state), [speaker.rows(slot) for slot in range(4)]
    room = 256 - speaker.rows(1)
    refused = [
        (SettingsError, [0, 1], [4, 4], [10, 0]),
        (SettingsError, [0], [4], [SPEECH_TOKENS_PER_CALL + 1]),
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
            speaker.call(slots, [rows(n) for n in sizes], min_speech_tokens=[0] * len(slots), max_speech_tokens=most)
        assert_same(speaker.runner.state, before)
        assert [speaker.rows(slot) for slot in range(4)] == held
    # A call may fill the cache completely.
    (call,) = speaker.call([1], [rows(4)], min_speech_tokens=[99], max_speech_tokens=[room - 4 + 1])
    assert len(call.speech_tokens) == room - 4 + 1
    assert speaker.rows(1) == 256


def test_refuses_more_rows_than_the_largest_bucket(tiny_model: OmniModel) -> None:
    speaker = make_speaker(tiny_model, n_slots=1, tts_len=512)
    speaker.start_turn(0, DRAWN)
    before = copy_state(speaker.runner.state)
    with pytest.raises(ShapeError, match=r"tokens: expected at most .+, got 1025"):
        speaker.call([0], [rows(1027)], min_speech_tokens=[0], max_speech_tokens=[2])
    assert_same(speaker.runner.state, before)


def test_drop_rows_closes_the_gap(speaker: WholeCallSpeaker) -> None:
    speaker.start_turn(0, BEST)
    speaker.unit([0], [rows(5)], may_end=[False])
    cache, before = speaker.state.cache, copy_state(speaker.runner.state)
    values = [layer[0].clone() for layer in cache.v]
    speaker.drop_rows(0, keep=3, drop=11, rotates=True)
    assert speaker.rows(0) == cache.lengths[0] == cache.positions[0] == 30 - 11
    for layer, old in zip(cache.v, values, strict=True):
        assert torch.equal(layer[0, :, :3], old[:, :3])
        assert torch.equal(layer[0, :, 3:19], old[:, 14:30])
    assert_same(speaker.runner.state, before, [1, 2, 3])


def test_token_rows_are_the_embeddings(speaker: WholeCallSpeaker) -> None:
    weights = speaker.runner.model.tts.emb_code[0].weight
    got = speaker.token_rows([5, 0, 6561])
    assert torch.equal(got, weights[[5, 0, 6561]])
    assert speaker.token_rows([]).shape == (0, WIDTH)


def test_refuses_checkpoint_without_speech(tiny) -> None:
    config = load_config(tiny).model_copy(update={"init_tts": False})
    with pytest.raises(SettingsError, match="expected a checkpoint with tts, got init_tts false"):
        make_speaker(random_model(config))


@pytest.mark.parametrize("bad", [{"seed": -1}, {"seed": 2**64}, {"eos": -1}])
def test_refused_turn_changes_nothing(speaker: WholeCallSpeaker, bad: dict[str, int]) -> None:
    speaker.start_turn(0, DRAWN, seed=1)
    speaker.unit([0], [rows(5)], may_end=[False])
    before = copy_state(speaker.runner.state)
    with pytest.raises(SettingsError, match=r"expected .+, got"):
        speaker.start_turn(0, BEST, **bad)
    assert speaker.rows(0) == 30
    assert_same(speaker.runner.state, before)


def test_nan_ends_only_the_call_of_its_slot(tiny_model: OmniModel) -> None:
    speaker, alone = make_speaker(tiny_model), make_speaker(tiny_model)
    for each in (speaker, alone):
        each.start_turn(0, UNIT, seed=1)
        each.start_turn(1, UNIT, seed=2)
    bad, good = speaker.unit([0, 1], [rows(5) * float("nan"), rows(4)], may_end=[False, False])
    assert bad.bad and bad.speech_tokens == [] and not bad.ended
    assert [good] == alone.unit([1], [rows(4)], may_end=[False])
    speaker.start_turn(0, UNIT, seed=1)
    with pytest.raises(NumericsError, match="speech of slot 0: expected finite logits, got NaN"):
        speaker.answer(0, rows(3) * float("nan"), max_speech_tokens=60)
    speaker.start_turn(0, UNIT, seed=1)
    assert speaker.unit([0], [rows(4)], may_end=[False]) == alone.unit([0], [rows(4)], may_end=[False])


def test_rows_are_counted_after_nan(tiny) -> None:
    model = load_model(tiny)
    speaker = make_speaker(model)
    speaker.start_turn(0, BEST)
    (call,) = speaker.call([0], [rows(6)], min_speech_tokens=[0], max_speech_tokens=[10])
    assert call.speech_tokens.index(call.speech_tokens[4]) == 4
    weight = model.tts.emb_code[0].weight.clone()
    weight[call.speech_tokens[4]] = float("nan")
    model.tts.emb_code[0].weight = torch.nn.Parameter(weight, requires_grad=False)
    speaker.start_turn(0, BEST)
    (broken,) = speaker.call([0], [rows(6)], min_speech_tokens=[0], max_speech_tokens=[10])
    assert broken.bad and broken.speech_tokens == call.speech_tokens[:5]
    assert speaker.rows(0) == speaker.state.cache.lengths[0] == 6 + 5


@pytest.mark.parametrize("begun", [1, 4])
def test_advance_uses_as_few_region_calls_as_possible(tiny_model: OmniModel, begun: int) -> None:
    """Tokens equal those drawn one by one, also after a call is over; no call exceeds its kv bucket."""
    shapes = Shapes(batch=(2,), speech_kv=(24, 64))
    one, other = (make_speaker(tiny_model, tts_len=64, shapes=shapes) for _ in range(2))
    for each in (one, other):
        each.start_turn(0, UNIT, seed=1)
        each.start_turn(1, UNIT, seed=2)
        each.begin([0, 1], [rows(begun), rows(3, 1)], min_speech_tokens=[40, 40], max_speech_tokens=[40, 12])
    calls = []
    with mock.patch.object(one.runner.regions, "run", wraps=one.runner.regions.run) as run:
        one.advance([0, 1], 25)
        calls = [call.kwargs for call in run.call_args_list]
    for _ in range(25):
        other.advance([0, 1])
    assert one.poll([0, 1]) == other.poll([0, 1]), "expected the tokens drawn one by one"
    assert_same(one.runner.state, copy_state(other.runner.state))
    first = 24 - max(begun, 3)  # steps that fit into the smaller bucket
    assert sum(call["n_steps"] for call in calls if call["kv_len"] == 24) == first, f"got {calls}"
    n_steps = [call["n_steps"] for call in calls]
    assert n_steps == [6, 6, 6, *([1] * 7 if begun == 1 else [1, 1, 5])], f"got {n_steps}"


@pytest.mark.parametrize("slot", [-1, 4, 99])
def test_refuses_slots_that_do_not_exist(speaker: WholeCallSpeaker, slot: int) -> None:
    speaker.start_turn(3, DRAWN)
    speaker.unit([3], [rows(4)], may_end=[False])
    before, held = copy_state(speaker.runner.state), [speaker.rows(slot) for slot in range(4)]
    with pytest.raises(SlotError, match="expected different numbers from 0 to 3"):
        speaker.start_turn(slot, DRAWN)
    with pytest.raises(SlotError):
        SpeechStream(speaker, slot)
    assert [speaker.rows(slot) for slot in range(4)] == held
    assert_same(speaker.runner.state, before)


@pytest.mark.parametrize(("keep", "drop"), [(0, 500), (-1, 2), (3, -1), (29, 2)])
def test_refuses_to_drop_rows_that_do_not_exist(speaker: WholeCallSpeaker, keep: int, drop: int) -> None:
    speaker.start_turn(0, DRAWN)
    speaker.unit([0], [rows(5)], may_end=[False])
    with pytest.raises(ContextOverflowError, match=r"expected rows inside 0\.\.30, got"):
        speaker.drop_rows(0, keep, drop, rotates=True)
    assert speaker.rows(0) == speaker.state.cache.lengths[0] == 30


@pytest.mark.parametrize("most", [0, 2.5, "a", SPEECH_TOKENS_PER_CALL + 1])
def test_refuses_limits_outside_their_range(speaker: WholeCallSpeaker, most: object) -> None:
    speaker.start_turn(0, DRAWN)
    with pytest.raises(SettingsError, match=r"max_speech_tokens: expected a whole number at least 1 .* 2048, got"):
        speaker.call([0], [rows(3)], min_speech_tokens=[0], max_speech_tokens=[most])
