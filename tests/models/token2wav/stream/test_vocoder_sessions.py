"""Many sessions and voices: the sound of a session does not depend on other sessions or voices."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.errors import SlotError
from models.token2wav.flow.flow_state import FlowSizes
from models.token2wav.stream.region_table import VocoderShapes
from models.token2wav.stream.vocoder import Chunk, Vocoder
from models.token2wav.voice.voice import Voice
from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.stream.vocoders import (
    SIZES,
    STEPS,
    chunks_of_turn,
    fast_parts,
    make_tokens,
    make_vocoder,
    make_voice,
    shared_parts,
    speak_turn,
)

# With one size per axis, a row is computed by the same operations in any batch. Other sizes and other rows of the batch
# may add in a different order; a rounding difference of the pitch then affects hundreds of samples.
ONE_SIZE = VocoderShapes(batch=(4,), speech_tokens=(28,), columns=(288,), prompt=(60, 120))
OTHER_ORDER = 1e-4
COUNTS = ([25, 25, 7, 25], [25, 5, 25, 25], [28, 1, 25, 3], [25, 25, 25, 25], [24, 25, 12, 25])


def tokens_of(session: int) -> list[int]:
    return make_tokens(40 + session, sum(COUNTS[session]) + 12)


@cache
def alone(
    session: int,
    shapes: VocoderShapes,
    n_speech_tokens: int = 30,
    n_steps: int | None = None,
    convolutions: bool = False,
) -> list[Tensor]:
    """The sounds of session number `session` with voice number `session`, in a separate vocoder.

    Args:
        convolutions: with those of HiFT.
    """
    vocoder = make_vocoder(shared_parts() if convolutions else fast_parts(), shapes=shapes)
    slot = vocoder.open(make_voice(session, n_speech_tokens), n_steps)
    return speak_turn(vocoder, slot, tokens_of(session), COUNTS[session])


def together(vocoder: Vocoder, slots: list[int]) -> list[list[Tensor]]:
    """The sounds of sessions that speak in the same calls, session i in slots[i]."""
    turns = [chunks_of_turn(slot, tokens_of(i), COUNTS[i]) for i, slot in enumerate(slots)]
    rows = [vocoder.speak(chunks) for chunks in zip(*turns, strict=True)]
    return [list(waves) for waves in zip(*rows, strict=True)]


def test_interleaved_sessions_equal_separate_sessions():
    """Two voices of different length, alternately in separate calls and in one call."""
    vocoder = make_vocoder(fast_parts(), shapes=ONE_SIZE)
    slots = [vocoder.open(make_voice(i, n)) for i, n in enumerate((30, 55))]
    turns = [list(chunks_of_turn(slot, tokens_of(i), COUNTS[i])) for i, slot in enumerate(slots)]
    got: list[list[Tensor]] = [[], []]
    for number, (first, second) in enumerate(zip(*turns, strict=True)):
        calls = [[first, second]] if number % 2 else [[first], [second]]
        for i, wave in enumerate(wave for call in calls for wave in vocoder.speak(call)):
            got[i].append(wave)
    for i, n in enumerate((30, 55)):
        for number, (wave, expected) in enumerate(zip(got[i], alone(i, ONE_SIZE, n), strict=True)):
            if i == 0:
                assert_same(wave, expected, f"chunk {number} of session {i}")
            assert_close(wave, expected, OTHER_ORDER, f"chunk {number} of session {i}")


def test_sessions_of_different_steps_share_a_call():
    vocoder = make_vocoder(fast_parts())
    slots = [vocoder.open(make_voice(i), STEPS[i % 2]) for i in range(4)]
    for i, waves in enumerate(together(vocoder, slots)):
        for number, expected in enumerate(alone(i, ONE_SIZE, n_steps=STEPS[i % 2])):
            assert_close(waves[number], expected, OTHER_ORDER, f"chunk {number} of session {i}")
    assert (alone(0, ONE_SIZE, n_steps=1)[0] - alone(0, ONE_SIZE, n_steps=2)[0]).abs().max() > 0.01


@pytest.mark.parametrize("batch", [(2,), (1, 2, 4)])
def test_more_sessions_than_the_largest_batch(batch: tuple[int, ...]):
    """Five sessions with one voice each; calls are divided and padded, and all turns begin in one call."""
    convolutions = batch == (1, 2, 4)
    vocoder = make_vocoder(
        shared_parts() if convolutions else fast_parts(),
        sizes=FlowSizes(5, 5, 2, max_prompt=60, voice_frames=300),
        shapes=VocoderShapes(batch=batch),
    )
    slots = [vocoder.open(make_voice(i)) for i in range(5)]
    for _ in range(1 if convolutions else 2):  # the convolutions have no state
        for i, waves in enumerate(together(vocoder, slots)):
            for number, expected in enumerate(alone(i, ONE_SIZE, convolutions=convolutions)):
                assert_close(waves[number], expected, OTHER_ORDER, f"chunk {number} of session {i}")
        vocoder.begin_turn(*slots)


@pytest.mark.parametrize("session", [1, 2])
def test_finer_sizes_change_no_sound(session: int):
    """The sizes of a CPU without compiling: a bucket for each number of tokens, columns in steps of 32."""
    exact = VocoderShapes(batch=(4,), speech_tokens=tuple(range(1, 29)), columns=tuple(range(256, 1665, 32)))
    for number, expected in enumerate(alone(session, ONE_SIZE, convolutions=True)):
        got = alone(session, exact, convolutions=True)[number]
        assert_close(got, expected, OTHER_ORDER, f"chunk {number} of {COUNTS[session][number : number + 1]} tokens")


def test_order_of_chunks_does_not_matter():
    vocoders = [make_vocoder(fast_parts()) for _ in range(2)]
    opened = [[vocoder.open(make_voice(i)) for i in range(4)] for vocoder in vocoders]
    for number in range(3):
        chunks = [Chunk(slot, make_tokens(10 * number + slot, 28 - slot)) for slot in opened[0]]
        order = [2, 0, 3, 1] if number % 2 else [3, 2, 1, 0]
        expected, shuffled = vocoders[0].speak(chunks), vocoders[1].speak([chunks[i] for i in order])
        for i, wave in zip(order, shuffled, strict=True):
            assert_close(wave, expected[i], OTHER_ORDER, f"call {number}, session {i}")


def test_returned_sound_is_a_copy():
    vocoder = make_vocoder()
    slot = vocoder.open(make_voice())
    (wave,) = vocoder.speak([Chunk(slot, make_tokens(0, 28))])
    kept = wave.clone()
    assert wave.untyped_storage().nbytes() == wave.nbytes, "expected a copy of a graph's output"
    vocoder.speak([Chunk(slot, make_tokens(1, 28))])
    vocoder.begin_turn(slot)
    assert_same(wave, kept)
    wave.fill_(float("nan"))
    assert vocoder.speak([Chunk(slot, make_tokens(2, 28))])[0].isfinite().all()


def test_reused_slots_equal_new_slots():
    """Three rounds of four sessions in five slots."""
    vocoder, voice, speech_tokens = make_vocoder(fast_parts(), shapes=ONE_SIZE), make_voice(), make_tokens(0, 40)
    expected = alone(0, ONE_SIZE)
    used = set()
    for _ in range(3):
        slots = [vocoder.open(voice) for _ in range(4)]
        used |= set(slots)
        assert vocoder.n_free == 1
        for wave, want in zip(speak_turn(vocoder, slots[0], tokens_of(0), COUNTS[0]), expected, strict=True):
            assert_same(wave, want)
        for slot in slots[1:]:
            vocoder.speak([Chunk(slot, speech_tokens[:28])])
        for slot in slots:
            vocoder.close(slot)
    assert used == set(range(5)) and vocoder.n_free == 5


def prepared(vocoder: Vocoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of Euler steps of each prompt that is prepared from now on."""
    calls, run = [], vocoder._run_prompt

    def counted(voice: Voice, n_steps: int, *place: int) -> None:
        calls.append(n_steps)
        run(voice, n_steps, *place)

    monkeypatch.setattr(vocoder, "_run_prompt", counted)
    return calls


