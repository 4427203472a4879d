"""`Rows` and `Runner`: spans of rows, buckets, eviction and refused calls."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from models.errors import ContextOverflowError, ShapeError, SlotError
from models.omni import OmniModel
from models.sampling.settings import CHAT_TEXT
from models.stages.region_table import Shapes
from models.stages.runner import Rows
from tests.models.compare import assert_close
from tests.models.stages.slot_copies import assert_fresh, assert_same, copy_state, scribble
from tests.models.stages.text_helpers import LLM_LEN, assert_mirrored, feed, make_steps, text

TOLERANCE = 1e-5  # float32; batches of different sizes add up in different orders


@pytest.fixture
def steps(tiny_model: OmniModel):
    return make_steps(tiny_model)


def test_mixed_rows_take_media_in_any_order() -> None:
    """Image rows are known before sound rows, wherever they stand; a cut keeps its own media."""
    first, second, third = (torch.full((n, 4), float(n)) for n in (2, 1, 3))
    rows = Rows.mixed([5, 0, 0, 6, 0, 0, 0, 0], [(4, second), (1, first), (5, third)])
    assert rows.is_row.tolist() == [False, True, True, False, True, True, True, True]
    assert rows.media[:, 0].tolist() == [2, 2, 1, 3, 3, 3]
    part = rows.cut(2, 6)
    assert (part.ids.tolist(), part.is_row.tolist()) == ([0, 6, 0, 0], [True, False, True, True])
    assert part.media[:, 0].tolist() == [2, 1, 3] and rows.cut(0, 8) is rows
    assert Rows.mixed([5, 6], []).media is rows.cut(3, 4).media is None


@pytest.mark.parametrize("together", [True, False])
def test_evict_removes_rows(steps, tiny_model: OmniModel, together: bool) -> None:
    """Rows of the first layer do not depend on evicted rows: its keys equal those of the other rows fed alone."""
    runner, ids = steps.runner, text(30, 1).ids
    feed(steps, [1, 2, 3], [Rows(ids), text(9, 2), text(40, 3)])
    before = copy_state(runner.state)
    if together:
        runner.evict([1, 3, 2], [4, 0, 2], [7, 25, 0])
        assert [runner.context_len(slot) for slot in (1, 2, 3)] == [23, 9, 15]
    else:
        runner.evict([1], [4], [7])
        assert_same(runner.state, before, [3])
    assert_mirrored(runner, range(6))
    assert_same(runner.state, before, [0, 2, 4, 5])
    rest = make_steps(tiny_model)
    feed(rest, [0], [Rows(torch.cat((ids[:4], ids[11:])))])
    for cache in ("k", "v"):
        got, expected = (getattr(owner.state.llm, cache)[0][slot] for owner, slot in ((runner, 1), (rest, 0)))
        assert_close(got, expected, TOLERANCE, f"{cache} of the first layer")
    (chosen,) = steps.step([1], [3], [None], [False])
    assert chosen.logits.isfinite().all()
    assert_mirrored(runner, range(6))


def test_refused_calls_change_nothing(steps) -> None:
    runner = steps.runner
    feed(steps, [0, 1, 2], [text(10, 0), text(LLM_LEN, 1), text(60, 2)])
    before, held = copy_state(runner.state), [runner.context_len(slot) for slot in range(6)]
    refused = [
        (ContextOverflowError, lambda: feed(steps, [0, 2], [text(3, 0), text(5, 0)])),
        (ContextOverflowError, lambda: feed(steps, [3], [text(LLM_LEN + 1, 0)])),
        (ContextOverflowError, lambda: steps.step([0, 1], [1, 2], [None] * 2, [True] * 2)),
        (ContextOverflowError, lambda: runner.check_room(2, 5)),
        (ContextOverflowError, lambda: runner.evict([0, 1], [0, 60], [1, 5])),
        (ContextOverflowError, lambda: runner.evict([0], [5], [6])),
        (ContextOverflowError, lambda: runner.evict([0], [-1], [1])),
        (ContextOverflowError, lambda: runner.evict([0], [1], [-1])),
        (ShapeError, lambda: feed(steps, [0, 3], [text(3, 0), text(0, 0)])),
        (ShapeError, lambda: runner.evict([0, 2, 3, 4, 5], [0] * 5, [0] * 5)),
    ]
    for number, (error, call) in enumerate(refused):
        with pytest.raises(error, match=r"expected .+, got "):
            call()
        assert_same(runner.state, before)
        assert [runner.context_len(slot) for slot in range(6)] == held, f"refused call {number}"


def test_slot_can_be_filled_completely(steps) -> None:
    runner = steps.runner
    feed(steps, [0], [text(LLM_LEN - 1, 0)])
    runner.check_room(0, 1)
    steps.step([0], [1], [None], [False])
    assert runner.context_len(0) == LLM_LEN
    runner.evict([0], [0], [LLM_LEN])
    assert runner.context_len(0) == 0
    assert_mirrored(runner, range(6))


def test_leased_slots_are_empty(steps) -> None:
    runner = steps.runner
    with steps.lease() as slot:
        steps.configure_text(slot, CHAT_TEXT, seed=3)
        feed(steps, [slot], [text(20, 0)])
        with steps.lease() as other:
            assert other != slot
        assert runner.context_len(slot) == 20
    assert_fresh(runner.state, range(6))
    assert steps.counters(slot)[:-3] == make_steps(runner.model).counters(slot)[:-3]
    seen = set()
    for _ in range(6):
        with steps.lease() as slot:
            seen.add(slot)
            assert_mirrored(runner, [slot])
    assert seen == set(range(6)), "expected every slot in turn"
    assert runner.pool.n_free == 6


@pytest.mark.parametrize("end", ["normal", "exception", "closed generator"])
def test_every_end_of_a_lease_empties_the_slot(steps, end: str) -> None:
    pool, fresh = steps.runner.pool, copy_state(steps.state)
    n_slots = pool.n_free

    def session() -> Iterator[int]:
        with steps.lease() as slot:
            scribble(steps.state, slot, seed=1)
            yield slot
            if end == "exception":
                raise RuntimeError("a session failed")

    running = session()
    slot = next(running)
    assert pool.n_free == n_slots - 1
    if end == "closed generator":
        running.close()
    elif end == "exception":
        with pytest.raises(RuntimeError, match="a session failed"):
            next(running)
    else:
        assert next(running, None) is None
    assert pool.n_free == n_slots
    assert_same(steps.state, fresh, range(n_slots))
    assert slot in {pool.acquire() for _ in range(n_slots)}


def test_refuses_more_leases_than_slots(tiny_model: OmniModel) -> None:
    steps = make_steps(tiny_model, n_slots=1)
    with steps.lease(), pytest.raises(SlotError, match="got all 1 leased"), steps.lease():
        pass
    assert steps.runner.pool.n_free == 1


def test_refuses_slots_longer_than_the_models_positions(tiny_model: OmniModel) -> None:
    most = tiny_model.config.max_position_embeddings
    with pytest.raises(ContextOverflowError, match=f"expected at most {most}, got {most + 1}"):
        make_steps(tiny_model, llm_len=most + 1)


def test_largest_bucket_is_the_slots_length(tiny_model: OmniModel) -> None:
    steps = make_steps(tiny_model, Shapes(rows=(4, 16), kv=(16, 512), speech_kv=(8, 4096)), llm_len=40)
    assert steps.runner.shapes.kv == (16, 40)
    assert steps.runner.shapes.speech_kv == (8, 16)
    feed(steps, [0], [text(40, 0)])
    assert_mirrored(steps.runner, range(6))


@pytest.mark.parametrize("slots", [[], [0, 0], [-1], [6], [0, 99]])
def test_refuses_repeated_and_unknown_slots(steps, slots: Sequence[int]) -> None:
    before, n = copy_state(steps.state), len(slots)
    for call in (
        lambda: feed(steps, slots, [text(3, 0)] * n),
        lambda: steps.step(slots, [1] * n, [None] * n, [True] * n),
        lambda: steps.runner.evict(slots, [0] * n, [0] * n),
    ):
        with pytest.raises(SlotError, match="expected different numbers from 0 to 5, got"):
            call()
    assert_same(steps.state, before)


def test_refuses_a_call_without_an_entry_for_each_slot(steps) -> None:
    with pytest.raises(SlotError, match="expected 2 entries, got 1"):
        feed(steps, [0, 1], [text(3, 0)])
