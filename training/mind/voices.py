"""The person's voices from the engines of `training.speech`, as functions from text to samples.

An utterance is kept in a folder if there is one, because starting an engine takes longer than most sentences.
"""

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soxr

from training.speech.voices import RATE as ENGINE_RATE
from training.speech.voices import VOICES, SpeechVoice, speak
from training.timelines.speech import RATE, Samples

TEMPOS = (0.87, 0.94, 1.0, 1.07, 1.14)  # of each voice; pitch follows
AUDIBLE = 0.02  # of the peak: quieter ends are silence


@dataclass(frozen=True)
class EngineVoice:
    """A voice at a tempo. cache: folder of finished utterances, which processes may share; None keeps nothing."""

    voice: SpeechVoice
    cache: Path | None = None

    def __call__(self, text: str) -> Samples:
        if self.cache is None:
            return utterance(self.voice, text)
        digest = hashlib.sha256(f"{self.voice}|{text}".encode()).hexdigest()
        file = self.cache / digest[:2] / f"{digest[2:]}.npy"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(f".{os.getpid()}.part")
            with partial.open("wb") as out:
                np.save(out, (utterance(self.voice, text) * 32_767).astype(np.int16))
            partial.replace(file)
        levels: npt.NDArray[np.int16] = np.load(file)
        return levels.astype(np.float32) / np.float32(32_768)


def utterance(voice: SpeechVoice, text: str) -> Samples:
    """[n] samples at 16 kHz without silence at the ends. Raises: ModelError if the engine fails."""
    (spoken,) = speak(voice, [text])
    wave: Samples = soxr.resample(spoken.wave.astype(np.float32) / 32_768, ENGINE_RATE, RATE, quality="HQ")
    loud = np.flatnonzero(np.abs(wave) > AUDIBLE * np.abs(wave).max())
    return wave[loud[0] : loud[-1] + 1]


def engine_voices(cache: Path | None = None) -> tuple[EngineVoice, ...]:
    """All voices of training at several tempos. The speaker kal is in none of them."""
    return tuple(EngineVoice(replace(one, speed=one.speed * tempo), cache) for one in VOICES for tempo in TEMPOS)