def test_a_shared_voice_is_prepared_once(monkeypatch: pytest.MonkeyPatch):
    vocoder = make_vocoder(fast_parts(), shapes=ONE_SIZE)
    calls = prepared(vocoder, monkeypatch)
    vocoder.prepare(make_voice())
    slots = [vocoder.open(make_voice()) for _ in range(2)]
    assert calls == [2], "expected one preparation for equal content"
    waves = together(vocoder, slots)
    for wave, expected in zip(waves[0], alone(0, ONE_SIZE), strict=True):
        assert_same(wave, expected)
    vocoder.open(make_voice(), n_steps=1)
    assert calls == [2, 1], "expected a separate state per number of steps"


def test_an_evicted_voice_sounds_the_same_again(monkeypatch: pytest.MonkeyPatch):
    """Bit-identical in other rows and another slot."""
    vocoder = make_vocoder(fast_parts(), shapes=ONE_SIZE)
    calls = prepared(vocoder, monkeypatch)
    expected = alone(0, ONE_SIZE)
    places = set()
    for other in (1, 2, 3):
        slot = vocoder.open(make_voice(0))
        places.add(vocoder._sessions[slot].voice)
        for wave, want in zip(speak_turn(vocoder, slot, tokens_of(0), COUNTS[0]), expected, strict=True):
            assert_same(wave, want, f"before voice {other}")
        vocoder.close(slot)
        for n in range(4):
            vocoder.prepare(make_voice(10 * other + n, 25 + 7 * other))
    assert len(calls) == 3 * 5, "expected the voice to be evicted each time"
    assert len(places) > 1


