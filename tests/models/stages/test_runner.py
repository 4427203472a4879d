"""Text through the regions: pieces, batches and padding do not show, and a refused call touches nothing."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from models.errors import ContextOverflowError, ShapeError, SlotError
from models.omni import OmniModel
from models.sampling.settings import CHAT_TEXT, TextSampling
from models.sampling.text import TokenSet, TokenSets
from models.stages.region_table import Shapes
from models.stages.runner import Rows, Runner
from tests.models.stages.slot_copies import assert_fresh, assert_same, copy_state

TOLERANCE = 1e-5  # float32; a batch of another size adds up in another order
LLM_LEN = 64
SMALL = Shapes(batch=(1, 2, 4), rows=(4, 16), kv=(16, 32, 64))


def make_runner(model: OmniModel, shapes: Shapes = SMALL, n_slots: int = 6, llm_len: int = LLM_LEN) -> Runner:
    sets = TokenSets.build([TokenSet(pad_id=5)], model.config.vocab_size)
    return Runner(model, sets, n_slots=n_slots, llm_len=llm_len, tts_len=16, shapes=shapes)


@pytest.fixture
def runner(tiny_model: OmniModel) -> Runner:
    return make_runner(tiny_model)


def text(n: int, seed: int) -> Rows:
    return Rows(torch.randint(0, 700, (n,), generator=torch.Generator().manual_seed(seed)))


def mixed(n: int, seed: int) -> Rows:
    """Tokens with media rows in between; the ids under media are nobody's."""
    generator = torch.Generator().manual_seed(seed)
    is_row = torch.rand(n, generator=generator) < 0.5
    return Rows(text(n, seed).ids, torch.randn(n, 128, generator=generator)[is_row], is_row)


