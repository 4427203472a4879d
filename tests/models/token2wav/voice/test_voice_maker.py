"""A voice from a prompt, compared with separate calls of the features and networks."""

import threading
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.errors import AudioError, CheckpointError
from models.token2wav.load.flow_yaml import load_flow_config
from models.token2wav.load.parts import VoiceParts, load_voice_parts
from models.token2wav.prompt import features
from models.token2wav.prompt.sound_file import read_sound
from models.token2wav.settings import CampPlusConfig, FlowConfig, S3TokenizerConfig
from models.token2wav.voice.voice import Voice
from models.token2wav.voice.voice_maker import VoiceMaker, fit_frames
from tests.models.compare import assert_same
from tests.models.token2wav.load.random_voice_parts import random_voice_parts
from tests.models.token2wav.prompt.prompt_sounds import pcm16, prompt, write_pcm16

OTHER_SIZES = FlowConfig(n_mels=20, speaker_dim=24)


@pytest.fixture(scope="module")
def parts(tiny: Path) -> VoiceParts:
    return load_voice_parts(tiny / "assets/token2wav")


@pytest.fixture(scope="module")
def maker(tiny: Path, parts: VoiceParts) -> VoiceMaker:
    return VoiceMaker(parts, load_flow_config(tiny / "assets/token2wav/flow.yaml"))


@pytest.fixture(scope="module")
def other_maker() -> VoiceMaker:
    speaker = CampPlusConfig(n_mels=40, embedding=24, growth=8, bottleneck=2, channels=16, front_channels=8)
    return VoiceMaker(random_voice_parts(speaker, S3TokenizerConfig(n_mels=24, width=64, n_layers=2)), OTHER_SIZES)


