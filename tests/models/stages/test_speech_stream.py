"""Speech of turn-based answers: text chunks in, batches of speech tokens out, for every attention type."""

from itertools import chain

import pytest
import torch

from models.errors import ContextOverflowError, NumericsError, SettingsError, ShapeError
from models.layers.rotary import rotary_angles, rotate
from models.omni import OmniModel
from models.sampling.settings import SpeechSampling
from models.stages.region_table import Shapes
from tests.models.compare import assert_close
from tests.models.layers.speech_reference import PlainSpeaker, PlainStream
from tests.models.stages.slot_copies import assert_same, copy_state
from tests.models.stages.speech_calls import SPEECH_TOKENS_PER_SECOND, BatchedStream, WholeCallSpeaker
from tests.models.stages.speech_helpers import BEST, DRAWN, KINDS, UNIT, first_new_token, make_speaker, rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reachable", [False, True], ids=["capped", "ends"])
def test_stream_equals_the_plain_loop(speaker: WholeCallSpeaker, eos: int, kind: str, reachable: bool) -> None:
    cap, window, turn = 27, 20, [rows(n, seed=n) for n in (7, 3, 6, 5)]
    if reachable:
        speaker.start_turn(1, BEST)
        first = BatchedStream(speaker, 1, kind, window, cap).push(turn[0], final=False)
        eos = first_new_token(list(chain(*first)), 11)
    speaker.start_turn(1, BEST, eos=eos)
    stream = BatchedStream(speaker, 1, kind, window, max_speech_tokens=cap)
    plain = PlainStream(
        PlainSpeaker(
            speaker.runner.model.tts, BEST, seed=0, eos=eos, window=window if kind == "sliding_window" else None
        ),
        kind,
        cap,
        SPEECH_TOKENS_PER_SECOND,
    )
    before = 0
    for number, chunk in enumerate(turn):
        final = number == len(turn) - 1
        got, expected = stream.push(chunk, final), plain.push(chunk, final)
        assert got == expected, f"chunk {number}: expected {expected}, got {got}"
        cache, model = speaker.state.cache, plain.speaker.model
        held = (speaker.rows(1), int(cache.lengths[1]), int(cache.positions[1]))
        n_rows = len(model.positions)
        if kind == "sliding_window":  # rows outside the window are dropped when a chunk begins
            n_rows -= max(0, before - window)
        before = len(model.positions)
        assert held == (n_rows, n_rows, model.next_position), f"chunk {number}"
    assert stream.flush() == plain.left
    assert stream.flush() == [], "expected nothing after a flush"
    assert sum(map(len, plain.spoken)) == len(turn) * cap or reachable
    assert len(plain.spoken[0]) < cap or not reachable


def test_attention_types_differ(speaker: WholeCallSpeaker) -> None:
    spoken = {}
    for kind in KINDS:
        speaker.start_turn(0, BEST)
        stream = BatchedStream(speaker, 0, kind, window=20, max_speech_tokens=32)
        for seed in range(4):
            stream.push(rows(5, seed), final=False)
        spoken[kind] = tuple(stream.flush())
    assert len(set(spoken.values())) == len(KINDS), f"expected four different results, got {spoken}"


def test_tokens_of_an_incomplete_batch_are_carried_over_and_flushed(speaker: WholeCallSpeaker) -> None:
    speaker.start_turn(0, DRAWN, seed=2)
    stream = BatchedStream(speaker, 0, "full_attention", window=300, max_speech_tokens=40)
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


def test_final_chunk_returns_all_tokens(speaker: WholeCallSpeaker) -> None:
    speaker.start_turn(0, BEST)
    free = speaker.answer(0, rows(4), min_speech_tokens=0, max_speech_tokens=40)
    speaker.start_turn(0, BEST, eos=first_new_token(free, 28))
    stream = BatchedStream(speaker, 0, "full_attention", window=300, max_speech_tokens=40)
    spoken = free[: free.index(first_new_token(free, 28))]
    assert stream.push(rows(4), final=True) == [spoken[:25], spoken[25:]]
    assert stream.buffer == []

    speaker.start_turn(0, BEST, eos=first_new_token(free, 28))
    stream = BatchedStream(speaker, 0, "full_attention", window=300, max_speech_tokens=40)
    assert stream.push(rows(4), final=False) == [spoken[:25]]
    assert stream.buffer == spoken[25:]


