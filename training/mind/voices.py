"""The person's voices from the engines of `training.speech`, as functions from text to samples.

A voice keeps its latest utterances in memory, and their sound in a folder if there is one, because starting an engine
takes longer than most sentences.
"""

import hashlib
import os
import random
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soxr

from training.speech.corpus import NO_PHONE, PHONES
from training.speech.voices import RATE as ENGINE_RATE
from training.speech.voices import VOICES, Segment, SpeechVoice, speak
from training.timelines.speech import RATE, Samples

TEMPOS = (0.87, 0.94, 1.0, 1.07, 1.14)  # of each voice; pitch follows
AUDIBLE = 0.02  # of the peak: quieter ends are silence
KEPT_BYTES = 6_000_000  # of the utterances that a voice keeps, about 64
# More voices of espeak-ng, for training only: variants of its voice in several accents, and words a minute.
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-029")
VARIANTS = (("m1", 160), ("m2", 185), ("m4", 140), ("m5", 170), ("m8", 150), ("f1", 165), ("f3", 180), ("f5", 145))
KED = SpeechVoice("ked", "festival", "voice_ked_diphone", 0.0)  # made of diphones, as most voices of festival are
# Shares of the engines: flite has the natural voices, espeak-ng many speakers, festival the voice of diphones.
ENGINE_SHARES = {"flite": 0.68, "espeak-ng": 0.2, "festival": 0.12}


@dataclass(frozen=True)
class Utterance:
    """A spoken text.

    Args:
        wave: [n] samples at 16 kHz without silence at the ends.
        phones, ends: [p] indices into PHONES and seconds from the wave's start; empty without times.
    """

    wave: Samples
    phones: npt.NDArray[np.int64]
    ends: npt.NDArray[np.float64]

    def phones_at(self, times: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """[n] phonemes at these seconds from the wave's start, or NO_PHONE."""
        if not len(self.phones):
            return np.full(len(times), NO_PHONE, np.int64)
        found: npt.NDArray[np.int64] = self.phones[np.searchsorted(self.ends, times).clip(max=len(self.phones) - 1)]
        return found


@dataclass(frozen=True)
class EngineVoice:
    """A voice at a tempo.

    Args:
        cache: folder of finished sound, which processes may share; None keeps none.
        kept_bytes: of `kept`.
        kept: utterances by text, the latest used last.
    """

    voice: SpeechVoice
    cache: Path | None = None
    kept_bytes: int = KEPT_BYTES
    kept: "OrderedDict[str, Utterance]" = field(default_factory=OrderedDict, compare=False)

    def __call__(self, text: str) -> Samples:
        if self.cache is None:
            return self.utterance(text).wave
        digest = hashlib.sha256(f"{self.voice}|{text}".encode()).hexdigest()
        file = self.cache / digest[:2] / f"{digest[2:]}.npy"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(f".{os.getpid()}.part")
            with partial.open("wb") as out:
                np.save(out, (utterance(self.voice, text).wave * 32_767).astype(np.int16))
            partial.replace(file)
        levels: npt.NDArray[np.int16] = np.load(file)
        return levels.astype(np.float32) / np.float32(32_768)

    def utterance(self, text: str) -> Utterance:
        """Samples and phonemes. Raises: ModelError if the engine fails."""
        if text not in self.kept:
            self.kept[text] = utterance(self.voice, text)
            total = sum(one.wave.nbytes for one in self.kept.values())
            while total > self.kept_bytes and len(self.kept) > 1:
                total -= self.kept.popitem(last=False)[1].wave.nbytes
        self.kept.move_to_end(text)
        return self.kept[text]

    def with_memory(self, n_bytes: int) -> "EngineVoice":
        """The same voice with an empty memory of `n_bytes` for utterances."""
        return replace(self, kept_bytes=n_bytes, kept=OrderedDict())


def utterance(voice: SpeechVoice, text: str) -> Utterance:
    """A text in a voice. Raises: ModelError if the engine fails."""
    return utterances(voice, [text])[0]


def utterances(voice: SpeechVoice, texts: list[str]) -> list[Utterance]:
    """Texts in a voice with one call of its engine, if that takes several. Raises: ModelError if the engine fails."""
    return [_trimmed(spoken.wave, spoken.segments) for spoken in speak(voice, texts)]


def engine_voices(cache: Path | None = None) -> tuple[EngineVoice, ...]:
    """All voices of training at several tempos. The speaker kal is in none of them."""
    return tuple(EngineVoice(replace(one, speed=one.speed * tempo), cache) for one in VOICES for tempo in TEMPOS)


def training_voices() -> tuple[EngineVoice, ...]:
    """Those of `engine_voices` and more speakers: hearing needs many, and espeak-ng is quick."""
    more = [
        SpeechVoice(f"{accent}-{variant}", "espeak-ng", f"{accent}+{variant}", 0.0, words_per_minute=words)
        for accent in ACCENTS
        for variant, words in VARIANTS
    ]
    return engine_voices() + tuple(EngineVoice(replace(one, speed=tempo)) for one in (*more, KED) for tempo in TEMPOS)


def draw_voice(rng: random.Random, voices: tuple[EngineVoice, ...]) -> EngineVoice:
    """One of the voices, by the shares of their engines."""
    (engine,) = rng.choices(list(ENGINE_SHARES), list(ENGINE_SHARES.values()))
    return rng.choice([one for one in voices if one.voice.engine == engine])


def _trimmed(samples: npt.NDArray[np.int16], segments: list[Segment]) -> Utterance:
    wave: Samples = soxr.resample(samples.astype(np.float32) / 32_768, ENGINE_RATE, RATE, quality="HQ")
    loud = np.flatnonzero(np.abs(wave) > AUDIBLE * np.abs(wave).max())
    first, last = int(loud[0]), int(loud[-1])
    phones = np.array([PHONES.index(one.phone) for one in segments], np.int64)
    ends = np.array([one.end for one in segments], np.float64) - first / RATE
    return Utterance(wave[first : last + 1], phones, ends)
