"""Audio encoder, one unit at a time: equal to one pass over the same frames; when a slot is emptied.

Tolerances: 1e-5 between two ways through the same float32 code, 1e-4 against float64.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.inputs.audio import UNIT_COLUMNS
from models.layers.apm import UNIT_ROWS
from models.layers.backend import TORCH
from models.layers.kv_cache import KVCache
from tests.models.compare import assert_close, assert_same
from tests.models.layers import whisper_reference as slow_whisper
from tests.parity.build import slot_cache

BINS, NAN = 80, float("nan")
STEADY, FIRST, ALONE, ABSENT = (0, 104), (2, 104), (2, 102), (0, 0)
few = settings(max_examples=12)
Unit = tuple[Tensor, tuple[int, int]]  # frames [80, 104] and the valid columns


@pytest.fixture(scope="session")
def apm(tiny_model):
    return tiny_model.apm


@pytest.fixture(scope="session")
def new_cache(tiny_model):
    return lambda: slot_cache(tiny_model, "apm", n_slots=3)


def mel(seed: int, n: int) -> Tensor:
    return torch.randn(BINS, n, generator=torch.Generator().manual_seed(seed)) * 0.5


def unit(seed: int, columns: tuple[int, int]) -> Unit:
    return mel(seed, UNIT_COLUMNS), columns


def units_of(clip: Tensor) -> list[Unit]:
    """A clip of 100 n + 2 frames as n units, each with two context frames on both sides where they exist."""
    around = torch.nn.functional.pad(clip, (2, 0), value=NAN)
    starts = range(0, clip.shape[1] - 2, 100)
    return [(around[:, s : s + UNIT_COLUMNS], FIRST if s == 0 else STEADY) for s in starts]


def stream(apm, cache: KVCache, units: dict[int, Unit]) -> dict[int, Tensor]:
    """slot -> unit, all in one call; columns outside the valid range are NaN. Returns: slot -> valid rows."""
    frames = torch.full((len(units), BINS, UNIT_COLUMNS), NAN)
    for row, (columns, (first, end)) in enumerate(units.values()):
        frames[row, :, first:end] = columns[:, first:end]
    first, end = torch.tensor([counted for _, counted in units.values()]).unbind(1)
    rows, n_valid = apm.stream(frames, first, end, cache, torch.tensor(list(units)), TORCH)
    assert rows.shape[:2] == (len(units), UNIT_ROWS)
    return {slot: rows[i, : n_valid[i]] for i, slot in enumerate(units)}


def slot_rows(cache: KVCache, slot: int) -> list[Tensor]:
    return [tensor[slot].clone() for tensor in cache.tensors()]


def assert_slot(cache: KVCache, slot: int, expected: list[Tensor]) -> None:
    for number, (got, wanted) in enumerate(zip(slot_rows(cache, slot), expected, strict=True)):
        assert_same(got, wanted, f"slot {slot}, state tensor {number}")


def plain(tiny_model, units: list[Unit]) -> list[Tensor]:
    """Each unit convolved alone and trimmed; a row attends to its own unit and all earlier ones."""
    parts = []
    for columns, (first, end) in units:
        rows = slow_whisper.convolve(tiny_model.apm, columns[:, first:end])
        parts.append(rows[1 if first == 0 else 0 :][:UNIT_ROWS])
    number = torch.cat([torch.full((len(part),), i) for i, part in enumerate(parts)])
    heads = tiny_model.config.audio_config.encoder_attention_heads
    encoded = slow_whisper.encode(tiny_model.apm, torch.cat(parts), number <= number[:, None], heads)
    return list(encoded.split([len(part) for part in parts]))


@few
@given(seed=st.integers(0, 2**20), n_units=st.integers(1, 5), slot=st.integers(0, 2))
def test_units_with_context_frames_equal_one_pass(apm, new_cache, seed, n_units, slot):
    clip, cache = mel(seed, 100 * n_units + 2), new_cache()
    n_frames = torch.tensor([clip.shape[1]])
    whole = apm.encode(clip[None], n_frames, (n_frames + 1) // 2, chunk=UNIT_ROWS)[0]
    for number, columns in enumerate(units_of(clip)):
        got = stream(apm, cache, {slot: columns})[slot]
        assert_close(got, whole[number * UNIT_ROWS :][:UNIT_ROWS], 1e-5, f"unit {number}")
    assert int(cache.lengths[slot]) == int(cache.positions[slot]) == n_units * UNIT_ROWS


@few
@given(seed=st.integers(0, 2**20), n_units=st.integers(1, 5), last=st.integers(1, 100), alone=st.booleans())
def test_units_equal_float64_reference(tiny_model, apm, new_cache, seed, n_units, last, alone):
    """With and without context frames; the last unit may be shorter."""
    first, steady = (ALONE, ALONE) if alone else (FIRST, STEADY)
    units = [unit(seed + i, steady if i else first) for i in range(n_units)]
    start = units[-1][1][0]
    units[-1] = units[-1][0], (start, 2 + last)
    cache, expected = new_cache(), plain(tiny_model, units)
    for number, columns in enumerate(units):
        assert_close(stream(apm, cache, {1: columns})[1], expected[number], 1e-4, f"unit {number}")
    assert int(cache.lengths[1]) == sum(map(len, expected))


def test_units_without_context_frames_differ_at_their_edges(apm, new_cache):
    clip, cache = mel(0, 202), new_cache()
    n_frames = torch.tensor([202])
    whole = apm.encode(clip[None], n_frames, (n_frames + 1) // 2, chunk=UNIT_ROWS)[0]
    frames = torch.nn.functional.pad(clip[:, :100], (2, 2))
    off = (stream(apm, cache, {0: (frames, ALONE)})[0] - whole[:UNIT_ROWS]).abs().max()
    assert off > 1e-3, f"expected the edge of the convolution to change rows, got max diff {off}"


@pytest.mark.parametrize(
    "columns, n_rows",
    [(STEADY, 50), (FIRST, 50), (ALONE, 50), (ABSENT, 0), ((2, 62), 30), ((2, 63), 31), ((0, 62), 30), ((2, 3), 1)],
)
def test_rows_per_unit(apm, new_cache, columns, n_rows):
    cache = new_cache()
    assert len(stream(apm, cache, {0: unit(0, columns)})[0]) == n_rows
    assert cache.lengths.tolist() == [n_rows, 0, 0, 0]


@few
@given(seed=st.integers(0, 2**20), data=st.data())
def test_batch_equals_single_runs(apm, new_cache, seed, data):
    """Slots of different lengths, with units of any kind; no bit of a slot without a unit changes."""
    kinds = st.sampled_from([STEADY, FIRST, ALONE, ABSENT, (0, 50), (2, 7)])
    together, alone = new_cache(), new_cache()
    for call in range(3):
        order = data.draw(st.permutations(range(3)))[: data.draw(st.integers(1, 3))]
        units = {slot: unit(seed + 3 * call + slot, data.draw(kinds)) for slot in order}
        before = {slot: slot_rows(together, slot) for slot in range(3)}
        got = stream(apm, together, units)
        for slot in range(3):
            if slot not in units or units[slot][1] == ABSENT:
                assert_slot(together, slot, before[slot])
            if slot in units:
                assert_close(got[slot], stream(apm, alone, {slot: units[slot]})[slot], 1e-5, f"slot {slot}")
                for state, expected in zip(slot_rows(together, slot), slot_rows(alone, slot), strict=True):
                    assert_close(state, expected, 1e-5, f"slot {slot} state")


@pytest.mark.parametrize("first, steady", [(FIRST, STEADY), (ALONE, ALONE)], ids=["around", "alone"])
def test_thirtieth_unit_empties_the_cache(tiny_model, apm, new_cache, first, steady):
    """Slot 1 is ten units behind: at unit 29 slot 0 is emptied and slot 1 is not."""
    units = [unit(i, steady if i else first) for i in range(31)]
    cache, fresh = new_cache(), new_cache()
    before, after = plain(tiny_model, units[:29]), plain(tiny_model, units[29:])
    for number in range(31):
        batch = {0: units[number]}
        if number >= 10:
            batch[1] = units[number - 10]
        got = stream(apm, cache, batch)
        expected = before[number] if number < 29 else after[number - 29]
        assert_close(got[0], expected, 1e-4, f"unit {number}")
        if number >= 10:
            assert_close(got[1], before[number - 10], 1e-4, f"unit {number - 10} of the later slot")
        n_units = number + 1 if number < 29 else number - 28
        assert cache.lengths[:2].tolist() == [n_units * UNIT_ROWS, max(0, number - 9) * UNIT_ROWS]
        assert cache.positions[0] == cache.lengths[0]
        if number >= 29:
            batch = {0: units[number], 1: unit(0, ABSENT)}
            assert_same(got[0], stream(apm, fresh, batch)[0], f"unit {number} on a fresh slot")


@pytest.mark.parametrize(
    "held, columns, expected",
    [
        (1400, STEADY, 1450),
        (1447, STEADY, 1497),  # 1447 + 52 convolved rows stay below 1500
        (1448, STEADY, 50),
        (1448, FIRST, 1498),
        (1449, FIRST, 50),
        (1449, ALONE, 1499),
        (1450, ALONE, 50),
        (1450, (2, 101), 50),  # 99 frames are 50 rows
        (1450, (2, 100), 1499),
        (1450, (0, 99), 49),
        (1450, (0, 98), 1498),
        (1499, ABSENT, 1499),
        (1499, (2, 3), 1),
    ],
)
def test_slot_is_emptied_when_its_convolved_rows_would_reach_the_end_of_the_table(
    tiny_model, apm, new_cache, held, columns, expected
):
    cache = new_cache()
    assert cache.max_len == 1500
    for tensor in (*cache.k, *cache.v):
        tensor.normal_(generator=torch.Generator().manual_seed(0))
    for counter in (cache.lengths, cache.positions):
        counter[:2] = held
    before = slot_rows(cache, 1)
    got = stream(apm, cache, {0: unit(0, columns), 2: unit(1, FIRST)})
    assert cache.lengths.tolist() == cache.positions.tolist() == [expected, held, 50, 0]
    assert_slot(cache, 1, before)
    if expected <= UNIT_ROWS:
        assert_close(got[0], plain(tiny_model, [unit(0, columns)])[0], 1e-4)


def test_nan_does_not_reach_other_slots(apm, new_cache):
    clean, dirty = new_cache(), new_cache()
    bad = mel(9, UNIT_COLUMNS) * NAN, FIRST
    expected = stream(apm, clean, {0: unit(0, FIRST), 1: unit(9, FIRST)})
    got = stream(apm, dirty, {0: unit(0, FIRST), 1: bad})
    assert got[1].isnan().any(), "expected NaN in the slot that was fed NaN"
    assert_same(got[0], expected[0])
    assert_slot(dirty, 0, slot_rows(clean, 0))


def test_reused_slot_equals_a_new_one(apm, new_cache):
    used, fresh = new_cache(), new_cache()
    stream(apm, used, {1: (mel(9, UNIT_COLUMNS) * NAN, FIRST)})
    stream(apm, used, {1: unit(3, STEADY)})
    used.reset(torch.tensor([1]))
    for number, columns in enumerate((FIRST, STEADY)):
        got, expected = (stream(apm, cache, {1: unit(number, columns)})[1] for cache in (used, fresh))
        assert_same(got, expected, f"unit {number}")
    assert_slot(used, 1, slot_rows(fresh, 1))
