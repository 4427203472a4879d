"""Voices made from clients' reference sounds, with the latest kept in memory. Safe to call from any thread."""

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from models.inputs.audio_sizes import SAMPLE_RATE
from models.token2wav.voice.voice import Voice
from worker.start.voices import ReferenceSound, Voices

MAX_KEPT = 16


@dataclass(frozen=True)
class Reference:
    """A reference sound and its voice. audio_16k: [n] float32 at 16 kHz. voice: None without a vocoder."""

    audio_16k: np.ndarray
    voice: Voice | None


class VoiceShelf:
    """Reference sounds by content, least recently used dropped first. voices: None for a checkpoint without speech."""

    def __init__(self, voices: Voices | None):
        self._voices = voices
        self._kept: OrderedDict[str, Reference] = OrderedDict()
        self._lock = threading.Lock()  # the networks make one voice at a time

    def of_file(self, path: Path) -> Reference:
        """The reference of a sound file. Raises: AudioError for an unfit file; CheckpointError."""
        return self._of(ReferenceSound.read(path))

    def of_samples(self, samples: np.ndarray) -> Reference:
        """The reference of samples, [n] float32 at 16 kHz. Raises: as `of_file`."""
        return self._of(ReferenceSound(torch.from_numpy(samples)[None], SAMPLE_RATE))

    def _of(self, sound: ReferenceSound) -> Reference:
        digest = hashlib.sha256(repr((sound.rate, sound.samples.shape)).encode() + sound.samples.numpy().tobytes())
        key = digest.hexdigest()
        with self._lock:
            if key not in self._kept:
                voice = None if self._voices is None else self._voices.of(sound)
                self._kept[key] = Reference(sound.audio_16k(), voice)
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]
