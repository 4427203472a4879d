"""One session: the samples of each chunk, the state at the start of a turn, and whole utterances."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.token2wav.flow.block_table import SPILL_ROW, BlockTable
from models.token2wav.flow.flow_state import ChunkSlots, ChunkTokens, SolveInputs, encode, solve
from models.token2wav.load.parts import load_flow_and_hift
from models.token2wav.settings import SAMPLES_PER_TOKEN
from models.token2wav.stream.regions import flow_chunk
from models.token2wav.stream.vocode import MelChunk, VocodeState, vocode
from models.token2wav.stream.vocoder import Chunk, Vocoder
from models.token2wav.stream.windows import TokenWindows
from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.stream.vocoders import (
    FOLDER,
    copies,
    make_tokens,
    make_vocoder,
    make_voice,
    slot_of,
    speak_turn,
    tensors,
)
from tests.parity.token2wav.build import set_up_voice

HELD_BACK = 3840  # samples that are sent with the next chunk
NAN = float("nan")


@pytest.fixture(scope="module")
def vocoder() -> Vocoder:
    return make_vocoder()


def recorded(vocoder: Vocoder, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The first row of the flow's outputs from now on, padding included."""
    mels, run = [], vocoder.regions.run

    def recording(function: Callable[..., Any], *given: Tensor, **static: Any) -> Any:
        out = run(function, *given, **static)
        if function is flow_chunk:
            mels.append(out[0].clone())
        return out

    monkeypatch.setattr(vocoder.regions, "run", recording)
    return mels


def poison(vocoder: Vocoder, session: int) -> None:
    """Fill everything that a session can write with NaN and invalid rows."""
    state, both = vocoder.state, [session, session + vocoder.sizes.n_sessions]
    pools: list[tuple[Tensor, BlockTable]] = [(state.token_rows, state.token_table), (state.mel_rows, state.mel_table)]
    pools += [(rows, state.dit_table) for rows in state.dit_rows]
    for rows, table in pools:
        first = int(table.start[session])
        assert table.start[both].tolist() == [first, first]
        rows[..., first : first + table.ring, :, :] = NAN
        rows[..., SPILL_ROW, :, :] = NAN
        table.rows[both], table.length[both] = SPILL_ROW, table.width
    for tensor in (*state.slot_tensors(), *vocoder.vocode_state.tensors()):
        tensor[both] = NAN if tensor.is_floating_point() else 8


def test_samples_of_each_kind_of_chunk(vocoder: Vocoder):
    """First, later, short and last chunks: 960 samples per token in total, the newest 3840 one chunk later."""
    session = vocoder.open(make_voice())
    speech_tokens = make_tokens(1, 25 + 25 + 5 + 1 + 24 + 13)
    lengths = [len(wave) for wave in speak_turn(vocoder, session, speech_tokens, [25, 25, 5, 1, 24])]
    assert lengths == [20160, 24000, 4800, 960, 23040, 960 * 13 + HELD_BACK]
    vocoder.begin_turn(session)
    assert [len(wave) for wave in speak_turn(vocoder, session, speech_tokens[:9], [])] == [960 * 9]
    vocoder.begin_turn(session)
    assert [len(wave) for wave in speak_turn(vocoder, session, speech_tokens[:8], [2, 1, 2])] == [0, 0, 960, 960 * 7]
    vocoder.close(session)


def test_eight_tokens_of_a_turn_are_the_fewest_whose_sound_is_more_than_its_silence(vocoder: Vocoder):
    session, silence = vocoder.open(make_voice()), 3 * SAMPLES_PER_TOKEN
    emitted = []
    for n in (7, 8):
        vocoder.begin_turn(session)
        [window] = TokenWindows(min_chunk=5).push(make_tokens(1, n))
        emitted.append(len(vocoder.speak([Chunk(session, *window)])[0]))
    vocoder.close(session)
    assert emitted == [silence, silence + SAMPLES_PER_TOKEN], emitted


@settings(max_examples=12)
@given(data=st.data())
def test_any_turn_has_960_samples_per_token(data: st.DataObject):
    vocoder = make_vocoder()
    session = vocoder.open(make_voice(n_speech_tokens=data.draw(st.integers(1, 60))))
    for turn in range(2):
        counts = data.draw(st.lists(st.integers(1, 28), max_size=5))
        speech_tokens = make_tokens(turn, sum(counts) + data.draw(st.integers(3, 28)))
        waves = speak_turn(vocoder, session, speech_tokens, counts)
        assert sum(map(len, waves)) == SAMPLES_PER_TOKEN * len(speech_tokens)
        n_tokens = n_samples = 0
        for n, wave in zip(counts, waves, strict=False):
            n_tokens, n_samples = n_tokens + n, n_samples + len(wave)
            assert n_samples == max(SAMPLES_PER_TOKEN * n_tokens - HELD_BACK, 0)
        assert all(wave.isfinite().all() for wave in waves)
        vocoder.begin_turn(session)


