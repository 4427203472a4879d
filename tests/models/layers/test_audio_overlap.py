"""Restart of the audio encoder from a slot's last units: equal to streaming these units into an empty slot.

Tolerances: 1e-5 between two ways through the same float32 code, 1e-4 against float64.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Self

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.checkpoint.config import AudioConfig
from models.errors import SettingsError
from models.inputs.audio import UNIT_COLUMNS
from models.layers.apm import UNIT_ROWS, Apm
from models.layers.audio_overlap import RecentMel, max_overlap_units, needs_overlap, overlap_encode, store_recent
from models.layers.backend import TORCH
from models.layers.kv_cache import KVCache
from tests.models.compare import assert_close, assert_same
from tests.models.layers import whisper_reference as slow_whisper

BINS, NAN = 80, float("nan")
STEADY, FIRST, ALONE, ABSENT = (0, 104), (2, 104), (2, 102), (0, 0)
K = 3  # units encoded again, unless a test sets another number
few = settings(max_examples=12)
Unit = tuple[Tensor, tuple[int, int]]  # log-mel [80, 104] and the valid columns
kinds = st.sampled_from([STEADY, STEADY, ALONE, FIRST, ABSENT, (2, 63), (0, 7)])


def unit(seed: int, columns: tuple[int, int] = STEADY) -> Unit:
    """Noise; columns outside the valid range are NaN."""
    mel = torch.full((BINS, UNIT_COLUMNS), NAN)
    first, end = columns
    mel[:, first:end] = 0.5 * torch.randn(BINS, end - first, generator=torch.Generator().manual_seed(seed))
    return mel, columns


@dataclass
class Slots:
    """Three slots and a scratch slot: their recent log-mel and the encoder's cache."""

    apm: Apm
    n_units: int = K
    recent: RecentMel = field(init=False)
    cache: KVCache = field(init=False)

    def __post_init__(self) -> None:
        attention = self.apm.layers[0].self_attn
        self.recent = RecentMel.allocate(3, self.n_units, max_positions=self.apm.max_positions)
        self.cache = KVCache(
            n_layers=len(self.apm.layers),
            n_slots=3,
            max_len=self.apm.max_positions,
            kv_heads=attention.heads,
            head_dim=self.apm.conv1.out_channels // attention.heads,
            dtype=self.apm.conv1.weight.dtype,
            device="cpu",
        )

    def encode(self, units: dict[int, Unit]) -> dict[int, Tensor]:
        """Encode one unit per slot in one call. Returns: slot -> valid rows."""
        slots = torch.tensor(list(units))
        mel = torch.stack([mel for mel, _ in units.values()])
        first, end = torch.tensor([columns for _, columns in units.values()]).unbind(1)
        store_recent(self.recent, slots, mel, first, end)
        rows, n_valid = self.apm.stream(mel.to(self.cache.k[0].dtype), first, end, self.cache, slots, TORCH)
        return {slot: rows[i, : n_valid[i]] for i, slot in enumerate(units)}

    def overlap(self, active: dict[int, bool]) -> None:
        overlap_encode(self.apm, self.recent, self.cache, torch.tensor(list(active)), torch.tensor([*active.values()]))

    def tensors(self) -> list[Tensor]:
        return [*self.recent.tensors(), *self.cache.tensors()]

    def copy(self, slot: int) -> list[Tensor]:
        return [tensor[slot].clone() for tensor in self.tensors()]

    def assert_slot(self, slot: int, expected: list[Tensor]) -> None:
        for number, (got, wanted) in enumerate(zip(self.copy(slot), expected, strict=True)):
            assert_same(got, wanted, f"slot {slot}, state tensor {number}")

    def assert_cache_close(self, slot: int, other: Self, other_slot: int, tolerance: float = 1e-5) -> None:
        n_rows = int(other.cache.lengths[other_slot])
        got = int(self.cache.lengths[slot]), int(self.cache.positions[slot])
        assert got == (n_rows, n_rows), f"length and position: expected {n_rows} twice, got {got}"
        for mine, theirs in zip((*self.cache.k, *self.cache.v), (*other.cache.k, *other.cache.v), strict=True):
            assert_close(mine[slot, :, :n_rows], theirs[other_slot, :, :n_rows], tolerance, "keys or values")


