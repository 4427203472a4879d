"""Encoded sound: formats, rates, durations, streams equal to files, speed without a change of pitch."""

import io

import av
import numpy as np
import pytest

from server.doors.core.sound_formats import FORMAT_NAMES, FormatName, SoundEncoder, encoded

RATE = 24_000
TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(3 * RATE) / RATE)).astype(np.float32)
RATES = {"opus": 48_000}
PADDING_S = 0.1  # of lossy formats, whose frames have a fixed length


def decoded(data: bytes, name: str) -> tuple[np.ndarray, int]:
    """Samples [n] and rate of an encoded sound."""
    if name == "pcm":
        return np.frombuffer(data, "<i2") / 32768, RATE
    with av.open(io.BytesIO(data)) as file:
        stream = file.streams.audio[0]
        assert stream.channels == 1
        samples = np.concatenate([frame.to_ndarray().reshape(-1) for frame in file.decode(stream)])
        return samples / (32768 if samples.dtype == np.int16 else 1), stream.rate


def frequency(samples: np.ndarray, rate: int) -> float:
    """The strongest frequency, Hz."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(spectrum.argmax() * rate / len(samples))


def streamed(name: FormatName, speed: float = 1.0) -> list[bytes]:
    """The parts that an encoder gives for half seconds of the tone, and its rest."""
    encoder = SoundEncoder(name, speed)
    return [
        *(encoder.push(TONE[start : start + RATE // 2]) for start in range(0, len(TONE), RATE // 2)),
        encoder.finish(),
    ]


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_stream_is_a_file_with_the_sound(name: FormatName) -> None:
    parts = streamed(name)
    assert all(parts[:-1]), f"expected bytes for each block, got {[len(part) for part in parts]}"
    samples, rate = decoded(b"".join(parts), name)
    assert rate == RATES.get(name, RATE)
    assert abs(len(samples) / rate - 3) < PADDING_S
    assert abs(frequency(samples, rate) - 440) < 1
    assert 0.3 < np.abs(samples).max() < 0.6


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_whole_file_has_the_same_sound_as_the_stream(name: FormatName) -> None:
    (whole, _), (parts, _) = decoded(encoded(TONE, name), name), decoded(b"".join(streamed(name)), name)
    assert len(whole) == len(parts)
    assert np.abs(whole - parts).max() < 0.02


@pytest.mark.parametrize("speed", [0.25, 0.5, 1.5, 4.0])
def test_speed_changes_duration_and_not_pitch(speed: float) -> None:
    samples, rate = decoded(b"".join(streamed("pcm", speed)), "pcm")
    assert abs(len(samples) / rate - 3 / speed) < 0.1
    assert abs(frequency(samples, rate) - 440) < 4


def test_wav_header_of_a_stream_has_unknown_sizes() -> None:
    stream, file = b"".join(streamed("wav")), encoded(TONE, "wav")
    assert stream[4:8] == stream[40:44] == b"\xff\xff\xff\xff" and stream[44:] == file[44:]
    assert int.from_bytes(file[40:44], "little") == len(file) - 44 == int.from_bytes(file[4:8], "little") - 36
