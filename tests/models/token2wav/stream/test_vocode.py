"""Vocoding by chunks: sample counts, seams, independent slots, one trace for every kind of chunk."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.graphs.region_graphs import compile_counters
from models.token2wav.hift.hift import LIMIT, Hift
from models.token2wav.stream.vocode import (
    REFERENCE_RULES,
    TAIL_FRAMES,
    TAIL_SAMPLES,
    MelChunk,
    VocodeRules,
    VocodeState,
    vocode,
)
from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.hift.hifts import CONFIG, make_hift, random_mel

HIFT = make_hift()
RULES = VocodeRules()
BUCKET = 14
Chunks = list[int]


class Session:
    """One slot, vocoded chunk by chunk in separate calls."""

    def __init__(self, hift: Hift = HIFT, rules: VocodeRules = RULES, slot: int = 1, state: VocodeState | None = None):
        self.hift, self.rules, self.slots = hift, rules, torch.tensor([slot])
        self.state = VocodeState.allocate(3, CONFIG.n_mels) if state is None else state

    def push(self, mel: Tensor, last: bool = False, bucket: int = BUCKET) -> Tensor:
        """The samples to send after mel [n_mels, n]."""
        n = mel.shape[1]
        padded = torch.full((1, mel.shape[0], bucket), float("nan"))
        padded[0, :, :n] = mel
        chunk = MelChunk(padded, torch.tensor([n]), torch.tensor([last]))
        wave, n_samples = vocode(self.hift, self.state, self.slots, chunk, self.rules)
        assert wave.shape == (1, 480 * (bucket + TAIL_FRAMES))
        return wave[0, :n_samples]

    def turn(self, mel: Tensor, chunks: Chunks) -> list[Tensor]:
        """The samples of a turn whose mel is divided into these chunks."""
        parts = mel.split(chunks, dim=1)
        return [self.push(part, n == len(parts) - 1) for n, part in enumerate(parts)]


def rows_of(state: VocodeState, slot: int) -> list[Tensor]:
    return [tensor[slot : slot + 1].clone() for tensor in state.tensors()]


def with_decode(decode: Callable[[Tensor, Tensor, Tensor], Tensor], f0: float | None = None) -> Hift:
    """HiFT with a replaced `decode` and, if given, a constant pitch."""
    hift = make_hift()
    hift.decode = decode
    if f0 is not None:
        hift.f0 = lambda mel, n_frames: torch.full((len(mel), mel.shape[2]), f0, dtype=torch.float64)
    return hift


CHUNKS = st.lists(st.integers(0, BUCKET), min_size=1, max_size=7)


@given(chunks=CHUNKS)
@settings(max_examples=20)
def test_any_division_gives_480_samples_per_frame(chunks: Chunks):
    session, mel = Session(), random_mel(1, sum(chunks))[0]
    waves = session.turn(mel, chunks)
    assert sum(map(len, waves)) == 480 * sum(chunks)
    n_held_back = 0
    for n, wave in zip(chunks[:-1], waves[:-1], strict=True):
        n_held_back += n
        assert len(wave) == 480 * max(n_held_back - TAIL_FRAMES, 0)
        n_held_back = min(n_held_back, TAIL_FRAMES)
    assert all(wave.isfinite().all() and (wave.abs() <= LIMIT).all() for wave in waves)
    assert not any(row.any() for row in rows_of(session.state, 1)), "a finished turn leaves its slot empty"


@given(data=st.data())
@settings(max_examples=8)
def test_rows_of_one_call_equal_each_slot_alone(data: st.DataObject):
    """Three slots with different chunks, in any order and with a row of padding, against separate sessions."""
    state = VocodeState.allocate(3, CONFIG.n_mels)
    alone = [Session(slot=slot) for slot in range(3)]
    for step in range(4):
        order = data.draw(st.permutations(range(3)))
        counts = data.draw(st.lists(st.integers(0, BUCKET), min_size=3, max_size=3))
        lasts = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
        mel = random_mel(4, BUCKET, seed=step)
        for row, n in enumerate([*counts, 0]):
            mel[row, :, n:] = float("nan")
        chunk = MelChunk(mel, torch.tensor([*counts, 0]), torch.tensor([*lasts, False]))
        wave, n_samples = vocode(HIFT, state, torch.tensor([*order, 3]), chunk, RULES)
        for row, (slot, n, last) in enumerate(zip(order, counts, lasts, strict=True)):
            expected = alone[slot].push(mel[row, :, :n], last, bucket=n)
            assert_close(wave[row, : n_samples[row]], expected, 2e-5, f"step {step}, slot {slot}")
            for got, one in zip(rows_of(state, slot), rows_of(alone[slot].state, slot), strict=True):
                assert_close(got, one, 2e-5, f"state of slot {slot} after step {step}")
        assert n_samples[3] == 0
        assert not any(row.any() for row in rows_of(state, 3))


def test_tail_sent_later_equals_tail_sent_at_once():
    mel = random_mel(1, 22)[0]
    at_once, later = Session(), Session()
    expected = torch.cat(at_once.turn(mel, [12, 10]))
    assert_same(torch.cat(later.turn(mel, [12, 10, 0])), expected)
    assert not any(row.any() for row in rows_of(later.state, 1)), "a finished turn leaves its slot empty"


def test_short_first_chunks_are_prepended_to_the_next():
    """Nothing was sent, so there is neither a seam nor a restart."""
    mel = random_mel(1, 23)[0]
    for chunks in ([2, 0, 5, 7, 9], [1, 13, 9]):
        got, expected = torch.cat(Session().turn(mel, chunks)), torch.cat(Session().turn(mel, [14, 9]))
        assert_close(got, expected, 2e-5, str(chunks))
    assert_close(Session().push(mel[:, :5], last=True), torch.cat(Session().turn(mel[:, :5], [3, 2])), 2e-5)


def test_idle_slots_keep_every_bit():
    session, mel = Session(), random_mel(1, 40)[0]
    for n in (3, 14, 9):
        session.push(mel[:, :n])
        before = rows_of(session.state, 1)
        assert len(session.push(mel[:, :0])) == 0
        for got, expected in zip(rows_of(session.state, 1), before, strict=True):
            assert_same(got, expected)


@pytest.mark.parametrize("rules", [RULES, REFERENCE_RULES])
def test_alternating_between_two_slots_equals_one_slot(rules: VocodeRules):
    """Each call reads one slot and overwrites the other; the slot that is read does not change."""
    state, alone = VocodeState.allocate(3, CONFIG.n_mels), Session(rules=rules)
    poison(state, 2)
    slots, targets = torch.tensor([0]), torch.tensor([2])
    for step, (n, ends) in enumerate([(3, False), (14, False), (0, False), (9, False), (0, True), (12, False)]):
        mel, before = random_mel(1, BUCKET, seed=step), rows_of(state, int(slots))
        for _ in range(1 + step % 2):
            chunk = MelChunk(mel, torch.tensor([n]), torch.tensor([ends]))
            wave, n_samples = vocode(HIFT, state, slots, chunk, rules, targets=targets)
            for got, want in zip(rows_of(state, int(slots)), before, strict=True):
                assert_same(got, want, f"the slot that call {step} reads")
        assert_same(wave[0, : n_samples[0]], alone.push(mel[0, :, :n], ends), f"sound of call {step}")
        slots, targets = targets, slots


@pytest.mark.parametrize("rules", [RULES, REFERENCE_RULES])
def test_poisoned_slots_do_not_leak(rules: VocodeRules):
    mel = random_mel(1, 31)[0]
    expected = Session(rules=rules).turn(mel, [12, 5, 14])
    session = Session(rules=rules)
    for slot in (0, 2, 3):
        poison(session.state, slot)
    for got, want in zip(session.turn(mel, [12, 5, 14]), expected, strict=True):
        assert_same(got, want)
    assert session.state.wave[[0, 2]].isnan().all()
    poison(session.state, 1)
    session.state.reset(torch.tensor([1]))
    for got, want in zip(session.turn(mel, [12, 5, 14]), expected, strict=True):
        assert_same(got, want)


def poison(state: VocodeState, slot: int) -> None:
    """Fill a slot with a full tail of NaN."""
    for tensor in state.tensors():
        tensor[slot] = float("nan") if tensor.is_floating_point() else TAIL_FRAMES


def test_nan_in_padding_and_scratch_slot_has_no_effect():
    state = VocodeState.allocate(1, CONFIG.n_mels)
    poison(state, 1)
    mel = random_mel(3, BUCKET)
    mel[1:] = float("nan")
    chunk = MelChunk(mel, torch.tensor([BUCKET, 0, 0]), torch.zeros(3, dtype=torch.bool))
    wave, n_samples = vocode(HIFT, state, torch.tensor([0, 1, 1]), chunk, RULES)
    assert n_samples.tolist() == [480 * (BUCKET - TAIL_FRAMES), 0, 0]
    assert_close(wave[0, : n_samples[0]], Session().push(mel[0]), 2e-5)


@pytest.mark.parametrize("rules", [RULES, REFERENCE_RULES])
@pytest.mark.parametrize("n_new", [10, 3])
def test_chunks_are_joined_by_the_rules(rules: VocodeRules, n_new: int):
    """The second call, step by step, from the state after the first one; with three frames the seam is in the tail."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def decode(mel: Tensor, source: Tensor, n_frames: Tensor) -> Tensor:
        wave = Hift.decode(HIFT, mel, source, n_frames)
        seen.append((mel, source, wave))
        return wave

    session, mel = Session(with_decode(decode), rules), random_mel(1, 12 + n_new)[0]
    session.push(mel[:, :12])
    out = session.push(mel[:, 12:])
    (_, first_source, first_wave), (frames, source, wave) = seen
    n_frames = TAIL_FRAMES + n_new
    assert_same(frames[0, :, :n_frames], mel[:, 4:])
    assert_same(source[0, :TAIL_SAMPLES], first_source[0, 480 * 4 : 480 * 12])
    k = torch.arange(TAIL_SAMPLES, dtype=torch.float64)
    if rules.fade == "even":
        rising = torch.sin(math.pi / 2 * (k + 0.5) / TAIL_SAMPLES) ** 2
        falling = 1 - rising
    else:
        window = torch.hamming_window(2 * TAIL_SAMPLES, periodic=False, dtype=torch.float64)
        rising, falling = window.split(TAIL_SAMPLES)
    old, new = first_wave[0, 480 * 4 : 480 * 12], wave[0, :TAIL_SAMPLES]
    head = old * falling + new * rising
    expected = torch.cat((head, wave[0, TAIL_SAMPLES : 480 * n_frames]))
    assert_close(out, expected[:-TAIL_SAMPLES], 1e-6)
    assert_same(session.state.mel[1], mel[:, -TAIL_FRAMES:])
    assert_same(session.state.source[1], source[0, 480 * n_new : 480 * n_frames])
    assert_close(session.state.wave[1], expected[-TAIL_SAMPLES:], 1e-6)
    assert session.state.n_tail[1] == TAIL_FRAMES