def test_a_voice_in_use_is_not_evicted():
    vocoder = make_vocoder(fast_parts(), shapes=ONE_SIZE)
    slot = vocoder.open(make_voice(0))
    turn = chunks_of_turn(slot, tokens_of(0), COUNTS[0])
    got = []
    for n, chunk in enumerate(turn):
        got += vocoder.speak([chunk])
        vocoder.prepare(make_voice(20 + n, 50))
        vocoder.prepare(make_voice(30 + n, 60))
    for wave, want in zip(got, alone(0, ONE_SIZE), strict=True):
        assert_same(wave, want)
    others = [vocoder.open(make_voice(40 + n, 60)) for n in range(2)]
    with pytest.raises(SlotError, match="60 of 300 frames in one piece, got 3 voices in use"):
        make_room = make_voice(50, 30)
        vocoder.open(make_room)
    vocoder.close(others[0])
    vocoder.open(make_room)


def test_a_voice_whose_preparation_failed_is_not_found(monkeypatch: pytest.MonkeyPatch):
    vocoder, voice = make_vocoder(fast_parts(), shapes=ONE_SIZE), make_voice(0)

    def broken(*given: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(vocoder, "_run_prompt", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            vocoder.open(voice)
    assert vocoder.n_free == 5
    got = speak_turn(vocoder, vocoder.open(voice), tokens_of(0), COUNTS[0])
    for wave, want in zip(got, alone(0, ONE_SIZE), strict=True):
        assert_same(wave, want)


@settings(max_examples=10)
@given(data=st.data())
def test_random_session_events_equal_separate_vocoders(data: st.DataObject):
    """Sessions open, speak in groups, begin turns and close at random, each against a separate vocoder."""
    vocoder, voices = make_vocoder(fast_parts()), [make_voice(n, 20 + 13 * n) for n in range(4)]
    solo: dict[int, tuple[Vocoder, int]] = {}
    for number in range(data.draw(st.integers(4, 12))):
        action = data.draw(st.sampled_from(["open", "speak", "speak", "speak", "begin", "close"]))
        if action == "open" and vocoder.n_free:
            voice, n_steps = data.draw(st.sampled_from(voices)), data.draw(st.sampled_from(STEPS))
            try:
                slot = vocoder.open(voice, n_steps)
            except SlotError:
                continue
            own = make_vocoder(fast_parts(), sizes=FlowSizes(1, 1, SIZES.max_steps, max_prompt=120, voice_frames=120))
            solo[slot] = own, own.open(voice, n_steps)
        elif action == "speak" and solo:
            group = data.draw(st.lists(st.sampled_from(sorted(solo)), min_size=1, max_size=5, unique=True))
            chunks = []
            for slot in group:
                last = data.draw(st.integers(0, 5)) == 0
                speech_tokens = make_tokens(100 * number + slot, data.draw(st.integers(1 if last else 4, 28)))
                chunks.append(Chunk(slot, speech_tokens, last))
            for chunk, wave in zip(chunks, vocoder.speak(chunks), strict=True):
                own, only = solo[chunk.session]
                expected = own.speak([chunk._replace(session=only)])[0]
                assert_close(wave, expected, OTHER_ORDER, f"event {number}, session {chunk.session}")
        elif solo:
            slot = data.draw(st.sampled_from(sorted(solo)))
            if action == "begin":
                vocoder.begin_turn(slot)
                solo[slot][0].begin_turn(solo[slot][1])
            elif action == "close":
                vocoder.close(slot)
                del solo[slot]
    assert torch.tensor([tensor.isfinite().all() for tensor in vocoder.vocode_state.tensors()]).all()


def test_another_voice_begins_with_the_next_turn():
    """The open turn goes on in the old one; the sound then equals that of a session opened with the new one."""
    vocoder = make_vocoder(fast_parts())
    slot, other = vocoder.open(make_voice(1)), vocoder.open(make_voice(2))
    tokens = make_tokens(1, 20)
    plain = speak_turn(vocoder, other, tokens, [5, 5])
    vocoder.begin_turn(other)
    expected_old, vocoder_alone = [], make_vocoder(fast_parts())
    expected_old = speak_turn(vocoder_alone, vocoder_alone.open(make_voice(1)), tokens, [5, 5])
    chunks = list(chunks_of_turn(slot, tokens, [5, 5]))
    got = [vocoder.speak([chunks[0]])[0]]
    for number in (3, 2):
        vocoder.change_voice(slot, make_voice(number))
    got += [vocoder.speak([chunk])[0] for chunk in chunks[1:]]
    assert all(torch.equal(a, b) for a, b in zip(got, expected_old, strict=True)), "expected the old voice"
    vocoder.begin_turn(slot)
    got = speak_turn(vocoder, slot, tokens, [5, 5])
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True)), "expected the new voice"
    vocoder.change_voice(slot, make_voice(1))
    for session in (slot, other):
        vocoder.close(session)
    users = [entry.users for entry in vocoder.voices._by_slot.values()]
    assert users and not any(users), f"expected all voices released, got {users}"


def test_a_refused_voice_leaves_the_one_that_waits():
    vocoder = make_vocoder(fast_parts())
    slots = [vocoder.open(make_voice(number)) for number in range(3)]
    vocoder.change_voice(slots[0], make_voice(3))
    with pytest.raises(SlotError, match="voices: expected a slot and 60 of 300 frames in one piece, got 4 voices"):
        vocoder.change_voice(slots[0], make_voice(4))
    with pytest.raises(SlotError, match="vocoder sessions"):
        vocoder.change_voice(99, make_voice(3))
    vocoder.begin_turn(slots[0])
    assert vocoder._sessions[slots[0]].voice == vocoder.voices.find((make_voice(3).digest, 2))
    vocoder.change_voice(slots[1], make_voice(4))