@pytest.mark.parametrize("settings", [DRAWN, UNIT])
def test_new_turn_equals_a_fresh_slot(tiny_model: OmniModel, settings: SpeechSampling) -> None:
    used, fresh = make_speaker(tiny_model), make_speaker(tiny_model)
    used.start_turn(0, SpeechSampling(greedy=True, temperature=2.0, min_keep=9), seed=1, eos=17)
    stream = BatchedStream(used, 0, "sliding_window", window=5, max_speech_tokens=30)
    stream.push(rows(9, 3), final=False)
    stream.push(rows(9, 4), final=True)
    spoken = []
    for speaker in (used, fresh):
        speaker.start_turn(0, settings, seed=6)
        spoken.append([speaker.unit([0], [rows(n, n)], may_end=[False]) for n in (5, 3)])
        state = speaker.state
        spoken[-1] += [int(t[0]) for t in (state.cache.lengths, state.cache.positions, state.cache.windows)]
    assert spoken[0] == spoken[1], f"expected {spoken[1]}, got {spoken[0]}"


def test_long_chunk_can_be_fed_again(tiny_model: OmniModel) -> None:
    """The rows fed again need the largest size of a call."""
    most, (*_, before, _) = 275, Shapes().tokens
    speaker = make_speaker(tiny_model, n_slots=1, tts_len=600)
    speaker.start_turn(0, DRAWN, eos=7000)
    stream = BatchedStream(speaker, 0, "sliding_recompute", max_speech_tokens=most)
    stream.push(rows(6), False)
    assert len(stream.push(rows(6), True)) == most // 25, f"expected {most} tokens in batches of 25"
    assert before < 6 + most + 6 and speaker.rows(0) == 6 + most + 6 + most - 1


@pytest.mark.parametrize("kind", ["sliding_recompute", "reindex", "sliding_window"])
def test_refused_chunk_changes_nothing(speaker: WholeCallSpeaker, kind: str) -> None:
    speaker.start_turn(0, DRAWN, eos=7000)
    stream = BatchedStream(speaker, 0, kind, window=20, max_speech_tokens=30)
    for _ in range(3):
        stream.push(rows(6), False)
    before, held = copy_state(speaker.runner.state), speaker.rows(0)
    with pytest.raises(ContextOverflowError):
        stream.push(rows(240), True)
    assert speaker.rows(0) == held
    assert_same(speaker.runner.state, before)


def test_sliding_window_never_fills_the_slot(speaker: WholeCallSpeaker) -> None:
    speaker.start_turn(0, DRAWN, eos=7000)
    stream = BatchedStream(speaker, 0, "sliding_window", window=40, max_speech_tokens=30)
    for _ in range(9):
        stream.push(rows(6), False)
    assert speaker.rows(0) == 40 + 6 + 29
    assert int(speaker.state.cache.positions[0]) == 9 * 36 > speaker.state.cache.max_len


