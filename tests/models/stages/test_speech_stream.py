"""Half duplex: text chunks in, batches of codes out, for every attention type."""

from itertools import chain

import pytest
import torch

from models.errors import ContextOverflowError, NumericsError, SettingsError, ShapeError
from models.layers.rotary import rotary_angles, rotate
from models.omni import OmniModel
from models.sampling.settings import SpeechSampling
from models.stages.speech_steps import SPEECH_TOKENS_PER_SECOND, Speaker
from models.stages.speech_stream import SpeechStream
from tests.models.compare import assert_close
from tests.models.layers.speech_reference import PlainSpeaker, PlainStream
from tests.models.stages.slot_copies import assert_same, copy_state
from tests.models.stages.speech_helpers import BEST, DRAWN, KINDS, UNIT, make_speaker, new_code, rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reachable", [False, True], ids=["capped", "ends"])
def test_a_stream_equals_the_plain_loop(speaker: Speaker, eos: int, kind: str, reachable: bool) -> None:
    cap, window, turn = 32, 20, [rows(n, seed=n) for n in (7, 3, 6, 5, 4)]
    if reachable:
        speaker.start_turn(1, BEST)
        first = SpeechStream(speaker, 1, kind, window, cap).push(turn[0], final=False)
        eos = new_code(list(chain(*first)), 11)
    speaker.start_turn(1, BEST, eos=eos)
    stream = SpeechStream(speaker, 1, kind, window, max_speech_tokens=cap)
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
        stream = SpeechStream(speaker, 0, kind, window=20, max_speech_tokens=32)
        for seed in range(4):
            stream.push(rows(5, seed), final=False)
        said[kind] = tuple(stream.flush())
    assert len(set(said.values())) == len(KINDS), f"expected four different ends, got {said}"


def test_codes_are_carried_over_and_flushed(speaker: Speaker) -> None:
    speaker.start_turn(0, DRAWN, seed=2)
    stream = SpeechStream(speaker, 0, "full_attention", window=300, max_speech_tokens=40)
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
    free = speaker.answer(0, rows(4), min_speech_tokens=0, max_speech_tokens=40)
    speaker.start_turn(0, BEST, eos=new_code(free, 28))
    stream = SpeechStream(speaker, 0, "full_attention", window=300, max_speech_tokens=40)
    said = free[: free.index(new_code(free, 28))]
    assert stream.push(rows(4), final=True) == [said[:25], said[25:]]
    assert stream.buffer == []

    speaker.start_turn(0, BEST, eos=new_code(free, 28))
    stream = SpeechStream(speaker, 0, "full_attention", window=300, max_speech_tokens=40)
    assert stream.push(rows(4), final=False) == [said[:25]]
    assert stream.buffer == said[25:]


@pytest.mark.parametrize("settings", [DRAWN, UNIT])
def test_a_new_turn_equals_a_fresh_slot(tiny_model: OmniModel, settings: SpeechSampling) -> None:
    used, fresh = make_speaker(tiny_model), make_speaker(tiny_model)
    used.start_turn(0, SpeechSampling(greedy=True, temperature=2.0, min_keep=9), seed=1, eos=17)
    stream = SpeechStream(used, 0, "sliding_window", window=5, max_speech_tokens=30)
    stream.push(rows(9, 3), final=False)
    stream.push(rows(9, 4), final=True)
    said = []
    for speaker in (used, fresh):
        speaker.start_turn(0, settings, seed=6)
        said.append([speaker.unit([0], [rows(n, n)], may_end=[False]) for n in (5, 3)])
        state = speaker.state
        said[-1] += [int(t[0]) for t in (state.cache.lengths, state.cache.positions, state.cache.windows)]
    assert said[0] == said[1], f"expected {said[1]}, got {said[0]}"


def test_a_long_chunk_can_be_fed_again(tiny_model: OmniModel) -> None:
    speaker = make_speaker(tiny_model, n_slots=1, tts_len=1200)
    speaker.start_turn(0, DRAWN, eos=7000)
    stream = SpeechStream(speaker, 0, "sliding_recompute")
    stream.push(rows(6), False)
    assert len(stream.push(rows(6), True)) == 20, "500 codes in batches of 25"
    assert speaker.rows(0) == 6 + 500 + 6 + 499


@pytest.mark.parametrize("kind", ["sliding_recompute", "reindex", "sliding_window"])
def test_a_refused_chunk_leaves_the_turn_as_it_was(speaker: Speaker, kind: str) -> None:
    speaker.start_turn(0, DRAWN, eos=7000)
    stream = SpeechStream(speaker, 0, kind, window=20, max_speech_tokens=30)
    for _ in range(3):
        stream.push(rows(6), False)
    before, held = copy_state(speaker.runner.state), speaker.rows(0)
    with pytest.raises(ContextOverflowError):
        stream.push(rows(240), True)
    assert speaker.rows(0) == held
    assert_same(speaker.runner.state, before)