def by_hand(maker: VoiceMaker, sound: np.ndarray, rate: int) -> Voice:
    """The voice of a sound [channels, n] float32."""

    def at(wave: np.ndarray, new_rate: int) -> Tensor:
        return torch.from_numpy(wave if rate == new_rate else soxr.resample(wave, rate, new_rate, quality="HQ"))

    first, mixed = at(sound[0], 16_000), at(sound.sum(0) / np.float32(len(sound)), 24_000)
    log_mel = features.log_mel_128(first, maker.speech_tokenizer.config.n_mels)
    F = log_mel.shape[1]
    n_speech_tokens = ((F + 1) // 2 + 1) // 2
    with torch.no_grad():
        speech_tokens = maker.speech_tokenizer(log_mel[None], torch.tensor([F]))[0][0, :n_speech_tokens]
        fbank = features.fbank(first, maker.speaker_encoder.config.n_mels)
        speaker = maker.speaker_encoder((fbank - fbank.mean(0))[None])[0]
    frames = list(features.prompt_mel(mixed, maker.flow.n_mels))[: 2 * n_speech_tokens]
    while len(frames) < 2 * n_speech_tokens:
        frames.append(frames[-1])
    return Voice(speech_tokens, torch.stack(frames), speaker)


def assert_same_voice(got: Voice, expected: Voice) -> None:
    for name in ("speech_tokens", "mel", "speaker"):
        assert_same(getattr(got, name), getattr(expected, name), name)


@pytest.mark.parametrize(
    ("seconds", "rate", "channels", "subtype"),
    [
        (1.3, 16_000, 1, "PCM_16"),
        (1.0, 24_000, 2, "FLOAT"),
        (0.7, 8_000, 2, "PCM_16"),
        (2.13, 44_100, 2, "PCM_16"),
        (0.9, 48_000, 3, "FLOAT"),
    ],
)
def test_voice_of_a_file_equals_separate_calls(
    tmp_path: Path, maker: VoiceMaker, seconds: float, rate: int, channels: int, subtype: str
) -> None:
    sound, path = prompt(seconds, rate, channels), tmp_path / "prompt.wav"
    if subtype == "PCM_16":
        write_pcm16(path, sound, rate)
        sound = pcm16(sound).astype(np.float32) / 32768
    else:
        soundfile.write(path, sound.T, rate, subtype=subtype)
    got = maker.make(*read_sound(path))
    expected = by_hand(maker, sound, rate)
    assert_same(got.speech_tokens, expected.speech_tokens, "speech_tokens")
    assert_same(got.speaker, expected.speaker, "speaker")
    off = (got.mel - expected.mel).abs().max()  # the channels are added in a different order
    assert got.mel.shape == expected.mel.shape and off < 1e-3, f"mel: max diff {off}"
    assert got.speech_tokens.unique().numel() > 2, f"expected different tokens, got {got.speech_tokens}"


@settings(max_examples=15)
@given(n=st.integers(11_025, 20_000), rate=st.sampled_from([11_025, 16_000, 22_050]))
def test_accepts_any_duration(other_maker: VoiceMaker, n: int, rate: int) -> None:
    sound = prompt(1.0, n)
    got = other_maker.make(sound, rate)
    assert_same_voice(got, by_hand(other_maker, sound, rate))
    got.check(OTHER_SIZES)


def test_accepts_the_shortest_and_the_longest_sound(other_maker: VoiceMaker) -> None:
    for seconds, n_speech_tokens in ((0.5, 13), (30, 750)):
        voice = other_maker.make(prompt(seconds, 16_000), 16_000)
        assert (len(voice.speech_tokens), voice.n_frames) == (n_speech_tokens, 2 * n_speech_tokens)
        assert (voice.speech_tokens.dtype, voice.mel.dtype, voice.speaker.dtype) == (
            torch.int64,
            torch.float32,
            torch.float32,
        )


def test_repeats_the_last_frame(other_maker: VoiceMaker) -> None:
    voice = other_maker.make(prompt(0.5, 24_000), 24_000)  # 25 mel frames, 13 tokens
    assert_same(voice.mel[25], voice.mel[24])
    assert not torch.equal(voice.mel[24], voice.mel[23])


@given(have=st.integers(1, 9), want=st.integers(1, 9))
def test_fit_frames(have: int, want: int) -> None:
    mel = torch.randn(have, 3)
    assert_same(fit_frames(mel, want), mel[[min(frame, have - 1) for frame in range(want)]])


def test_channels_of_each_feature(other_maker: VoiceMaker) -> None:
    sound = prompt(0.8, channels=2)
    base, swapped = other_maker.make(sound, 16_000), other_maker.make(sound[::-1], 16_000)
    assert_same(swapped.mel, base.mel)
    assert not torch.equal(swapped.speech_tokens, base.speech_tokens) and not torch.equal(swapped.speaker, base.speaker)
    mono = other_maker.make(sound[0], 16_000)
    assert_same(mono.speech_tokens, base.speech_tokens)
    assert_same(mono.speaker, base.speaker)
    assert not torch.equal(mono.mel, base.mel)


def test_accepts_silence(other_maker: VoiceMaker) -> None:
    other_maker.make(np.zeros(16_000, np.float32), 16_000).check(OTHER_SIZES)


def test_threads_share_one_maker(other_maker: VoiceMaker) -> None:
    sounds = [prompt(0.6 + 0.2 * number, seed=number) for number in range(4)]
    expected = [other_maker.make(sound, 16_000) for sound in sounds]
    got: dict[int, Voice] = {}

    def work(number: int) -> None:
        for _ in range(3):
            got[number] = other_maker.make(sounds[number], 16_000)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(sounds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, voice in enumerate(expected):
        assert_same_voice(got[number], voice)


def test_refuses_invalid_sounds(other_maker: VoiceMaker) -> None:
    with pytest.raises(AudioError, match=r"prompt sound: duration: expected 0\.5 to 30 s, got 0\.400 s"):
        other_maker.make(prompt(0.4), 16_000)
    with pytest.raises(AudioError, match="prompt sound: sample rate: expected 8000 to 192000 Hz, got 0"):
        other_maker.make(prompt(1.0), 0)


def test_refuses_networks_that_do_not_match_the_flow(parts: VoiceParts) -> None:
    with pytest.raises(CheckpointError, match="speaker vector: expected 25 values, got 24"):
        VoiceMaker(parts, OTHER_SIZES.model_copy(update={"speaker_dim": 25}))


def test_refuses_tokens_that_do_not_match_the_flow(parts: VoiceParts, maker: VoiceMaker) -> None:
    small = VoiceMaker(parts, maker.flow.model_copy(update={"vocab_size": 50}))
    with pytest.raises(AudioError, match=r"voice: speech_tokens: expected 0 to 49, got"):
        small.make(prompt(1.0), 16_000)
