"""One session: how much sound leaves with each chunk, what a new turn starts from, and whole utterances."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.token2wav.flow.block_table import SPILL_ROW, BlockTable
from models.token2wav.flow.flow_state import encode, solve
from models.token2wav.load.parts import load_flow_and_hift
from models.token2wav.settings import SAMPLES_PER_TOKEN
from models.token2wav.stream.vocode import VocodeState, vocode
from models.token2wav.stream.vocoder import Chunk, Vocoder
from models.token2wav.stream.windows import TokenWindows
from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.stream.vocoders import (
    FOLDER,
    copies,
    make_codes,
    make_vocoder,
    make_voice,
    say,
    slot_of,
    tensors,
)
from tests.parity.token2wav.build import set_up_voice

HELD = 3840  # samples that wait for the next chunk
NAN = float("nan")


@pytest.fixture(scope="module")
def vocoder() -> Vocoder:
    return make_vocoder()


def recorded(vocoder: Vocoder, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The flow's outputs from now on, all columns of the first row."""
    mels, regions = [], vocoder.regions

    def call(name: str, *given: Tensor, **static: Any) -> Any:
        out = regions(name, *given, **static)
        if name == "flow":
            mels.append(out[0].clone())
        return out

    monkeypatch.setattr(vocoder, "regions", call)
    return mels


def poison(vocoder: Vocoder, session: int) -> None:
    """Everything that a session can write, as an unlucky turn may leave it."""
    state, both = vocoder.state, [session, session + vocoder.sizes.n_sessions]
    pools: list[tuple[Tensor, BlockTable]] = [(state.code_rows, state.code), (state.mel_rows, state.mel)]
    pools += [(rows, state.dit) for rows in state.dit_rows]
    for rows, views in pools:
        first = int(views.start[session])
        assert views.start[both].tolist() == [first, first]
        rows[..., first : first + views.ring, :, :] = NAN
        rows[..., SPILL_ROW, :, :] = NAN
        views.view[both], views.length[both] = SPILL_ROW, views.width
    for tensor in (*state.copied(), *vocoder.vocode_state.tensors()):
        tensor[both] = NAN if tensor.is_floating_point() else 8


def test_samples_of_each_kind_of_chunk(vocoder: Vocoder):
    """First, following, short, last: 960 a code in all, the newest 3840 always one chunk later."""
    session = vocoder.open(make_voice())
    speech_tokens = make_codes(1, 25 + 25 + 5 + 1 + 24 + 13)
    lengths = [len(wave) for wave in say(vocoder, session, speech_tokens, [25, 25, 5, 1, 24])]
    assert lengths == [20160, 24000, 4800, 960, 23040, 960 * 13 + HELD]
    vocoder.begin_turn(session)
    assert [len(wave) for wave in say(vocoder, session, speech_tokens[:9], [])] == [960 * 9]
    vocoder.begin_turn(session)
    assert [len(wave) for wave in say(vocoder, session, speech_tokens[:8], [2, 1, 2])] == [0, 0, 960, 960 * 7]
    vocoder.close(session)


@settings(max_examples=12)
@given(data=st.data())
def test_any_turn_has_960_samples_a_code(data: st.DataObject):
    vocoder = make_vocoder()
    session = vocoder.open(make_voice(n_speech_tokens=data.draw(st.integers(1, 60))))
    for turn in range(2):
        counts = data.draw(st.lists(st.integers(1, 28), max_size=5))
        speech_tokens = make_codes(turn, sum(counts) + data.draw(st.integers(3, 28)))
        waves = say(vocoder, session, speech_tokens, counts)
        assert sum(map(len, waves)) == SAMPLES_PER_TOKEN * len(speech_tokens)
        voiced = out = 0
        for n, wave in zip(counts, waves, strict=False):
            voiced, out = voiced + n, out + len(wave)
            assert out == max(SAMPLES_PER_TOKEN * voiced - HELD, 0)
        assert all(wave.isfinite().all() for wave in waves)
        vocoder.begin_turn(session)


