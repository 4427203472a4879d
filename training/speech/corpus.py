"""The speech corpus in memory: all utterances in one array, with voice, text and phonemes.

Contains samples and labels on the CPU. Features are in `training.speech.features`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.errors import ModelError
from training.speech.voices import RATE, TOKEN_SAMPLES, VOICES

FRAME_SAMPLES = 480
PHONES = (
    *("pau", "aa", "ae", "ah", "ao", "aw", "ax", "ay", "b", "ch", "d", "dh", "eh", "er"),
    *("ey", "f", "g", "hh", "ih", "iy", "jh", "k", "l", "m", "n", "ng", "ow", "oy"),
    *("p", "r", "s", "sh", "t", "th", "uh", "uw", "v", "w", "y", "z", "zh"),
)
NO_PHONE = -100  # of speech without labels; losses ignore it


@dataclass(frozen=True)
class Corpus:
    """U utterances, utterances of one voice next to each other, each a whole number of 40 ms long."""

    samples: np.ndarray  # [n] int16 at 24 kHz
    lengths: np.ndarray  # [U] int64 speech tokens of each utterance
    voices: np.ndarray  # [U] int64 index into VOICES
    held_out: np.ndarray  # [U] bool
    phones: np.ndarray  # [n / 480] int16 index into PHONES of each frame, or NO_PHONE
    texts: list[str]

    @property
    def starts(self) -> np.ndarray:
        """[U] int64 first speech token of each utterance."""
        ends: np.ndarray = np.cumsum(self.lengths)
        return ends - self.lengths

    @property
    def hours(self) -> float:
        return len(self.samples) / RATE / 3600

    def wave(self, index: int) -> np.ndarray:
        """[n] float32 samples of one utterance."""
        start = int(self.starts[index]) * TOKEN_SAMPLES
        end = start + int(self.lengths[index]) * TOKEN_SAMPLES
        samples: np.ndarray = self.samples[start:end].astype(np.float32) / 32_768
        return samples


def load_corpus(folder: Path, voices: Collection[str] | None = None) -> Corpus:
    """The corpus of these voices; None = all. Raises: ModelError without any shard."""
    shards = []
    for number, voice in enumerate(VOICES):
        if voices is None or voice.name in voices:
            shards += [(number, path) for path in sorted(folder.glob(f"{voice.name}_[0-9]*.npz"))]
    if not shards:
        raise ModelError(str(folder), expected="shards of training.speech.generate", got="none")
    samples, lengths, numbers, held_out, phones, texts = [], [], [], [], [], []
    for number, path in shards:
        shard = np.load(path)
        n_samples = shard["lengths"]
        samples.append(shard["samples"])
        lengths.append(n_samples // TOKEN_SAMPLES)
        numbers.append(np.full(len(n_samples), number))
        held_out.append(np.full(len(n_samples), path.stem.endswith("_0000")))
        texts += shard["texts"].tolist()
        bounds = np.cumsum(shard["n_phones"])[:-1]
        parts = zip(np.split(shard["phones"], bounds), np.split(shard["ends"], bounds), n_samples, strict=True)
        phones += [frame_phones(names, ends, int(n) // FRAME_SAMPLES) for names, ends, n in parts]
    return Corpus(
        samples=np.concatenate(samples),
        lengths=np.concatenate(lengths),
        voices=np.concatenate(numbers),
        held_out=np.concatenate(held_out),
        phones=np.concatenate(phones),
        texts=texts,
    )


def frame_phones(names: np.ndarray, ends: np.ndarray, n_frames: int) -> np.ndarray:
    """[n_frames] int16 phoneme at the centre of each 20 ms frame; the last one lasts to the end."""
    if not len(names):
        return np.full(n_frames, NO_PHONE, np.int16)
    numbers = np.array([PHONES.index(name) for name in names], np.int16)
    centres = (np.arange(n_frames) + 0.5) * FRAME_SAMPLES / RATE
    phones: np.ndarray = numbers[np.searchsorted(ends, centres).clip(max=len(names) - 1)]
    return phones