def test_long_turn_continues_with_the_newer_half(tiny_model: OmniModel) -> None:
    """Full attention with a full slot; the public implementation refuses the chunk."""
    speaker = make_speaker(tiny_model, tts_len=128)
    speaker.start_turn(1, BEST, eos=7000)
    stream = BatchedStream(speaker, 1, "full_attention", max_speech_tokens=30)
    plain = PlainStream(PlainSpeaker(speaker.runner.model.tts, BEST, seed=0, eos=7000), "full_attention", 30, 25)
    n_halved = 0
    for seed in range(9):
        held = speaker.rows(1)
        if held + 6 + 29 > speaker.state.cache.max_len:
            plain.speaker.model.close_up(0, held - held // 2)
            n_halved += 1
        got, expected = stream.push(rows(6, seed), False), plain.push(rows(6, seed), False)
        assert got == expected, f"chunk {seed}: expected {expected}, got {got}"
        assert speaker.rows(1) == len(plain.speaker.model.positions), f"chunk {seed}"
    assert n_halved > 2
    speaker.start_turn(1, BEST, eos=7000)
    stream = BatchedStream(speaker, 1, "full_attention", max_speech_tokens=30, compat="reference")
    with pytest.raises(ContextOverflowError):
        for seed in range(16):
            stream.push(rows(6, seed), False)


def test_defaults_come_from_the_checkpoint(speaker: WholeCallSpeaker) -> None:
    stream = BatchedStream(speaker, 0)
    assert (stream.attention_type, stream.window) == ("full_attention", 300)
    for wrong in ({"attention_type": "slidingwindow"}, {"compat": "upstream"}):
        with pytest.raises(SettingsError, match=r"expected one of .+, got"):
            BatchedStream(speaker, 0, **wrong)


def test_start_of_a_turn_keeps_the_window(speaker: WholeCallSpeaker) -> None:
    stream = BatchedStream(speaker, 0, "sliding_window", window=20, max_speech_tokens=30)
    speaker.start_turn(0, DRAWN)
    stream.push(rows(4), False)
    assert int(speaker.state.cache.windows[0]) == 20


@pytest.mark.parametrize(("compat", "rotated"), [("fixed", True), ("reference", False)])
def test_reindexed_keys_are_rotated_except_in_reference(speaker: WholeCallSpeaker, compat: str, rotated: bool) -> None:
    speaker.start_turn(0, BEST)
    stream = BatchedStream(speaker, 0, "reindex", max_speech_tokens=8, compat=compat)
    for seed in range(3):
        stream.push(rows(4, seed), False)
    keys, frequencies = speaker.state.cache.k[0][0].clone(), speaker.runner.model.tts.model.frequencies
    first, second, third = stream._chunks
    stream._between_chunks(rows(4))
    got = speaker.state.cache.k[0][0][:, first : first + third]
    moved = keys[:, first + second : first + second + third]
    expected = rotate(moved, *rotary_angles(torch.tensor(-second), frequencies)) if rotated else moved
    assert_close(got, expected, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_refuses_chunk_of_another_shape(speaker: WholeCallSpeaker, kind: str) -> None:
    speaker.start_turn(0, DRAWN, eos=7000)
    stream = BatchedStream(speaker, 0, kind, window=20, max_speech_tokens=8)
    for _ in range(3):
        stream.push(rows(3), False)
    before, held = copy_state(speaker.runner.state), speaker.rows(0)
    for shape in ((5, 33), (1, 5, 32), (32,), (0, 32)):
        with pytest.raises(ShapeError, match=r"expected conditioning rows \[1 or more, 32\], got"):
            stream.push(torch.zeros(shape), False)
        assert speaker.rows(0) == held, f"{shape}: expected {held} rows, got {speaker.rows(0)}"
        assert_same(speaker.runner.state, before)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_raises_numerics_error(speaker: WholeCallSpeaker, kind: str) -> None:
    speaker.start_turn(0, DRAWN)
    stream = BatchedStream(speaker, 0, kind, max_speech_tokens=8)
    with pytest.raises(NumericsError, match="expected finite logits"):
        stream.push(rows(3) * float("nan"), False)


@pytest.mark.parametrize(
    "wrong", [{"window": 0}, {"window": 1.5}, {"batch": 0}, {"batch": -1}, {"max_speech_tokens": 0}]
)
def test_refuses_sizes_outside_their_range(speaker: WholeCallSpeaker, wrong: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=f"{next(iter(wrong))}: expected a whole number at least 1"):
        BatchedStream(speaker, 0, **wrong)