def test_a_minute_of_windows_moves_no_memory(vocoder: Vocoder):
    """Codes as a talker gives them, 25 or 26 at a time, now and then few, in turns of about ten seconds."""
    session = vocoder.open(make_voice(n_speech_tokens=60))
    addresses, n_bytes = [tensor.data_ptr() for tensor in tensors(vocoder)], vocoder.n_bytes
    sizes = torch.randint(1, 27, (75,), generator=torch.Generator().manual_seed(3)).tolist()
    sizes = [25 if i % 3 else n for i, n in enumerate(sizes)]
    n_speech_tokens, kinds = 0, set()
    windows = TokenWindows(least=5)
    turn_samples = turn_codes = 0
    for i, size in enumerate(sizes):
        ends = i % 12 == 11 or i == len(sizes) - 1
        turn_codes += size
        for window in windows.push(make_codes(i, size), last=ends):
            (wave,) = vocoder.speak([Chunk(session, *window)])
            kinds.add((len(window.speech_tokens), window.last))
            turn_samples += len(wave)
            assert wave.isfinite().all() and wave.abs().max() <= 0.99
        if ends:
            assert turn_samples == SAMPLES_PER_TOKEN * (turn_codes + 3), "the silence it starts with is voiced too"
            n_speech_tokens, turn_samples, turn_codes = n_speech_tokens + turn_codes, 0, 0
            vocoder.begin_turn(session)
            windows = TokenWindows(least=5)
    assert n_speech_tokens >= 1500 and len(kinds) > 10, (
        f"expected a minute of many kinds, got {n_speech_tokens} codes, {kinds}"
    )
    assert [tensor.data_ptr() for tensor in tensors(vocoder)] == addresses
    assert vocoder.n_bytes == n_bytes == sum(tensor.nbytes for tensor in tensors(vocoder))
    vocoder.close(session)


def test_a_prompt_looks_ahead_at_silence(vocoder: Vocoder):
    """A session begins where the prompt, three silence codes behind it, leaves an empty slot."""
    voice, flow, state = make_voice(), vocoder.parts.flow, make_vocoder().state
    slot = state.scratch + 1
    schedule = vocoder.schedules[2]
    set_up_voice(flow, state, slot, voice.speech_tokens, voice.mel, voice.speaker, vocoder.noise, schedule, 0)
    session = vocoder.open(voice)
    for got, expected in zip(vocoder.state.copied(), state.copied(), strict=True):
        assert_close(got[slot_of(vocoder, session)], expected[slot], 1e-4, "what a session takes over")
    vocoder.close(session)


@pytest.mark.parametrize("compat", [None, "reference"])
@pytest.mark.parametrize("ends", [True, False], ids=["ended", "broken off"])
def test_a_turn_leaves_nothing_behind(compat: str | None, ends: bool):
    vocoder = make_vocoder(compat=compat)
    session, speech_tokens, counts = vocoder.open(make_voice()), make_codes(1, 110), [25, 25, 7, 25, 9]
    expected = say(vocoder, session, speech_tokens, counts)
    vocoder.begin_turn(session)
    say(vocoder, session, make_codes(2, 90), [25, 25, 25])
    if not ends:
        vocoder.speak([Chunk(session, make_codes(3, 20))])
    poison(vocoder, session)
    vocoder.begin_turn(session)
    for i, (got, want) in enumerate(zip(say(vocoder, session, speech_tokens, counts), expected, strict=True)):
        assert_same(got, want, f"chunk {i}")


def test_without_a_new_turn_the_last_one_is_remembered(vocoder: Vocoder):
    """Codes after the end are the same turn to the flow, though their sound starts anew."""
    session, speech_tokens = vocoder.open(make_voice()), make_codes(1, 20)
    (first,), (second,) = (say(vocoder, session, speech_tokens, []) for _ in range(2))
    assert len(first) == len(second)
    assert (first - second).abs().max() > 0.01
    vocoder.close(session)


def test_codes_voice_and_seed_are_heard(vocoder: Vocoder):
    speech_tokens = make_codes(1, 20)
    session = vocoder.open(make_voice())
    (plain,) = say(vocoder, session, speech_tokens, [])
    vocoder.close(session)
    session = vocoder.open(make_voice(1))
    (other_voice,) = say(vocoder, session, speech_tokens, [])
    vocoder.close(session)
    other_seed = make_vocoder(seed=1)
    (noise,) = say(other_seed, other_seed.open(make_voice()), speech_tokens, [])
    for other in (other_voice, noise):
        assert (other - plain).abs().max() > 0.01


