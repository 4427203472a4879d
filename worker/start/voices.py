"""Reference sounds: what the language model hears of one, and the voice that is made from it.

Knows sound files, the networks that prepare voices and the folder where voices are kept. Does not know sessions.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from models.inputs.audio_sizes import SAMPLE_RATE
from models.token2wav.load.flow_yaml import load_flow_config
from models.token2wav.load.parts import FLOW_YAML, load_voice_parts
from models.token2wav.prompt.features import resample
from models.token2wav.prompt.sound_file import read_sound
from models.token2wav.voice.maker_digest import maker_digest
from models.token2wav.voice.voice import Voice
from models.token2wav.voice.voice_cache import VoiceCache
from models.token2wav.voice.voice_maker import VoiceMaker


@dataclass(frozen=True, eq=False)
class ReferenceSound:
    """0.5 to 30 s of somebody's voice. samples: [channels, n] float32 in [-1, 1]. rate: Hz."""

    samples: torch.Tensor
    rate: int

    @classmethod
    def read(cls, path: str | Path) -> "ReferenceSound":
        """Raises: AudioError as `read_sound`."""
        return cls(*read_sound(path))

    def heard(self) -> np.ndarray:
        """[n] float32 at 16 kHz, the mean of all channels."""
        return resample(self.samples.mean(0), self.rate, SAMPLE_RATE).numpy()


class Voices:
    """Voices for one vocoder.

    problem: why the voice asked for last is not kept; None if it is, or was not meant to be.
    """

    def __init__(self, folder: Path, *, device: torch.device | str = "cpu", cache: Path | None = None):
        """
        Args:
            folder: the vocoder's.
            device: of the networks that make voices; voices themselves are on the CPU.
            cache: folder where voices are kept, made if missing; None keeps none.
        Raises: CheckpointError, ConfigError for files that do not fit.
        """
        self._folder, self._device = folder, device
        self._config = load_flow_config(folder / FLOW_YAML)
        self._cache = cache and VoiceCache(cache, maker_digest(folder, self._config.n_mels, cache))
        self._maker: VoiceMaker | None = None
        self.problem: str | None = None

    def of(self, sound: ReferenceSound) -> Voice:
        """The voice that speaks like this. Raises: AudioError; CheckpointError when the networks are first needed."""
        if self._cache is None:
            return self._make(sound.samples, sound.rate)
        voice = self._cache.get_or_make(sound.samples, sound.rate, self._make)
        self.problem = self._cache.problem
        return voice

    def _make(self, wave: torch.Tensor, rate: int) -> Voice:
        # Half a gigabyte, for nothing if the voice is kept already.
        if self._maker is None:
            self._maker = VoiceMaker(load_voice_parts(self._folder, device=self._device), self._config)
        return self._maker.make(wave, rate)
