"""Sound files of the examples, as 24 kHz PCM."""

import numpy as np
import soundfile
import soxr

RATE = 24_000
BLOCK = RATE // 10  # samples in 100 ms
BLOCK_S = BLOCK / RATE


def read_blocks(path: str) -> list[bytes]:
    """The file's first channel in blocks of 100 ms, s16le at 24 kHz."""
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    samples = soxr.resample(samples[:, 0], rate, RATE)
    pcm = (np.clip(samples, -1, 1) * 32767).round().astype("<i2")
    return [pcm[start : start + BLOCK].tobytes() for start in range(0, len(pcm), BLOCK)]


def save(path: str, pcm: bytes) -> None:
    """Write s16le sound at 24 kHz to a file and print its length."""
    samples = np.frombuffer(pcm, "<i2")
    soundfile.write(path, samples, RATE)
    print(f"{len(samples) / RATE:.1f} s of sound in {path}")