def test_a_minute_of_windows_reallocates_nothing(vocoder: Vocoder):
    """Up to 26 tokens per push, in turns of about ten seconds."""
    session = vocoder.open(make_voice(n_speech_tokens=60))
    addresses, n_bytes = [tensor.data_ptr() for tensor in tensors(vocoder)], vocoder.n_bytes
    sizes = torch.randint(1, 27, (75,), generator=torch.Generator().manual_seed(3)).tolist()
    sizes = [25 if i % 3 else n for i, n in enumerate(sizes)]
    n_speech_tokens, kinds = 0, set()
    windows = TokenWindows(min_chunk=5)
    turn_samples = turn_tokens = 0
    for i, size in enumerate(sizes):
        ends = i % 12 == 11 or i == len(sizes) - 1
        turn_tokens += size
        for window in windows.push(make_tokens(i, size), last=ends):
            (wave,) = vocoder.speak([Chunk(session, *window)])
            kinds.add((len(window.speech_tokens), window.last))
            turn_samples += len(wave)
            assert wave.isfinite().all() and wave.abs().max() <= 0.99
        if ends:
            assert turn_samples == SAMPLES_PER_TOKEN * (turn_tokens + 3), "expected the silence at the start too"
            n_speech_tokens, turn_samples, turn_tokens = n_speech_tokens + turn_tokens, 0, 0
            vocoder.begin_turn(session)
            windows = TokenWindows(min_chunk=5)
    assert n_speech_tokens >= 1500 and len(kinds) > 10, (
        f"expected a minute of many kinds, got {n_speech_tokens} tokens, {kinds}"
    )
    assert [tensor.data_ptr() for tensor in tensors(vocoder)] == addresses
    assert vocoder.n_bytes == n_bytes == sum(tensor.nbytes for tensor in tensors(vocoder))
    vocoder.close(session)


def test_look_ahead_of_a_prompt_is_silence(vocoder: Vocoder):
    """A session starts in the state of a slot after the prompt and three silence tokens."""
    voice, flow, state = make_voice(), vocoder.parts.flow, make_vocoder().state
    slot = state.scratch + 1
    schedule = vocoder.schedules[2]
    set_up_voice(flow, state, slot, voice.speech_tokens, voice.mel, voice.speaker, vocoder.noise, schedule, 0)
    session = vocoder.open(voice)
    for got, expected in zip(vocoder.state.slot_tensors(), state.slot_tensors(), strict=True):
        assert_close(got[slot_of(vocoder, session)], expected[slot], 1e-4, "state copied from the voice")
    vocoder.close(session)


@pytest.mark.parametrize("compat", [None, "reference"])
@pytest.mark.parametrize("ends", [True, False], ids=["ended", "interrupted"])
def test_new_turn_does_not_depend_on_the_last_one(compat: str | None, ends: bool):
    vocoder = make_vocoder(compat=compat)
    session, speech_tokens, counts = vocoder.open(make_voice()), make_tokens(1, 110), [25, 25, 7, 25, 9]
    expected = speak_turn(vocoder, session, speech_tokens, counts)
    vocoder.begin_turn(session)
    speak_turn(vocoder, session, make_tokens(2, 90), [25, 25, 25])
    if not ends:
        vocoder.speak([Chunk(session, make_tokens(3, 20))])
    poison(vocoder, session)
    vocoder.begin_turn(session)
    for i, (got, want) in enumerate(zip(speak_turn(vocoder, session, speech_tokens, counts), expected, strict=True)):
        assert_same(got, want, f"chunk {i}")


def test_without_begin_turn_the_flow_keeps_its_context(vocoder: Vocoder):
    """Tokens after the end continue the turn in the flow, but their sound starts from a fresh state."""
    session, speech_tokens = vocoder.open(make_voice()), make_tokens(1, 20)
    (first,), (second,) = (speak_turn(vocoder, session, speech_tokens, []) for _ in range(2))
    assert len(first) == len(second)
    assert (first - second).abs().max() > 0.01
    vocoder.close(session)


def test_sound_depends_on_voice_and_seed(vocoder: Vocoder):
    speech_tokens = make_tokens(1, 20)
    session = vocoder.open(make_voice())
    (plain,) = speak_turn(vocoder, session, speech_tokens, [])
    vocoder.close(session)
    session = vocoder.open(make_voice(1))
    (other_voice,) = speak_turn(vocoder, session, speech_tokens, [])
    vocoder.close(session)
    other_seed = make_vocoder(seed=1)
    (noise,) = speak_turn(other_seed, other_seed.open(make_voice()), speech_tokens, [])
    for other in (other_voice, noise):
        assert (other - plain).abs().max() > 0.01