@pytest.fixture(scope="session")
def apm(tiny_model) -> Apm:
    return tiny_model.apm


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@few
@given(seed=st.integers(0, 2**20), columns=st.lists(kinds, max_size=7), slot=st.integers(0, 2))
@example(seed=0, columns=[], slot=0)
@example(seed=0, columns=[FIRST], slot=0)
@example(seed=0, columns=[FIRST, *[STEADY] * 8], slot=1)
def test_restart_equals_streaming_the_last_units_into_an_empty_slot(apm, seed, columns, slot):
    units = [unit(seed + i, kind) for i, kind in enumerate(columns)]
    slots, fresh = Slots(apm), Slots(apm)
    for one in units:
        slots.encode({slot: one})
    held = (*slots.cache.k, *slots.cache.v)
    before = [rows[slot].clone() for rows in held]
    slots.overlap({slot: True})
    for one in [one for one in units if one[1] != ABSENT][-K:]:
        fresh.encode({slot: one})
    slots.assert_cache_close(slot, fresh, slot)
    n_rows = int(fresh.cache.lengths[slot])
    for got, old in zip(held, before, strict=True):
        assert_same(got[slot, :, n_rows:], old[:, n_rows:], "rows after the units")
        assert got.isfinite().all(), "expected finite rows, also for padding"
    following = {slot: unit(seed + 100)}
    assert_close(slots.encode(following)[slot], fresh.encode(following)[slot], 1e-5, "the unit after")


def test_unit_after_a_restart_equals_float64_reference(tiny_model, apm):
    units = [unit(i, STEADY if i else FIRST) for i in range(9)]
    slots = Slots(apm)
    for one in units[:-1]:
        slots.encode({0: one})
    slots.overlap({0: True})
    rows = torch.cat([slow_whisper.convolve(apm, mel)[1:][:UNIT_ROWS] for mel, _ in units[-K - 1 :]])
    number = torch.arange(len(rows)) // UNIT_ROWS
    heads = tiny_model.config.audio_config.encoder_attention_heads
    expected = slow_whisper.encode(apm, rows, number <= number[:, None], heads)[-UNIT_ROWS:]
    assert_close(slots.encode({0: units[-1]})[0], expected, 1e-4)


