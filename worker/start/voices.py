"""Reference sounds: the samples for the language model, and the voice that is made from them.

Contains sound files, the networks that make voices and the folder of cached voices.
"""

from concurrent.futures import ThreadPoolExecutor
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
from worker.config.compile import CompileConfig


@dataclass(frozen=True, eq=False)
class ReferenceSound:
    """0.5 to 30 s of a speaker. samples: [channels, n] float32 in [-1, 1]. rate: Hz."""

    samples: torch.Tensor
    rate: int

    @classmethod
    def read(cls, path: str | Path) -> "ReferenceSound":
        """Raises: AudioError as `read_sound`."""
        return cls(*read_sound(path))

    def audio_16k(self) -> np.ndarray:
        """The input of the language model: [n] float32 at 16 kHz, the mean of all channels."""
        return resample(self.samples.mean(0), self.rate, SAMPLE_RATE).numpy()


class Voices:
    """Voices for one vocoder.

    problem: why the latest voice is not cached; None if it is, or if there is no cache folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device | str = "cpu",
        cache: Path | None = None,
        compile: CompileConfig | None = None,
    ):
        """
        Args:
            folder: the vocoder's.
            device: of the networks that make voices; voices themselves are on the CPU.
            cache: folder of cached voices, created if missing; None: no cache.
            compile: with `enabled` and `voices` true, the networks are loaded, compiled and captured now.

        Raises: CheckpointError, ConfigError for unfit files.
        """
        self._folder, self._device = folder, device
        self._config = load_flow_config(folder / FLOW_YAML)
        self._cache = VoiceCache(cache, maker_digest(folder, self._config.n_mels, cache)) if cache is not None else None
        self._maker: VoiceMaker | None = None
        self.problem: str | None = None
        self._thread: ThreadPoolExecutor | None = None  # compiled code and graphs belong to a thread
        if compile is not None and compile.enabled is True and compile.voices:
            self._thread = ThreadPoolExecutor(1, "voices")
            self._maker = self._thread.submit(self._compiled, compile).result()

    def of(self, sound: ReferenceSound) -> Voice:
        """The voice of a sound. Raises: AudioError; CheckpointError when the networks are first loaded."""
        if self._cache is None:
            return self._make(sound.samples, sound.rate)
        voice = self._cache.get_or_make(sound.samples, sound.rate, self._make)
        self.problem = self._cache.problem
        return voice

    def _make(self, wave: torch.Tensor, rate: int) -> Voice:
        if self._thread is not None and self._maker is not None:
            return self._thread.submit(self._maker.make, wave, rate).result()
        # The networks take half a gigabyte; a cached voice does not need them.
        if self._maker is None:
            self._maker = VoiceMaker(load_voice_parts(self._folder, device=self._device), self._config)
        return self._maker.make(wave, rate)

    def _compiled(self, config: CompileConfig) -> VoiceMaker:
        """The networks at their buckets, compiled, and captured on a GPU."""
        maker = VoiceMaker(load_voice_parts(self._folder, device=self._device), self._config, is_bucketed=True)
        assert maker.regions is not None
        captures = torch.device(self._device).type == "cuda" and config.cuda_graphs != "off"
        mode = "default" if captures else config.mode
        maker.regions.compile(by_layer=True, mode=mode, dynamic=config.dynamic)
        maker.regions.marks_steps = mode == "reduce-overhead"
        if captures:
            maker.regions.capture()
            maker.regions.seal()
        else:
            maker.regions.warm_up()
        return maker
