"""S3Gen around its modules: buckets, the used part of the prompt, the lookahead, the onset, and refused inputs."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.errors import AudioError, ModelError, SettingsError, ShapeError, TokenError
from models.token2wav.flow.solver import time_grid
from models.token2wav.hift.source import phase_lines
from models.token2wav.prompt.features import fbank, log_mel_128, prompt_mel, remove_mean, resample
from models.token2wav.s3gen.model import S3Gen, S3Voice, draw, end_with_silence
from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.s3gen import tiny_s3gen
from tests.models.token2wav.s3gen import unet_reference as plain_unet
from tests.models.token2wav.s3gen.tiny_s3gen import N_MELS, SPEAKER_DIM, VOCAB

guided = cache(tiny_s3gen.make)
meanflow_model = partial(guided, meanflow=True)
NOISE = torch.randn(N_MELS, 400, generator=torch.Generator().manual_seed(9))


def some_tokens(n: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


def plain_mel(model: S3Gen, speech_tokens: Tensor, voice: S3Voice, n_steps: int, n_dropped: int) -> Tensor:
    """Mel of one utterance without padding: encoder, then plain Euler steps over prompt and speech."""
    flow = model.flow
    both = torch.cat((voice.speech_tokens[: len(voice.mel) // 2], speech_tokens))
    hidden = flow.encoder.offline(flow.input_embedding(both[None]), torch.tensor([len(both)]))
    mu = flow.encoder_proj(hidden)[0].T[:, : 2 * len(both) - n_dropped]
    cond = torch.zeros_like(mu)
    cond[:, : len(voice.mel)] = voice.mel.T
    spk = flow.spk_embed_affine_layer(voice.speaker / voice.speaker.norm())
    times = [k / n_steps for k in range(n_steps + 1)]
    if not flow.meanflow:
        times = [1 - math.cos(math.pi / 2 * time) for time in times]
    weights, heads = flow.decoder.estimator.state_dict(), flow.config.estimator.heads
    noise = NOISE[:, : mu.shape[1]]
    return plain_unet.solve(weights, heads, noise, mu, spk, cond, times, flow.config.cfg_rate)[:, len(voice.mel) :]


@settings(max_examples=12)
@given(
    n=st.integers(4, 40),
    n_prompt=st.integers(0, 20),
    is_odd=st.booleans(),
    finalize=st.booleans(),
    meanflow=st.booleans(),
)
def test_mel_equals_the_computation_without_buckets(
    n: int, n_prompt: int, is_odd: bool, finalize: bool, meanflow: bool
) -> None:
    model = meanflow_model() if meanflow else guided()
    speech_tokens, voice = some_tokens(n), tiny_s3gen.voice(n_prompt + 2, 2 * n_prompt + is_odd)
    got = model.mel(speech_tokens, voice, noise=NOISE, finalize=finalize, n_steps=3)
    expected = plain_mel(model, speech_tokens, voice, n_steps=3, n_dropped=0 if finalize else 6)
    assert got.shape == (N_MELS, 2 * n - is_odd - (0 if finalize else 6))
    assert_close(got, expected, 1e-4 * (1 + expected.abs().max().item()), "mel")


@pytest.mark.parametrize(("make", "n_steps"), [(guided, 10), (meanflow_model, 2)], ids=["guided", "mean flow"])
def test_default_number_of_steps(make: Callable[[], S3Gen], n_steps: int) -> None:
    model = make()
    speech_tokens, voice = some_tokens(9), tiny_s3gen.voice(5, 10)
    assert_same(
        model.mel(speech_tokens, voice, noise=NOISE), model.mel(speech_tokens, voice, noise=NOISE, n_steps=n_steps)
    )


def test_mel_does_not_depend_on_the_bucket() -> None:
    """32 tokens fill a bucket; with 33 tokens the bucket has twice the length."""
    flow, (speech_tokens, mel, speaker) = guided().flow, tiny_s3gen.voice(32, 20)
    results = []
    for length in (64, 128):
        prompt = F.pad(mel.T[None], (0, length - 20))
        padded = F.pad(speech_tokens[None], (0, length // 2 - 32), value=VOCAB - 1)
        counts = torch.tensor([32]), torch.tensor([64])
        results.append(flow(padded, *counts, prompt, speaker[None], NOISE[None, :, :length], time_grid(2))[..., :64])
    assert_close(results[1], results[0], 1e-5, "mel in a longer bucket")


def batch(lengths: list[int], n_prompt: int, T: int) -> tuple[Tensor, ...]:
    """Arguments of `UNetFlow.forward` for rows of `lengths` tokens."""
    voice = tiny_s3gen.voice(n_prompt, 2 * n_prompt)
    speech_tokens = torch.stack([some_tokens(T, seed) for seed in range(len(lengths))])
    prompt = F.pad(voice.mel.T, (0, 2 * T - 2 * n_prompt)).expand(len(lengths), -1, -1).contiguous()
    speaker = torch.randn(len(lengths), SPEAKER_DIM, generator=torch.Generator().manual_seed(2))
    noise = torch.randn(len(lengths), N_MELS, 2 * T, generator=torch.Generator().manual_seed(3))
    n_speech_tokens = torch.tensor(lengths)
    return speech_tokens, n_speech_tokens, 2 * n_speech_tokens, prompt, speaker, noise, time_grid(2)


def test_rows_of_a_batch_equal_separate_calls_and_an_empty_row_is_zero() -> None:
    lengths = [12, 0, 7]
    arguments = batch(lengths, n_prompt=3, T=16)
    got = guided().flow(*arguments)
    for row, n in enumerate(lengths):
        if not n:
            assert_close(got[row], torch.zeros(N_MELS, 32), 0.0, "row without tokens")
            continue
        speech_tokens, n_speech_tokens, n_frames, prompt, speaker, noise = (
            part[row : row + 1] for part in arguments[:-1]
        )
        alone = guided().flow(
            speech_tokens[:, :n],
            n_speech_tokens,
            n_frames,
            prompt[..., : 2 * n],
            speaker,
            noise[..., : 2 * n],
            arguments[-1],
        )
        assert_close(got[row, :, : 2 * n], alone[0], 1e-5, f"row {row}")


def test_encoder_output_of_padding_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = batch([12, 0], n_prompt=3, T=16)
    expected, encoder = guided().flow(*arguments), guided().flow.encoder
    whole = encoder.offline

    def with_nan(x: Tensor, n: Tensor) -> Tensor:
        beyond = torch.arange(2 * x.shape[1]) >= 2 * n[:, None]
        return whole(x, n).masked_fill(beyond[..., None], torch.nan)

    monkeypatch.setattr(encoder, "offline", with_nan)
    assert_same(guided().flow(*arguments), expected, "mel")


def test_sound_equals_the_vocoded_mel_with_an_onset() -> None:
    speech_tokens, voice = some_tokens(8), tiny_s3gen.voice(6, 13)
    noise, phase = draw(5, N_MELS, 13 + 16)
    mel = guided().mel(speech_tokens, voice, noise=noise)[None]
    n = torch.tensor([mel.shape[2]])
    hift = guided().mel2wav
    f0 = hift.f0(mel, n)
    source, _ = hift.m_source(
        f0, phase_lines("cumsum", f0, n, phase[None]), hift.m_source.mixed_noise(n * 0, 480 * mel.shape[2]), n
    )
    expected = hift.decode(mel, source, n)[0]
    steps = torch.arange(480, dtype=torch.float64) / 479
    ramp = torch.cat((torch.zeros(480), ((1 - torch.cos(math.pi * steps)) / 2).float()))
    expected[:960] *= ramp

    got = guided().sound(speech_tokens, voice, seed=5)
    assert got.shape == (480 * 15,)
    assert expected[960:].abs().max() > 0.05, "expected sound, got almost silence"
    assert_close(got, expected, 1e-4, "sound")
    assert_same(guided().sound(speech_tokens, voice, seed=5), got, "the same seed")
    assert (guided().sound(speech_tokens, voice, seed=6) - got).abs().max() > 1e-3


def test_unfinished_sound_ends_before_the_look_ahead() -> None:
    speech_tokens, voice = some_tokens(11), tiny_s3gen.voice(6, 12)
    assert guided().sound(speech_tokens, voice, finalize=False, n_steps=1).shape == (960 * 8,)


def test_noise_of_a_longer_utterance_starts_with_that_of_a_shorter_one() -> None:
    short, long = draw(3, 10, 40), draw(3, 10, 200)
    assert_same(short[0], long[0][:, : short[0].shape[1]], "noise")
    assert_same(short[1], long[1], "phases")
    assert short[0].shape[1] >= 40 and short[1].abs().max() <= math.pi and short[1].min() < 0 < short[1].max()
    assert abs(long[0].mean()) < 0.1 and abs(long[0].std() - 1) < 0.1


def test_prepared_voice_equals_the_outputs_of_its_modules() -> None:
    rate, n = 22_050, 22_050
    wave = 0.3 * torch.randn(n, generator=torch.Generator().manual_seed(4))
    got = guided().prepare_voice(wave, rate)
    wave_16k, wave_24k = resample(wave, rate, 16_000), resample(wave, rate, 24_000)
    mel = prompt_mel(wave_24k, N_MELS)
    log_mel = log_mel_128(wave_16k, 16)[None]
    speech_tokens, _ = guided().tokenizer(log_mel, torch.tensor([log_mel.shape[2]]))
    energies = fbank(wave_16k, 16)
    assert_same(got.mel, mel, "mel")
    assert_same(got.speech_tokens, speech_tokens[0, : len(mel) // 2], "speech_tokens")
    assert_close(got.speaker, guided().speaker_encoder(remove_mean(energies)[None])[0], 1e-6, "speaker vector")


@pytest.mark.parametrize("n_extra", [0, 333, 960])
def test_tokens_and_mel_of_a_voice_have_matching_lengths(n_extra: int) -> None:
    voice = guided().prepare_voice(torch.rand(24_000 + n_extra) - 0.5, 24_000)
    assert len(voice.mel) == (24_000 + n_extra) // 480
    assert len(voice.speech_tokens) == len(voice.mel) // 2


def test_uses_the_first_ten_seconds_of_a_voice() -> None:
    wave = torch.rand(16_000 * 12, generator=torch.Generator().manual_seed(1)) - 0.5
    voice = guided().prepare_voice(wave, 16_000)
    assert len(voice.mel) == 500 and len(voice.speech_tokens) == 250
    shorter = guided().prepare_voice(wave[: 16_000 * 10 + 4000], 16_000)
    assert_same(voice.speech_tokens, shorter.speech_tokens, "speech_tokens")
    assert_close(voice.speaker, shorter.speaker, 1e-6, "speaker vector")


@pytest.mark.parametrize("wave", [torch.zeros(2, 24_000), torch.zeros(0), torch.full((24_000,), torch.nan)])
def test_refuses_invalid_prompt_sounds(wave: Tensor) -> None:
    with pytest.raises(AudioError, match="prompt sound"):
        guided().prepare_voice(wave, 24_000)


def test_end_with_silence() -> None:
    assert end_with_silence(torch.tensor([1, 2])).tolist() == [1, 2, 4299, 4299, 4299]


VOICE = tiny_s3gen.voice(4, 8)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"speech_tokens": torch.tensor([3, VOCAB])}, TokenError, rf"tokens in 0\.\.{VOCAB - 1}, got \[{VOCAB}\]"),
        ({"speech_tokens": torch.tensor([-1, 3])}, TokenError, r"got \[-1\]"),
        ({"speech_tokens": torch.zeros(0, dtype=torch.int64)}, TokenError, "more than 0, got 0"),
        ({"speech_tokens": torch.zeros(3, dtype=torch.int64), "finalize": False}, TokenError, "more than 3, got 3"),
        ({"speech_tokens": torch.zeros(2)}, TokenError, r"int64, got torch\.float32"),
        ({"speech_tokens": torch.zeros(1, 4, dtype=torch.int64)}, ShapeError, r"speech tokens: .* got \[1, 4\]"),
        ({"voice": VOICE._replace(speech_tokens=torch.tensor([0, 1, 2, VOCAB]))}, TokenError, "prompt tokens"),
        (
            {"voice": VOICE._replace(speech_tokens=torch.tensor([0, 1, 2]))},
            ShapeError,
            "at least 4 for 8 mel frames, got 3",
        ),
        ({"voice": VOICE._replace(mel=torch.zeros(8, N_MELS + 1))}, ShapeError, "prompt mel"),
        ({"voice": VOICE._replace(speaker=torch.zeros(1, SPEAKER_DIM))}, ShapeError, "speaker vector"),
        ({"noise": NOISE[:, :27]}, ShapeError, "at least 28 columns, got 27"),
        ({"noise": NOISE.T}, ShapeError, "noise"),
        ({"n_steps": 0}, SettingsError, "euler steps"),
    ],
)
def test_mel_refuses_invalid_inputs(change: dict[str, Any], error: type[ModelError], match: str) -> None:
    arguments = {"speech_tokens": some_tokens(10), "voice": VOICE, "noise": NOISE}
    call = partial(guided().mel, **(arguments | change))
    with pytest.raises(error, match=match):
        call()