def test_one_call_is_what_vocoding_its_mel_gives(vocoder: Vocoder, monkeypatch: pytest.MonkeyPatch):
    """First and last in one: no tail comes in, none is left, nothing is faded."""
    mels = recorded(vocoder, monkeypatch)
    session = vocoder.open(make_voice())
    for n in (1, 9, 28):
        vocoder.begin_turn(session)
        (wave,) = say(vocoder, session, make_codes(n, n), [])
        assert_close(wave, vocoded(vocoder, mels[-1][: 2 * n]), 2e-5, f"{n} codes")
        assert not any(tensor[slot_of(vocoder, session)].any() for tensor in vocoder.vocode_state.tensors())
    vocoder.close(session)


def vocoded(vocoder: Vocoder, mel: Tensor) -> Tensor:
    """Mel [T, n_mels] in one call from an empty slot."""
    state = VocodeState.allocate(0, mel.shape[1])
    call = torch.tensor([0]), mel.T[None], torch.tensor([len(mel)]), torch.tensor([True]), vocoder.rules
    with torch.no_grad():
        wave, n_samples = vocode(vocoder.parts.hift, state, *call)
    return wave[0, : n_samples[0]]


def test_inside_chunks_sound_is_that_of_all_mel_at_once(monkeypatch: pytest.MonkeyPatch):
    """Unvoiced, or a border's pitch would shift phases for good. Chunks differ from 12 frames before a border, where
    the first pass lacks what follows, to 4 behind, where the second one lacks what was before."""
    parts = load_flow_and_hift(FOLDER)
    parts.hift.f0 = lambda mel, n_frames: torch.zeros(len(mel), mel.shape[2], dtype=torch.float64)
    vocoder = make_vocoder(parts)
    mels = recorded(vocoder, monkeypatch)
    session, counts = vocoder.open(make_voice()), [25, 25, 14, 25]
    streamed = torch.cat(say(vocoder, session, make_codes(1, 110), counts))
    n_frames = [2 * n for n in (*counts, 110 - sum(counts))]
    whole = vocoded(vocoder, torch.cat([mel[:n] for mel, n in zip(mels, n_frames, strict=True)]))
    assert len(streamed) == len(whole)
    borders = torch.tensor(n_frames[:-1]).cumsum(0)
    from_border = torch.arange(sum(n_frames))[:, None] - borders
    near = ((from_border >= -13) & (from_border < 5)).any(1).repeat_interleave(480)
    assert_close(streamed[~near], whole[~near], 1e-5, "sound far from every border")
    heard = (streamed - whole)[near].abs().max()
    assert heard > 1e-2, f"expected borders to be heard, got a difference of {heard}"


@pytest.mark.parametrize("n_speech_tokens", [1, 20, 90])
def test_a_whole_utterance_is_one_last_chunk_without_cache(n_speech_tokens: int):
    """Prompt and speech as one chunk of an empty slot; the same sound, and no session is touched by it."""
    vocoder, voice, speech_tokens = make_vocoder(), make_voice(), make_codes(1, n_speech_tokens)
    session = vocoder.open(make_voice(1))
    vocoder.speak([Chunk(session, make_codes(2, 28))])
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
        state.place(slots, torch.tensor([0]), torch.tensor([n]), flow.speaker(voice.speaker[None]))
        last = torch.tensor([True])
        mu = encode(flow, state, slots, ids, torch.tensor([n // 2]), last, 0, n)
        schedule = vocoder.schedules[2]
        mel = solve(flow, state, schedule, vocoder.noise, slots, mu, torch.tensor([n]), 0, prompt, n)
    assert_close(got, vocoded(vocoder, mel[0, 60:]), 1e-4, "sound")


def test_whole_utterances_are_not_what_streaming_gives():
    """Even one chunk: offline the prompt sees the speech, streamed it was prepared before."""
    vocoder, voice, speech_tokens = make_vocoder(), make_voice(), make_codes(1, 20)
    whole = vocoder.offline(speech_tokens, voice)
    (streamed,) = say(vocoder, vocoder.open(voice), speech_tokens, [])
    assert len(whole) == len(streamed)
    assert (whole - streamed).abs().max() > 0.01