def test_even_fade_keeps_ends_and_level():
    """The sound is continuous at both ends of the fade, and a level that both passes have in common is unchanged."""
    levels = iter((0.3, -0.7))
    session = Session(with_decode(lambda mel, source, n: torch.full((1, 480 * mel.shape[2]), next(levels))))
    mel = random_mel(1, 28)[0]
    session.push(mel[:, :14])
    seam = session.push(mel[:, 14:])
    assert abs(seam[0] - 0.3) < 1e-6 and abs(seam[TAIL_SAMPLES - 1] + 0.7) < 1e-6
    assert (seam[:TAIL_SAMPLES].diff() <= 0).all() and seam.diff().abs().max() < 1e-3

    for rules, level in ((RULES, LIMIT), (REFERENCE_RULES, 1.08 * LIMIT)):
        session = Session(with_decode(lambda mel, source, n: torch.full((1, 480 * mel.shape[2]), LIMIT)), rules)
        session.push(mel[:, :14])
        wave = session.push(mel[:, 14:])
        assert wave.max() <= level
        assert_close(wave[:TAIL_SAMPLES], torch.full((TAIL_SAMPLES,), level), 2e-4)


def sources_of(f0: float, rules: VocodeRules, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Excitation of a constant pitch in chunks, and in one call."""
    seen: list[Tensor] = []

    def decode(mel: Tensor, source: Tensor, n_frames: Tensor) -> Tensor:
        seen.append(source[0, : 480 * int(n_frames)])
        return torch.zeros_like(source)

    mel = random_mel(1, sum(chunks))[0]
    Session(with_decode(decode, f0), rules).turn(mel, chunks)
    joined = torch.cat([seen[0], *(source[TAIL_SAMPLES:] for source in seen[1:])])
    seen.clear()
    Session(with_decode(decode, f0), rules).push(mel, last=True, bucket=sum(chunks))
    return joined, seen[0]


@pytest.mark.parametrize("f0", [0.0, 217.3])
def test_harmonics_and_noise_continue_across_chunks(f0: float):
    joined, whole = sources_of(f0, RULES, [9, 14, 1, 3, 8])
    assert_close(joined, whole, 2e-6)
    assert whole.std() > 0.01


def test_restarted_harmonics_jump():
    joined, whole = sources_of(217.3, REFERENCE_RULES, [9, 14])
    assert (joined - whole).abs().max() > 0.05


def test_one_trace_serves_every_kind_of_chunk():
    compiled = torch.compile(vocode, fullgraph=True, dynamic=False, backend="eager")
    states = [VocodeState.allocate(3, CONFIG.n_mels) for _ in range(2)]
    slots = torch.tensor([2, 0, 3])
    before = compile_counters()["graphs"]
    with torch.no_grad():
        for step, (counts, lasts) in enumerate(
            [((14, 3), (0, 0)), ((14, 6), (0, 0)), ((0, 0), (0, 1)), ((2, 9), (1, 0))]
        ):
            mel = random_mel(3, BUCKET, seed=step)
            call = slots, MelChunk(mel, torch.tensor([*counts, 0]), torch.tensor([*map(bool, lasts), False])), RULES
            (got, n_got), (wave, n_samples) = compiled(HIFT, states[0], *call), vocode(HIFT, states[1], *call)
            assert_same(n_got, n_samples)
            assert_close(got, wave, 1e-6)
            for left, right in zip(states[0].tensors(), states[1].tensors(), strict=True):
                assert_close(left, right, 1e-6)
    assert compile_counters()["graphs"] - before == 1


def test_n_bytes_of_the_state():
    state = VocodeState.allocate(4, 80)
    assert state.n_bytes == 5 * (4 * (80 * TAIL_FRAMES + 2 * TAIL_SAMPLES) + 3 * 8)
