"""Features of a prompt by their definitions: NumPy, float64, one frame and one filter at a time."""

import numpy as np


def kaldi_mel(hz: float) -> float:
    return 1127.0 * np.log(1.0 + hz / 700.0)


def slaney_hz(mel: float) -> float:
    return mel * 200 / 3 if mel < 15 else 1000.0 * 6.4 ** ((mel - 15) / 27)


def triangle(x: float, low: float, centre: float, high: float) -> float:
    return max(0.0, (x - low) / (centre - low) if x < centre else (high - x) / (high - centre))


def kaldi_bank(n_mels: int) -> np.ndarray:
    edges = np.linspace(kaldi_mel(20.0), kaldi_mel(8000.0), n_mels + 2)
    return np.array([[triangle(kaldi_mel(k * 31.25), *edges[i : i + 3]) for k in range(256)] for i in range(n_mels)])


def slaney_bank(n_mels: int, n_fft: int, rate: int) -> np.ndarray:
    edges = [slaney_hz(mel) for mel in np.linspace(0.0, 15 + 27 * np.log(8.0) / np.log(6.4), n_mels + 2)]
    rows = []
    for low, centre, high in zip(edges, edges[1:], edges[2:], strict=False):
        row = [triangle(k * rate / n_fft, low, centre, high) for k in range(n_fft // 2 + 1)]
        rows.append(np.array(row) * 2 / (high - low))
    return np.array(rows)


def fbank(wave: np.ndarray, n_mels: int) -> np.ndarray:
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 399)) ** 0.85
    bank, frames = kaldi_bank(n_mels), []
    for start in range(0, len(wave) - 399, 160):
        frame = wave[start : start + 400].astype(np.float64)
        frame = frame - frame.mean()
        emphasised = [frame[0] * 0.03] + [frame[i] - 0.97 * frame[i - 1] for i in range(1, 400)]
        power = np.abs(np.fft.fft(np.array(emphasised) * window, 512)[:256]) ** 2
        frames.append(np.log(np.maximum(bank @ power, 2.0**-23)))
    return np.array(frames)


def prompt_mel(wave: np.ndarray, n_mels: int) -> np.ndarray:
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(1920) / 1920)
    bank, frames = slaney_bank(n_mels, 1920, 24_000), []
    padded = np.pad(wave.astype(np.float64), 720, mode="reflect")
    for start in range(0, len(padded) - 1919, 480):
        spectrum = np.fft.fft(padded[start : start + 1920] * window)[:961]
        frames.append(np.log(np.maximum(bank @ np.sqrt(np.abs(spectrum) ** 2 + 1e-9), 1e-5)))
    return np.array(frames)