def assert_close(what: str, got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape, f"{what}: expected {tuple(expected.shape)}, got {tuple(got.shape)}"
    difference = float((got - expected).abs().max())
    assert difference <= TOLERANCE, f"{what}: max difference {difference}, expected {expected}, got {got}"


def assert_mirrored(runner: Runner, slots: Sequence[int]) -> None:
    got = [runner.context_len(slot) for slot in slots]
    expected = runner.state.llm.lengths[list(slots)].tolist()
    assert got == expected, f"expected {expected} rows, got {got}"


def test_stretches_of_any_length_equal_one_slot_in_one_piece(runner: Runner, tiny_model: OmniModel) -> None:
    order, stretches = [4, 0, 2, 1], [mixed(37, 1), text(5, 2), mixed(16, 3), text(17, 4)]
    whole = make_runner(tiny_model, Shapes(rows=(64,)), n_slots=1)
    hidden, logits = runner.feed(order, stretches)
    again, more = runner.feed([2, 4], [text(33, 5), mixed(2, 6)])
    assert_mirrored(runner, range(6))
    assert [runner.context_len(slot) for slot in range(6)] == [5, 17, 49, 0, 39, 0]
    later = {2: (text(33, 5), again[0], more[0]), 4: (mixed(2, 6), again[1], more[1])}
    for row, slot in enumerate(order):
        with whole.lease() as alone:
            own_hidden, own_logits = whole.feed([alone], [stretches[row]])
            assert_close(f"hidden states of slot {slot}", hidden[row], own_hidden[0])
            assert_close(f"logits of slot {slot}", logits[row], own_logits[0])
            if slot in later:
                span, got_hidden, got_logits = later[slot]
                own_hidden, own_logits = whole.feed([alone], [span])
                assert_close(f"later hidden states of slot {slot}", got_hidden, own_hidden[0])
                assert_close(f"later logits of slot {slot}", got_logits, own_logits[0])


def test_a_stretch_may_be_cut_anywhere(runner: Runner) -> None:
    span = mixed(21, 7)
    hidden, logits = runner.feed([0], [span])
    parts = [runner.feed([1], [span.cut(start, end)]) for start, end in ((0, 1), (1, 18), (18, 21))]
    assert_close("hidden states", torch.cat([part[0] for part, _ in parts]), hidden[0])
    assert_close("logits", parts[-1][1], logits)


def test_media_of_a_stretch_may_come_in_any_order() -> None:
    """Pictures are known before sounds, wherever they stand; what is cut takes its own along."""
    first, second, third = (torch.full((n, 4), float(n)) for n in (2, 1, 3))
    rows = Rows.mixed([5, 0, 0, 6, 0, 0, 0, 0], [(4, second), (1, first), (5, third)])
    assert rows.is_row.tolist() == [False, True, True, False, True, True, True, True]
    assert rows.media[:, 0].tolist() == [2, 2, 1, 3, 3, 3]
    part = rows.cut(2, 6)
    assert (part.ids.tolist(), part.is_row.tolist()) == ([0, 6, 0, 0], [True, False, True, True])
    assert part.media[:, 0].tolist() == [2, 1, 3] and rows.cut(0, 8) is rows
    assert Rows.mixed([5, 6], []).media is rows.cut(3, 4).media is None


def test_media_stand_in_where_asked(runner: Runner) -> None:
    span = mixed(9, 8)
    embedded = runner.model.llm.model.embed_tokens(span.ids)
    embedded[span.is_row] = span.media
    other = Rows(torch.where(span.is_row, 3, span.ids), span.media, span.is_row)
    first, _ = runner.feed([0, 1], [span, other])
    everywhere, _ = runner.feed([2], [Rows(span.ids, embedded, torch.ones(9, dtype=torch.bool))])
    assert_close("ids under media", first[1], first[0])
    assert_close("media for all", everywhere[0], first[0])


def test_decode_equals_feeding_one_more(runner: Runner) -> None:
    long, short = text(30, 1), text(4, 2)
    expected_hidden, expected_logits = runner.feed([0, 1], [long, short])
    runner.feed([2, 3], [long.cut(0, 29), short.cut(0, 3)])
    hidden, logits = runner.decode([3, 2], [int(short.ids[3]), int(long.ids[29])])
    assert_mirrored(runner, range(6))
    assert_close("hidden of the long", hidden[1], expected_hidden[0][-1])
    assert_close("hidden of the short", hidden[0], expected_hidden[1][-1])
    assert_close("logits", logits.flip(0), expected_logits)


def test_three_slots_in_a_batch_of_four(runner: Runner) -> None:
    stretches = [text(6, seed) for seed in range(3)]
    runner.feed([0, 1, 2], stretches)
    before = copy_state(runner.state)
    _, logits = runner.decode([0, 1, 2], [9, 8, 7])
    assert logits.shape == (3, 745)
    assert_same(runner.state, before, [3, 4, 5])
    assert int(runner.state.llm.lengths[runner.state.scratch]) == 0, "expected padding to count for nothing"
    chosen = runner.sample([0, 1, 2], logits)
    assert chosen.ids.shape == chosen.bad.shape == (3,)
    assert_same(runner.state, before, [3, 4, 5])


def test_sample_takes_each_slots_own_settings(runner: Runner) -> None:
    logits = torch.randn(3, 745, generator=torch.Generator().manual_seed(0))
    drawn = TextSampling(temperature=2.0, top_k=40)
    slots = (5, 0, 3)
    for slot, settings in zip(slots, (drawn, TextSampling(greedy=True), drawn), strict=True):
        runner.state.text.configure(slot, settings, seed=11)
    chosen = [runner.sample(slots, logits[[0, 1, 0]]).ids.tolist() for _ in range(8)]
    assert all(ids[1] == int(logits[1].argmax()) for ids in chosen)
    assert all(ids[0] == ids[2] for ids in chosen), "expected equal draws for equal seeds"
    assert len({ids[0] for ids in chosen}) > 1
    assert runner.state.text.draws[list(slots)].tolist() == [8, 8, 8]
    logits[2] = float("nan")
    got = runner.sample(slots, logits)
    assert got.bad.tolist() == [False, False, True]
    assert int(got.ids[2]) == 5, "expected the set's padding"


@pytest.mark.parametrize("together", [True, False])
def test_evicted_rows_are_gone(runner: Runner, tiny_model: OmniModel, together: bool) -> None:
    """First layer only holds rows that saw nothing evicted: keys there equal those of the rest fed alone."""
    ids = text(30, 1).ids
    runner.feed([1, 2, 3], [Rows(ids), text(9, 2), text(40, 3)])
    before = copy_state(runner.state)
    if together:
        runner.evict([1, 3, 2], [4, 0, 2], [7, 25, 0])
        assert [runner.context_len(slot) for slot in (1, 2, 3)] == [23, 9, 15]
    else:
        runner.evict([1], [4], [7])
        assert_same(runner.state, before, [3])
    assert_mirrored(runner, range(6))
    assert_same(runner.state, before, [0, 2, 4, 5])
    rest = make_runner(tiny_model)
    rest.feed([0], [Rows(torch.cat((ids[:4], ids[11:])))])
    for cache in ("k", "v"):
        got, expected = (getattr(owner.state.llm, cache)[0][slot] for owner, slot in ((runner, 1), (rest, 0)))
        assert_close(f"{cache} of the first layer", got, expected)
    _, logits = runner.decode([1], [3])
    assert logits.isfinite().all()
    assert_mirrored(runner, range(6))


def test_refused_calls_change_nothing(runner: Runner) -> None:
    runner.feed([0, 1, 2], [text(10, 0), text(LLM_LEN, 1), text(60, 2)])
    before, held = copy_state(runner.state), [runner.context_len(slot) for slot in range(6)]
    none = text(0, 0)
    refused = [
        (ContextOverflowError, lambda: runner.feed([0, 2], [text(3, 0), text(5, 0)])),
        (ContextOverflowError, lambda: runner.feed([3], [text(LLM_LEN + 1, 0)])),
        (ContextOverflowError, lambda: runner.decode([0, 1], [1, 2])),
        (ContextOverflowError, lambda: runner.check_room(2, 5)),
        (ContextOverflowError, lambda: runner.evict([0, 1], [0, 60], [1, 5])),
        (ContextOverflowError, lambda: runner.evict([0], [5], [6])),
        (ContextOverflowError, lambda: runner.evict([0], [-1], [1])),
        (ContextOverflowError, lambda: runner.evict([0], [1], [-1])),
        (ShapeError, lambda: runner.feed([0, 3], [text(3, 0), none])),
        (ShapeError, lambda: runner.feed([0, 2, 3, 4, 5], [text(1, 0)] * 5)),
        (ShapeError, lambda: runner.decode([0, 2, 3, 4, 5], [1] * 5)),
        (ShapeError, lambda: runner.sample([0, 2, 3, 4, 5], torch.zeros(5, 745))),
        (ShapeError, lambda: runner.evict([0, 2, 3, 4, 5], [0] * 5, [0] * 5)),
    ]
    for number, (error, call) in enumerate(refused):
        with pytest.raises(error, match=r"expected .+, got "):
            call()
        assert_same(runner.state, before)
        assert [runner.context_len(slot) for slot in range(6)] == held, f"refused call {number}"


def test_a_slot_takes_rows_to_the_last(runner: Runner) -> None:
    runner.feed([0], [text(LLM_LEN - 1, 0)])
    runner.check_room(0, 1)
    runner.decode([0], [1])
    assert runner.context_len(0) == LLM_LEN
    runner.evict([0], [0], [LLM_LEN])
    assert runner.context_len(0) == 0
    assert_mirrored(runner, range(6))


def test_leased_slots_are_empty(runner: Runner) -> None:
    with runner.lease() as slot:
        runner.feed([slot], [text(20, 0)])
        runner.state.text.configure(slot, CHAT_TEXT, seed=3)
        with runner.lease() as other:
            assert other != slot
        assert runner.context_len(slot) == 20
    assert_fresh(runner.state, range(6))
    seen = set()
    for _ in range(6):
        with runner.lease() as slot:
            seen.add(slot)
            assert_mirrored(runner, [slot])
    assert seen == set(range(6)), "expected every slot to come round"
    assert runner.pool.n_free == 6


def test_no_more_leases_than_slots(tiny_model: OmniModel) -> None:
    runner = make_runner(tiny_model, n_slots=1)
    with runner.lease(), pytest.raises(SlotError, match="got all 1 leased"), runner.lease():
        pass
    assert runner.pool.n_free == 1


def test_lengths_beyond_the_models_positions_are_refused(tiny_model: OmniModel) -> None:
    most = tiny_model.config.max_position_embeddings
    with pytest.raises(ContextOverflowError, match=f"expected at most {most}, got {most + 1}"):
        make_runner(tiny_model, llm_len=most + 1)


def test_buckets_end_at_what_a_slot_holds(tiny_model: OmniModel) -> None:
    runner = make_runner(tiny_model, Shapes(rows=(4, 16), kv=(16, 512), speech_kv=(8, 4096)), llm_len=40)
    assert runner.shapes.kv == (16, 40)
    assert runner.shapes.speech_kv == (8, 16)
    runner.feed([0], [text(40, 0)])
    assert_mirrored(runner, range(6))


@pytest.mark.parametrize("slots", [[], [0, 0], [-1], [6], [0, 99]])
def test_slots_of_a_call_are_different_and_there(runner: Runner, slots: list[int]) -> None:
    before = copy_state(runner.state)
    n = len(slots)
    for call in (
        lambda: runner.feed(slots, [text(3, 0)] * n),
        lambda: runner.decode(slots, [1] * n),
        lambda: runner.sample(slots, torch.zeros(n, 16)),
        lambda: runner.evict(slots, [0] * n, [0] * n),
    ):
        with pytest.raises(SlotError, match="expected different numbers from 0 to 5, got"):
            call()
    assert_same(runner.state, before)


def test_a_call_needs_an_entry_for_each_slot(runner: Runner) -> None:
    with pytest.raises(SlotError, match="expected 2 entries, got 1"):
        runner.feed([0, 1], [text(3, 0)])


def test_lengths_are_forgotten_with_the_lease(runner: Runner) -> None:
    with runner.lease() as slot:
        runner.feed([slot], [text(3, 0)])
        runner.speech_rows[slot] = 7
        assert runner.context_len(slot) == 3
    assert runner.context_len(slot) == runner.speech_rows[slot] == 0 == int(runner.state.llm.lengths[slot])
