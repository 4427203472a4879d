"""Reading and writing sound files: unchanged samples, and one error for incomplete files."""

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import AudioError, NumericsError
from models.token2wav.prompt.sound_file import read_sound, write_sound
from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.prompt.prompt_sounds import pcm16, prompt, write_pcm16


def encoded(kind: str, subtype: str, sound: np.ndarray, rate: int) -> bytes:
    data = io.BytesIO()
    soundfile.write(data, sound.T, rate, format=kind, subtype=subtype)
    return data.getvalue()


@pytest.mark.parametrize(("rate", "channels"), [(8_000, 1), (16_000, 8), (44_100, 2), (48_000, 1)])
def test_reads_16_bit_wav(tmp_path: Path, rate: int, channels: int) -> None:
    sound = prompt(0.6, rate, channels)
    wave, got_rate = read_sound(write_pcm16(tmp_path / "a.wav", sound, rate))
    assert got_rate == rate
    assert_same(wave, torch.from_numpy(pcm16(sound).astype(np.float32) / 32768))


@pytest.mark.parametrize("name", ["a.wav", "a.raw", "a", "a.flac"])
def test_format_is_detected_by_content(tmp_path: Path, name: str) -> None:
    sound = prompt(0.6, 22_050, 2)
    (tmp_path / name).write_bytes(encoded("WAV", "FLOAT", sound, 22_050))
    wave, rate = read_sound(str(tmp_path / name))
    assert rate == 22_050
    assert_same(wave, torch.from_numpy(sound))


@pytest.mark.parametrize(
    ("kind", "subtype", "tolerance"),
    [
        ("WAV", "PCM_U8", 1e-2),
        ("WAV", "PCM_24", 1e-6),
        ("WAV", "DOUBLE", 0),
        ("AIFF", "PCM_16", 1e-4),
        ("FLAC", "PCM_16", 1e-4),
        ("OGG", "VORBIS", 0.2),
    ],
)
def test_reads_other_formats(tmp_path: Path, kind: str, subtype: str, tolerance: float) -> None:
    sound = prompt(0.6, 24_000, 2)
    (tmp_path / "a").write_bytes(encoded(kind, subtype, sound, 24_000))
    wave, rate = read_sound(tmp_path / "a")
    assert rate == 24_000
    assert_close(wave, torch.from_numpy(sound), tolerance)


def test_accepts_the_unknown_length_of_a_pipe(tmp_path: Path) -> None:
    path = write_pcm16(tmp_path / "a.wav", prompt(0.6), 16_000)
    expected, _ = read_sound(path)
    for riff, data in ((0xFFFFFFFF, 0xFFFFFFFF), (0x7FFFF024, 0x7FFFF000)):
        content = bytearray(path.read_bytes())
        content[4:8], content[40:44] = riff.to_bytes(4, "little"), data.to_bytes(4, "little")
        path.write_bytes(content)
        assert_same(read_sound(path)[0], expected)


@pytest.mark.parametrize("kind", ["WAV", "AIFF", "FLAC", "MP3"])
@pytest.mark.parametrize("kept", [0, 7, 30, 0.3, 0.9])
def test_refuses_truncated_files(tmp_path: Path, kind: str, kept: float) -> None:
    content = encoded(kind, "MPEG_LAYER_III" if kind == "MP3" else "PCM_16", prompt(2.0), 16_000)
    path = tmp_path / "cut"
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(AudioError, match=r"cut: expected .+, got .+"):
        read_sound(path)


def test_refuses_foreign_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no sound at all, only words " * 50)
    for name, message in (
        ("text", "expected a sound file, got .+"),
        ("absent", "expected a readable file, got No such file or directory"),
        (".", "expected a readable file, got Is a directory"),
    ):
        with pytest.raises(AudioError, match=f"{name}: {message}"):
            read_sound(tmp_path / name if name != "." else str(tmp_path) + "/.")


@settings(max_examples=150)
@given(changes=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 255)), max_size=5), kind=st.sampled_from("WF"))
def test_damage_raises_nothing_but_audio_errors(tmp_path_factory, changes, kind) -> None:
    content = bytearray(encoded(*{"W": ("WAV", "PCM_16"), "F": ("FLAC", "PCM_16")}[kind], prompt(0.6), 16_000))
    for position, value in changes:
        content[position] = value
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content)
    try:
        wave, rate = read_sound(path)
    except AudioError:
        return
    assert 8_000 <= rate <= 192_000 and 0.5 * rate <= wave.shape[1] <= 30 * rate and len(wave) <= 8


@pytest.mark.parametrize(
    ("sound", "rate", "message"),
    [
        (np.zeros((1, 31 * 8_000)), 8_000, "duration: expected 0.5 to 30 s, got 31.000 s"),
        (np.zeros((1, 1_000)), 8_000, "duration: expected 0.5 to 30 s, got 0.125 s"),
        (np.zeros((9, 8_000)), 8_000, "channels: expected at most 8, got 9"),
        (np.zeros((1, 8_000)), 4_000, "sample rate: expected 8000 to 192000 Hz, got 4000"),
    ],
)
def test_checks_limits_in_the_header(tmp_path: Path, monkeypatch, sound: np.ndarray, rate: int, message: str) -> None:
    path = write_pcm16(tmp_path / "a.wav", sound, rate)
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: pytest.fail("expected no samples to be read"))
    with pytest.raises(AudioError) as caught:
        read_sound(path)
    assert str(caught.value) == f"{path}: {message}"


def test_writes_24_khz_mono_of_16_bits(tmp_path: Path) -> None:
    wave = torch.tensor([0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -7.0, 0.99999])
    write_sound(tmp_path / "a.wav", wave)
    info = soundfile.info(tmp_path / "a.wav")
    got = (info.samplerate, info.channels, info.format, info.subtype)
    assert got == (24_000, 1, "WAV", "PCM_16")
    pcm, _ = soundfile.read(tmp_path / "a.wav", dtype="int16")
    assert pcm.tolist() == [0, 16384, -16384, 32767, -32767, 32767, -32767, 32767]


def test_refuses_to_write_samples_that_are_not_finite(tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match="speech: expected finite samples, got 2 of 3 NaN or infinite"):
        write_sound(tmp_path / "a.wav", torch.tensor([0.0, float("nan"), float("inf")]))
    assert list(tmp_path.iterdir()) == []
