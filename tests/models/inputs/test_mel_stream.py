"""Streaming log-mel against the whole-window reference; independence of slots, splits and padding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import AudioError
from models.graphs.region_graphs import compile_counters
from models.inputs.audio import LogMel
from models.inputs.audio_sizes import FIRST_UNIT_SAMPLES, UNIT_SAMPLES
from models.inputs.mel_stream import MAX_PUSH, MelStreamState, mel_step, plan_emission
from tests.models.inputs.mel_reference import WholeWindow
from tests.models.inputs.test_audio import TOLERANCE, assert_near, noise

MEL = LogMel()
# Units of 30 seconds with a click near an end of the window: those around its place, and the last, of the moved window.
ENDS = (*range(8, 12), *range(27, 30))


class Slots:
    """A state, with short calls to step one or several of its slots."""

    def __init__(self, n_slots: int = 3, redundancy: int = 2, clip: str = "auto"):
        self.state, self.redundancy, self.clip = MelStreamState.allocate(n_slots), redundancy, clip

    def step(self, pushes, emit=True, last=False, bucket=None, filler=float("nan")):
        """One `mel_step` of a batch. pushes: slot -> samples. Returns: mel, lo, hi."""
        slots = torch.tensor(list(pushes))
        n_new = torch.tensor([len(push) for push in pushes.values()])
        samples = torch.full((len(pushes), bucket or max(1, int(n_new.max()))), filler)
        for row, push in enumerate(pushes.values()):
            samples[row, : len(push)] = torch.as_tensor(push)
        flags = (torch.full(slots.shape, flag) for flag in (emit, last))
        return mel_step(MEL, self.state, slots, samples, n_new, *flags, redundancy=self.redundancy, clip=self.clip)

    def unit(self, slot, push, **options):
        """[80, hi - lo] frames that one slot emits; checks that all other columns are zero."""
        mel, lo, hi = self.step({slot: push}, **options)
        outside = torch.cat((mel[0, :, : int(lo)], mel[0, :, int(hi) :]), dim=1)
        assert outside.eq(0).all()
        return mel[0, :, int(lo) : int(hi)]

    def rows(self, slot):
        return [tensor[slot].clone() for tensor in self.state.tensors()]


def units(wave):
    """The wave split as a session pushes it: a longer first unit, then seconds."""
    cuts = range(FIRST_UNIT_SAMPLES, len(wave), UNIT_SAMPLES)
    return np.split(wave, list(cuts))


def assert_same(got, expected):
    assert torch.equal(got, expected), f"expected bit-identical, got max diff {(got - expected).abs().max()}"


def assert_same_state(slots, slot, other, other_slot):
    for got, expected in zip(slots.rows(slot), other.rows(other_slot), strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("redundancy", [0, 2])
def test_units_equal_whole_window_over_two_slides(redundancy):
    wave = noise(FIRST_UNIT_SAMPLES + 40 * UNIT_SAMPLES) * 0.01
    # Clicks that are loudest in frames mirrored at the end or at the new start of the window.
    wave[FIRST_UNIT_SAMPLES + 6 * UNIT_SAMPLES - 1] = 0.2
    wave[160_000 + 2] = 0.5
    wave[320_000 + 170] = 1.0
    reference, slots = WholeWindow(redundancy), Slots(redundancy=redundancy)
    for number, push in enumerate(units(wave)):
        reference.push(push)
        got, expected = slots.unit(1, push, bucket=16_640), reference.emit()
        assert_near(got, expected)
        assert got.shape[1] == 100 + (redundancy if number == 0 else 2 * redundancy)
    assert reference.base == 2000
    assert int(slots.state.n_emitted[1]) == 4100


@pytest.mark.parametrize("click", [159_900, 160_000, 160_001, 160_090, 160_200, 479_900, 480_300, 480_479])
def test_mirrored_frames_count_for_the_loudest_bin(click):
    """One click determines the floor; mirrored frames at the ends of a window weight it differently from others."""
    wave = noise(FIRST_UNIT_SAMPLES + 29 * UNIT_SAMPLES) * 1e-3
    wave[click] = 100.0  # beyond full scale, so that every frame with it raises the floor above the noise
    reference, slots = WholeWindow(2), Slots()
    for number, push in enumerate(units(wave)):
        reference.push(push)
        got = slots.unit(0, push)
        if number in ENDS:
            assert_near(got, reference.emit())
        else:
            reference.skip()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_split_equals_one_push(data):
    before = data.draw(st.sampled_from([0, 1, 39, 200, 79_000, 159_900, 470_000, 479_990, 630_000]), label="before")
    total = data.draw(st.integers(1, MAX_PUSH), label="total")
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=8), label="cuts"))
    redundancy = data.draw(st.sampled_from([0, 1, 2]), label="redundancy")
    clip = data.draw(st.sampled_from(["auto", "fixed", "dynamic"]), label="clip")
    wave = noise(before + total, seed=data.draw(st.integers(0, 3), label="seed"))
    whole, split = (Slots(redundancy=redundancy, clip=clip) for _ in range(2))
    for slots in (whole, split):
        for push in np.split(wave[:before], range(UNIT_SAMPLES, before, UNIT_SAMPLES)):
            slots.step({0: push})
    expected = whole.step({0: wave[before:]})
    for push in np.split(wave[before:], cuts):
        split.step({0: push}, emit=False, bucket=min(MAX_PUSH, len(push) // 1600 * 1600 + 1600))
    got = split.step({0: wave[:0]}, bucket=1600)
    assert_same_state(split, 0, whole, 0)
    for a, b in zip(got, expected, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("cut", [159_999, 160_000, 160_001, 160_040, 160_199, 160_359, 160_360, 160_361])
def test_splits_near_the_next_window_start_change_nothing(cut):
    wave = noise(170_000)
    whole, split = Slots(), Slots()
    for slots in (whole, split):
        for push in np.split(wave[:150_000], 10):
            slots.step({0: push}, emit=False)
    whole.step({0: wave[150_000:]}, emit=False)
    split.step({0: wave[150_000:cut]}, emit=False)
    split.step({0: wave[cut:]}, emit=False)
    assert_same_state(split, 0, whole, 0)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_split_equals_whole_window_to_the_last_frame(data):
    n = data.draw(st.integers(160, 120_000), label="n")
    redundancy = data.draw(st.sampled_from([0, 2]), label="redundancy")
    wave = noise(n, seed=data.draw(st.integers(0, 3), label="seed"))
    reference, slots = WholeWindow(redundancy), Slots(redundancy=redundancy)
    start = emitted = 0
    while start < n:
        end = min(n, start + data.draw(st.integers(1500, 16_000), label="push"))
        reference.push(wave[start:end])
        got, expected = slots.unit(2, wave[start:end]), reference.emit()
        if expected is not None:
            assert_near(got, expected)
        else:
            assert got.shape[1] == 0
        start = end
    for _ in range(20):
        got, expected = slots.unit(2, wave[:0], last=True), reference.emit(last=True)
        if expected is None:
            break
        assert_near(got, expected)
    assert got.shape[1] == 0
    emitted = int(slots.state.n_emitted[2])
    assert emitted == reference.emitted == n // 160


@pytest.mark.parametrize("redundancy, needed", [(0, 16_040), (1, 16_200), (2, 16_360)])
def test_emits_only_when_the_context_is_stable(redundancy, needed):
    wave, slots = noise(needed), Slots(redundancy=redundancy)
    assert slots.unit(0, wave[:-1]).shape[1] == 0
    assert int(slots.state.n_emitted[0]) == 0
    assert slots.unit(0, wave[-1:]).shape[1] == 100 + redundancy


def test_a_slot_without_emit_keeps_its_position():
    wave, slots = noise(FIRST_UNIT_SAMPLES), Slots()
    for last in (False, True):
        assert slots.unit(0, wave if not last else wave[:0], emit=False, last=last).shape[1] == 0
    assert int(slots.state.n_emitted[0]) == 0
    assert slots.unit(0, wave[:0]).shape[1] == 102


def test_auto_clipping_is_fixed_for_short_windows():
    wave = noise(FIRST_UNIT_SAMPLES + UNIT_SAMPLES)
    got = {}
    for clip in ("auto", "fixed", "dynamic"):
        slots = Slots(clip=clip)
        got[clip] = [slots.unit(0, push) for push in units(wave)][-1]
    assert_same(got["auto"], got["fixed"])
    assert got["fixed"].min() == -1.5
    assert got["dynamic"].min() > -1.5


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=4))
def test_batch_equals_single_runs(starts):
    """Slots of different ages in one batch with a padding row."""
    together, alone = Slots(n_slots=4), Slots(n_slots=4)
    waves = {slot: noise(FIRST_UNIT_SAMPLES + 6 * UNIT_SAMPLES, seed) for slot, (_, seed) in enumerate(starts)}
    pushes = {slot: units(wave) for slot, wave in waves.items()}
    for slot, (age, _) in enumerate(starts):
        for number in range(age):
            for slots in (together, alone):
                slots.step({slot: pushes[slot][number]})
    for step in range(3):
        batch = {slot: pushes[slot][age + step] for slot, (age, _) in enumerate(starts)}
        mel, lo, hi = together.step({**batch, together.state.scratch: np.zeros(0, np.float32)}, bucket=16_640)
        for row, (slot, push) in enumerate(batch.items()):
            one, one_lo, one_hi = alone.step({slot: push}, bucket=16_640)
            assert (int(lo[row]), int(hi[row])) == (int(one_lo), int(one_hi))
            assert_near(mel[row], one[0].double().numpy())


def test_other_slots_stay_bit_identical():
    wave, slots = noise(FIRST_UNIT_SAMPLES + 2 * UNIT_SAMPLES), Slots()
    for push in units(wave):
        slots.step({0: push, 1: push * 0.5})
    before = slots.rows(1)
    slots.step({0: np.full(16_000, np.nan, np.float32), 2: wave[:16_000]})
    slots.state.reset(torch.tensor([0]))
    for got, expected in zip(slots.rows(1), before, strict=True):
        assert_same(got, expected)


def test_nan_samples_do_not_affect_other_rows():
    wave, clean, mixed = noise(FIRST_UNIT_SAMPLES + 6 * UNIT_SAMPLES), Slots(), Slots()
    for push in units(wave):
        bad = np.full_like(push, np.nan)
        expected = clean.step({0: push * 0.3, 1: push})
        got = mixed.step({0: bad, 1: push})
        assert_same(got[0][1], expected[0][1])
    assert not mixed.state.frame_max[0].isfinite().all()
    assert_same_state(mixed, 1, clean, 1)


@pytest.mark.parametrize("redundancy", [0, 2])
def test_reused_slot_equals_fresh_one(redundancy):
    wave = noise(FIRST_UNIT_SAMPLES + 5 * UNIT_SAMPLES)
    used, fresh = Slots(redundancy=redundancy), Slots(redundancy=redundancy)
    for push in units(noise(FIRST_UNIT_SAMPLES + 30 * UNIT_SAMPLES, seed=5)):
        used.step({1: push})
    used.step({1: np.full(16_000, np.nan, np.float32)})
    used.state.reset(torch.tensor([1]))
    for push in units(wave):
        assert_same(used.unit(1, push), fresh.unit(1, push))
    assert_same_state(used, 1, fresh, 1)


def test_unwritten_state_is_not_read():
    wave, clean, spoiled = noise(FIRST_UNIT_SAMPLES + 5 * UNIT_SAMPLES), Slots(), Slots()
    for tensor in spoiled.state.tensors():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    for push in units(wave):
        assert_same(spoiled.unit(0, push), clean.unit(0, push))


@pytest.mark.parametrize("filler", [float("nan"), float("inf"), 1e30])
def test_samples_after_a_push_are_ignored(filler):
    wave, tight, padded = noise(FIRST_UNIT_SAMPLES + UNIT_SAMPLES), Slots(), Slots()
    for push in units(wave):
        got = padded.unit(0, push, bucket=16_640, filler=filler)
        assert_same(got, tight.unit(0, push, bucket=16_640, filler=0.0))
    assert_same_state(padded, 0, tight, 0)


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 16_480), st.booleans(), st.booleans()), max_size=8), st.sampled_from([0, 1, 2])
)
def test_planned_emissions_equal_the_steps(steps, redundancy):
    slots, n_samples, n_emitted = Slots(redundancy=redundancy), 0, 0
    for n, emit, last in steps:
        n_samples += n
        try:
            plan = plan_emission(n_samples, n_emitted, redundancy, last) if emit else (0, 0, n_emitted)
        except AudioError:
            return
        _, lo, hi = slots.step({0: np.zeros(n, np.float32)}, emit=emit, last=last)
        n_emitted = plan[2]
        assert (int(lo), int(hi), int(slots.state.n_emitted[0])) == plan
        assert int(slots.state.n_samples[0]) == n_samples


def test_plan_refuses_frames_that_the_ring_no_longer_has():
    assert plan_emission(256 * 160 + 40, 0, 2) == (2, 104, 100)
    with pytest.raises(AudioError, match="streamed audio: expected at most 256 frames waiting, got 257"):
        plan_emission(257 * 160 + 40, 0, 2)


def test_refuses_a_push_longer_than_the_ring():
    with pytest.raises(AssertionError, match="at most 40960 samples a push, got 40961"):
        Slots().step({0: np.zeros(MAX_PUSH + 1, np.float32)})


def test_compiles_to_one_graph():
    wave, plain, traced = noise(FIRST_UNIT_SAMPLES + 5 * UNIT_SAMPLES), Slots(), Slots()
    torch._dynamo.reset()
    before = compile_counters()["graphs"]
    step = torch.compile(mel_step, backend="aot_eager", fullgraph=True, dynamic=False)
    for push in units(wave):
        samples = torch.zeros(1, 16_640)
        samples[0, : len(push)] = torch.from_numpy(push)
        rest = torch.tensor([len(push)]), torch.tensor([True]), torch.tensor([False])
        got = step(MEL, traced.state, torch.tensor([0]), samples, *rest, redundancy=2)
        expected = plain.step({0: push}, bucket=16_640)
        assert_near(got[0], expected[0].double().numpy(), TOLERANCE)
    assert compile_counters()["graphs"] - before == 1