def test_long_session_is_never_emptied(apm):
    """Two slots, one 12 units behind; the host counts rows and never synchronizes."""
    slots = Slots(apm, n_units=10)
    n_rows, started_over = [0, 0], ([], [])
    for number in range(60):
        ages = {slot: age for slot, age in enumerate((number, number - 12)) if age >= 0}
        units = {slot: unit(100 * slot + age, STEADY if age else FIRST) for slot, age in ages.items()}
        due = {slot: needs_overlap(n_rows[slot], *columns) for slot, (_, columns) in units.items()}
        if any(due.values()):
            slots.overlap(due)
        slots.encode(units)
        for slot, age in ages.items():
            n_rows[slot] = 50 * (1 + (10 if due[slot] else n_rows[slot] // 50))
            started_over[slot].extend([age] if due[slot] else [])
        assert slots.cache.lengths[:2].tolist() == n_rows, f"unit {number}"
    assert started_over == ([29, 48], [29])


@few
@given(seed=st.integers(0, 2**20), data=st.data())
def test_batch_equals_single_runs(apm, seed, data):
    """Slots of different lengths, units of any kind; no bit of an inactive slot changes."""
    together, alone = Slots(apm), Slots(apm)
    for slot in range(3):
        for number, kind in enumerate(data.draw(st.lists(kinds, max_size=5))):
            for slots in (together, alone):
                slots.encode({slot: unit(seed + 10 * slot + number, kind)})
    active = {slot: data.draw(st.booleans()) for slot in data.draw(st.permutations(range(3)))}
    before = [together.copy(slot) for slot in range(3)]
    together.overlap(active)
    for slot, is_active in active.items():
        if is_active:
            alone.overlap({slot: True})
            together.assert_cache_close(slot, alone, slot)
        else:
            together.assert_slot(slot, before[slot])


@pytest.mark.parametrize("poison", [False, True], ids=["clean", "nan"])
def test_restart_does_not_depend_on_other_slots(apm, poison):
    """Slot 0 restarts beside a slot that contains NaN; slot 2 and a padding row are inactive."""
    clean, dirty = Slots(apm), Slots(apm)
    for slots in (clean, dirty):
        for number in range(5):
            slots.encode({slot: unit(10 * slot + number) for slot in range(3)})
    if poison:
        for tensor in (*dirty.cache.k, *dirty.cache.v, dirty.recent.mel):
            tensor[1:] = NAN
    idle = dirty.copy(2)
    for slots in (clean, dirty):
        slots.overlap({0: True, 1: True, 2: False, slots.cache.scratch: False})
    dirty.assert_slot(0, clean.copy(0))
    dirty.assert_slot(2, idle)
    got = bool(dirty.cache.k[0][1, :, : K * UNIT_ROWS].isnan().any())
    assert got == poison, f"NaN in the slot that held NaN: expected {poison}, got {got}"
    following = {slot: unit(slot) for slot in range(3)}
    assert_same(dirty.encode(following)[0], clean.encode(following)[0], "the unit after")


def test_padding_writes_only_to_the_scratch_slot(apm):
    """Padding rows that are encoded and restarted as if they were active, beside slot 1."""
    slots, expected = Slots(apm), Slots(apm)
    scratch, yes = slots.cache.scratch, torch.tensor([True])
    for number in range(4):
        slots.encode({scratch: unit(50 + number), 1: unit(number)})
        expected.encode({1: unit(number)})
    others = {slot: slots.copy(slot) for slot in (0, 2)}
    overlap_encode(apm, slots.recent, slots.cache, torch.tensor([scratch, 1, scratch]), yes.expand(3))
    overlap_encode(apm, expected.recent, expected.cache, torch.tensor([1]), yes)
    for slot, before in others.items():
        slots.assert_slot(slot, before)
    slots.assert_cache_close(1, expected, 1)
    for got, wanted in zip(slots.recent.tensors(), expected.recent.tensors(), strict=True):
        assert_same(got[1], wanted[1], "recent units of slot 1")


def test_unit_without_columns_is_not_stored(apm):
    slots = Slots(apm)
    for number in range(5):
        slots.encode({0: unit(number), 2: unit(10 + number)})
    before = slots.copy(0)
    slots.encode({2: unit(30), 0: unit(31, ABSENT)})
    slots.assert_slot(0, before)
    assert slots.recent.n_units[:3].tolist() == [5, 0, 6]


def test_newest_unit_can_be_taken_back(apm):
    """Lowering a slot's counters by one unit restores its previous units."""
    slots, undone = Slots(apm), Slots(apm)
    for number in range(6):
        for each in (slots, undone):
            each.encode({0: unit(number)})
    undone.encode({0: unit(99)})
    undone.recent.n_units[0] -= 1
    for each in (slots, undone):
        each.overlap({0: True})
    undone.assert_cache_close(0, slots, 0, tolerance=0.0)
    for each in (slots, undone):
        each.encode({0: unit(6)})
        each.overlap({0: True})
    undone.assert_cache_close(0, slots, 0, tolerance=0.0)


def test_units_of_a_partly_filled_buffer_can_be_taken_back(apm):
    """Units beyond a slot's own count are ignored, whatever their content."""
    slots, undone = Slots(apm), Slots(apm)
    for number in range(4):
        undone.encode({0: unit(number)})
    slots.encode({0: unit(0)})
    undone.recent.n_units[0] = 1
    for each in (slots, undone):
        each.overlap({0: True})
    undone.assert_cache_close(0, slots, 0, tolerance=0.0)


def test_second_restart_has_the_same_result(apm):
    slots = Slots(apm)
    for number in range(6):
        slots.encode({1: unit(number)})
    slots.overlap({1: True})
    once = slots.copy(1)
    slots.overlap({1: True})
    slots.assert_slot(1, once)


def test_reused_slot_equals_a_new_one(apm):
    used, fresh = Slots(apm), Slots(apm)
    nan = torch.full((BINS, UNIT_COLUMNS), NAN), STEADY
    for _ in range(5):
        used.encode({1: nan})
    used.recent.reset(torch.tensor([1]))
    used.cache.reset(torch.tensor([1]))
    used.assert_slot(1, fresh.copy(1))
    for slots in (used, fresh):
        slots.encode({1: unit(0, FIRST)})
        slots.overlap({1: True})
    used.assert_slot(1, fresh.copy(1))


def test_restart_in_half_precision(apm):
    half = deepcopy(apm).to(torch.bfloat16)
    slots, exact = Slots(half), Slots(apm)
    for each in (slots, exact):
        for number in range(5):
            each.encode({0: unit(number)})
        each.overlap({0: True})
    assert slots.recent.mel.dtype == torch.float32
    got, expected = slots.encode({0: unit(5)})[0].float(), exact.encode({0: unit(5)})[0]
    off = float((got - expected).norm() / expected.norm())
    assert off < 0.05, f"bfloat16 against float32: expected below 0.05, got {off:.3g}"


@pytest.mark.usefixtures("fresh_dynamo")
def test_restart_compiles_as_one_graph(apm):
    plain, compiled = Slots(apm), Slots(apm)
    options = {"backend": "aot_eager", "fullgraph": True, "dynamic": False}
    keep, restart = torch.compile(store_recent, **options), torch.compile(overlap_encode, **options)
    where, active = torch.tensor([0, 2, 3]), torch.tensor([True, False, True])
    first, end = torch.tensor([0, 2, 0]), torch.tensor([104, 104, 0])
    with torch.no_grad():
        for number in range(5):
            mel = torch.stack([unit(3 * number + row)[0] for row in range(3)])
            for slots, run in ((plain, store_recent), (compiled, keep)):
                run(slots.recent, where, mel, first, end)
        for slots, run in ((plain, overlap_encode), (compiled, restart)):
            run(apm, slots.recent, slots.cache, where, active)
    for slot in range(3):
        for got, expected in zip(compiled.copy(slot), plain.copy(slot), strict=True):
            assert_close(got, expected, 1e-5, f"slot {slot}")
    assert compiled.cache.lengths[:3].tolist() == [K * UNIT_ROWS, 0, 0]


@pytest.mark.parametrize("table, least", [(400, 0), (1500, 1300)])
@pytest.mark.parametrize("columns", [STEADY, FIRST, ALONE, (2, 101), (0, 98), (2, 3), ABSENT])
def test_overlap_is_needed_exactly_when_the_encoder_would_empty_the_slot(table, least, columns):
    """One slot per length that a cache can have."""
    sizes = {"d_model": 2, "encoder_layers": 1, "encoder_attention_heads": 1, "encoder_ffn_dim": 2}
    apm = Apm(AudioConfig(num_mel_bins=1, max_source_positions=table, **sizes))
    held = torch.arange(least, table)
    n = len(held)
    cache = KVCache(n_layers=1, n_slots=n, max_len=table, kv_heads=1, head_dim=2, dtype=torch.float32, device="cpu")
    for counter in (cache.lengths, cache.positions):
        counter[:n] = held
    first, end = (torch.full((n,), column) for column in columns)
    with torch.no_grad():
        _, n_new = apm.stream(torch.zeros(n, 1, UNIT_COLUMNS), first, end, cache, torch.arange(n), TORCH)
    needed = torch.tensor([needs_overlap(int(rows), *columns, max_positions=table) for rows in held])
    expected = torch.where(needed, 0, held) + n_new
    wrong = held[cache.lengths[:n] != expected].tolist()
    assert not wrong, f"slots holding {wrong} rows: expected the encoder to empty exactly these slots"
    assert bool(needed.any()) == (columns != ABSENT)


@given(table=st.integers(102, 5000))
def test_one_more_unit_fits_after_the_longest_overlap(table):
    most = max_overlap_units(table)
    assert not needs_overlap(most * UNIT_ROWS, *STEADY, max_positions=table)
    assert needs_overlap((most + 1) * UNIT_ROWS, *STEADY, max_positions=table)


def test_refuses_overlaps_that_do_not_fit_the_table():
    assert max_overlap_units() == 28
    assert RecentMel.allocate(2).mel.shape == (3, 11, 80, 104)
    assert RecentMel.allocate(2, 5, n_mels=40).mel.shape == (3, 6, 40, 104)
    assert RecentMel.allocate(2, max_positions=180).mel.shape == (3, 3, 80, 104)
    for n_units, table in ((0, 1500), (29, 1500), (None, 100)):
        with pytest.raises(SettingsError, match="audio overlap: expected 1 to"):
            RecentMel.allocate(2, n_units, max_positions=table)


def pooled_rows(apm: Apm, units: list[Unit], n_units: int | None) -> Tensor:
    """[units, 10, D] streamed; n_units are encoded again at the table end, None = never (the slot is emptied)."""
    slots = Slots(apm, n_units or 1)
    rows = []
    for mel, columns in units:
        if n_units and needs_overlap(int(slots.cache.lengths[0]), *columns, max_positions=apm.max_positions):
            slots.overlap({0: True})
        rows.append(slots.encode({0: (mel, columns)})[0].unflatten(0, (-1, 5)).mean(1))
    return torch.stack(rows)


def test_rows_after_a_restart_stay_closer_to_an_uninterrupted_encode(tiny_model):
    """Positions are removed, since they change at every restart: the three differ in their lost context alone."""
    config, weights = tiny_model.config.audio_config, dict(tiny_model.apm.state_dict())

    def encoder(table: int) -> Apm:
        apm = Apm(config.model_copy(update={"max_source_positions": table}))
        apm.load_state_dict(weights | {"embed_positions.weight": torch.zeros(table, config.d_model)})
        return apm.requires_grad_(False)

    units, after = [unit(number, STEADY if number else FIRST) for number in range(32)], slice(29, 32)
    uncut = pooled_rows(encoder(1800), units, None)

    def off(n_units: int | None) -> float:
        rows = pooled_rows(encoder(1500), units, n_units)
        assert_close(rows[:29], uncut[:29], 1e-5, "before the cut")
        return float((rows[after] - uncut[after]).norm() / uncut[after].norm())

    forgotten, five, ten = off(None), off(5), off(10)
    got = f"relative error of three units: nothing kept {forgotten:.3f}, 5 units {five:.3f}, 10 units {ten:.3f}"
    assert ten < five < forgotten, got
    assert 1.5 * ten < forgotten, got