def test_a_sliding_stream_never_fills_its_slot(speaker: Speaker) -> None:
    speaker.start_turn(0, DRAWN, eos=7000)
    stream = SpeechStream(speaker, 0, "sliding_window", window=40, max_speech_tokens=30)
    for _ in range(20):
        stream.push(rows(6), False)
    assert speaker.rows(0) == 40 + 6 + 29
    assert int(speaker.state.cache.positions[0]) == 20 * 36


def test_a_long_turn_goes_on_with_the_newer_half(speaker: Speaker) -> None:
    """Full attention, where the slot's memory ends; the public implementation has no such rule."""
    speaker.start_turn(1, BEST, eos=7000)
    stream = SpeechStream(speaker, 1, "full_attention", max_speech_tokens=30)
    plain = PlainStream(PlainSpeaker(speaker.runner.model.tts, BEST, seed=0, eos=7000), "full_attention", 30, 25)
    n_halved = 0
    for seed in range(16):
        held = speaker.rows(1)
        if held + 6 + 29 > speaker.state.cache.max_len:
            plain.speaker.model.close_up(0, held - held // 2)
            n_halved += 1
        got, expected = stream.push(rows(6, seed), False), plain.push(rows(6, seed), False)
        assert got == expected, f"chunk {seed}: expected {expected}, got {got}"
        assert speaker.rows(1) == len(plain.speaker.model.positions), f"chunk {seed}"
    assert n_halved > 2
    speaker.start_turn(1, BEST, eos=7000)
    stream = SpeechStream(speaker, 1, "full_attention", max_speech_tokens=30, compat="reference")
    with pytest.raises(ContextOverflowError):
        for seed in range(16):
            stream.push(rows(6, seed), False)


def test_a_stream_follows_the_checkpoint_unless_told(speaker: Speaker) -> None:
    stream = SpeechStream(speaker, 0)
    assert (stream.attention_type, stream.window) == ("full_attention", 300)
    for wrong in ({"attention_type": "slidingwindow"}, {"compat": "upstream"}):
        with pytest.raises(SettingsError, match=r"expected one of .+, got"):
            SpeechStream(speaker, 0, **wrong)


def test_a_window_survives_the_start_of_a_turn(speaker: Speaker) -> None:
    stream = SpeechStream(speaker, 0, "sliding_window", window=20, max_speech_tokens=30)
    speaker.start_turn(0, DRAWN)
    stream.push(rows(4), False)
    assert int(speaker.state.cache.windows[0]) == 20


@pytest.mark.parametrize(("compat", "turned"), [("fixed", True), ("reference", False)])
def test_reindexed_keys_are_turned_unless_the_reference_is_asked_for(
    speaker: Speaker, compat: str, turned: bool
) -> None:
    speaker.start_turn(0, BEST)
    stream = SpeechStream(speaker, 0, "reindex", max_speech_tokens=8, compat=compat)
    for seed in range(3):
        stream.push(rows(4, seed), False)
    keys, frequencies = speaker.state.cache.k[0][0].clone(), speaker.runner.model.tts.model.frequencies
    first, second, third = stream._chunks
    stream._between_chunks(rows(4))
    got = speaker.state.cache.k[0][0][:, first : first + third]
    moved = keys[:, first + second : first + second + third]
    expected = rotate(moved, *rotary_angles(torch.tensor(-second), frequencies)) if turned else moved
    assert_close(got, expected, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "chunk", [torch.zeros(5, 33), torch.zeros(1, 5, 32), torch.zeros(32), torch.zeros(0, 32), [[0.0] * 32]]
)
def test_a_chunk_of_another_shape_leaves_the_turn_as_it_was(speaker: Speaker, kind: str, chunk: object) -> None:
    speaker.start_turn(0, DRAWN, eos=7000)
    stream = SpeechStream(speaker, 0, kind, window=20, max_speech_tokens=8)
    for _ in range(3):
        stream.push(rows(3), False)
    before, held = copy_state(speaker.runner.state), speaker.rows(0)
    with pytest.raises(ShapeError, match=r"expected conditioning rows \[1 or more, 32\], got"):
        stream.push(chunk, False)
    assert speaker.rows(0) == held
    assert_same(speaker.runner.state, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_turn_takes_no_more(speaker: Speaker, kind: str) -> None:
    speaker.start_turn(0, DRAWN)
    stream = SpeechStream(speaker, 0, kind, max_speech_tokens=8)
    with pytest.raises(NumericsError, match="expected finite logits"):
        stream.push(rows(3) * float("nan"), False)
    with pytest.raises(NumericsError, match="expected a new turn"):
        stream.push(rows(3), False)


@pytest.mark.parametrize(
    "wrong", [{"window": 0}, {"window": 1.5}, {"batch": 0}, {"batch": -1}, {"max_speech_tokens": 0}]
)
def test_sizes_of_a_stream_are_positive_whole_numbers(speaker: Speaker, wrong: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=f"{next(iter(wrong))}: expected a whole number at least 1"):
        SpeechStream(speaker, 0, **wrong)