def test_turn_of_one_chunk_equals_vocoding_its_mel(vocoder: Vocoder, monkeypatch: pytest.MonkeyPatch):
    """A chunk that is first and last has no tail before or after it and no cross-fade."""
    mels = recorded(vocoder, monkeypatch)
    session = vocoder.open(make_voice())
    for n in (1, 9, 28):
        vocoder.begin_turn(session)
        (wave,) = speak_turn(vocoder, session, make_tokens(n, n), [])
        assert_close(wave, vocoded(vocoder, mels[-1][: 2 * n]), 2e-5, f"{n} tokens")
        assert not any(tensor[slot_of(vocoder, session)].any() for tensor in vocoder.vocode_state.tensors())
    vocoder.close(session)


def vocoded(vocoder: Vocoder, mel: Tensor) -> Tensor:
    """The sound of mel [T, n_mels] in one call from an empty slot."""
    state = VocodeState.allocate(0, mel.shape[1])
    chunk = MelChunk(mel.T[None], torch.tensor([len(mel)]), torch.tensor([True]))
    with torch.no_grad():
        wave, n_samples = vocode(vocoder.parts.hift, state, torch.tensor([0]), chunk, vocoder.rules)
    return wave[0, : n_samples[0]]


def test_sound_inside_chunks_equals_the_sound_of_all_mel_at_once(monkeypatch: pytest.MonkeyPatch):
    """Unvoiced, because a pitch difference at a border would shift all later phases. Sounds may differ from 12 frames
    before a border, where the first pass lacks later frames, to 4 frames after it, where the second pass lacks earlier
    ones."""
    parts = load_flow_and_hift(FOLDER)
    parts.hift.f0 = lambda mel, n_frames: torch.zeros(len(mel), mel.shape[2], dtype=torch.float64)
    vocoder = make_vocoder(parts)
    mels = recorded(vocoder, monkeypatch)
    session, counts = vocoder.open(make_voice()), [8, 17, 25, 14, 25, 5, 20]
    streamed = torch.cat(speak_turn(vocoder, session, make_tokens(1, 130), counts))
    n_frames = [2 * n for n in (*counts, 130 - sum(counts))]
    whole = vocoded(vocoder, torch.cat([mel[:n] for mel, n in zip(mels, n_frames, strict=True)]))
    assert len(streamed) == len(whole)
    borders = torch.tensor(n_frames[:-1]).cumsum(0)
    from_border = torch.arange(sum(n_frames))[:, None] - borders
    near = ((from_border >= -13) & (from_border < 5)).any(1).repeat_interleave(480)
    assert_close(streamed[~near], whole[~near], 1e-5, "sound far from every border")
    difference = (streamed - whole)[near].abs().max()
    assert difference > 1e-2, f"expected a difference at borders, got {difference}"


@pytest.mark.parametrize("n_speech_tokens", [1, 20, 90])
def test_whole_utterance_equals_one_last_chunk_without_cache(n_speech_tokens: int):
    """Prompt and speech as one chunk of an empty slot give the same sound; the sessions' state does not change."""
    vocoder, voice, speech_tokens = make_vocoder(), make_voice(), make_tokens(1, n_speech_tokens)
    session = vocoder.open(make_voice(1))
    vocoder.speak([Chunk(session, make_tokens(2, 28))])
    before = copies(vocoder)
    got = vocoder.offline(speech_tokens, voice)
    for tensor, expected in zip(tensors(vocoder), before, strict=True):
        assert_same(tensor, expected, "state")
    assert len(got) == SAMPLES_PER_TOKEN * n_speech_tokens

    flow, state = vocoder.parts.flow, make_vocoder().state
    n = 2 * (30 + n_speech_tokens)
    slots, ids = (
        torch.tensor([state.scratch + 1]),
        torch.tensor([[*voice.speech_tokens.tolist(), *speech_tokens, 0, 0, 0]]),
    )
    prompt = torch.zeros(1, n, 80)
    prompt[0, :60] = voice.mel
    with torch.no_grad():
        state.place_voices(slots, torch.tensor([0]), torch.tensor([n]), flow.speaker(voice.speaker[None]))
        chunk, last = ChunkSlots(slots, 0, ring=n), torch.tensor([True])
        mu = encode(flow, state, chunk, ChunkTokens(ids, torch.tensor([n // 2]), last))
        inputs = SolveInputs(vocoder.schedules[2], vocoder.noise, mu, torch.tensor([n]), prompt)
        mel = solve(flow, state, chunk, inputs)
    assert_close(got, vocoded(vocoder, mel[0, 60:]), 1e-4, "sound")


def test_whole_utterances_differ_from_streamed_ones():
    """Even for one chunk: offline the prompt attends to the speech, streamed it is prepared before."""
    vocoder, voice, speech_tokens = make_vocoder(), make_voice(), make_tokens(1, 20)
    whole = vocoder.offline(speech_tokens, voice)
    (streamed,) = speak_turn(vocoder, vocoder.open(voice), speech_tokens, [])
    assert len(whole) == len(streamed)
    assert (whole - streamed).abs().max() > 0.01
