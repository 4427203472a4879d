"""Reference sounds: mixing and resampling, lazy loading of the voice networks, and the default voice file."""

import threading
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from assets.build_ref_audio import synthesize
from models.checkpoint.embedded import TINY
from models.errors import AudioError
from models.token2wav.voice.voice_regions import VoiceRegions
from tests.models.compare import assert_close
from tests.models.token2wav.prompt.prompt_sounds import prompt
from worker.config.compile import CompileConfig
from worker.offline.options import DEFAULT_SOUND, ROOT
from worker.start import voices


def test_networks_are_loaded_for_the_first_voice(monkeypatch) -> None:
    loads = []
    load = voices.load_voice_parts
    monkeypatch.setattr(voices, "load_voice_parts", lambda *args, **named: loads.append(args) or load(*args, **named))
    cache = voices.Voices(ROOT / TINY / "assets" / "token2wav")
    assert not loads, "expected no networks loaded before the first voice"
    first, again = (cache.of(voices.ReferenceSound.read(DEFAULT_SOUND)) for _ in range(2))
    assert len(loads) == 1 and first.digest == again.digest


def test_mixes_all_channels_for_the_language_model(tmp_path: Path) -> None:
    left, right = np.zeros((2, 24_000), np.float32)
    left[:], right[:12_000] = 0.25, 0.5
    soundfile.write(tmp_path / "two.wav", np.stack([left, right], axis=1), 24_000, subtype="FLOAT")
    mixed = voices.ReferenceSound.read(tmp_path / "two.wav").audio_16k()
    assert (mixed.dtype, len(mixed)) == (np.float32, 16_000)
    np.testing.assert_allclose(mixed[[4000, 12_000]], [0.375, 0.125], atol=1e-3)


def test_default_voice_equals_its_scripts_output() -> None:
    assert DEFAULT_SOUND.stat().st_size <= 100_000
    with wave.open(str(DEFAULT_SOUND)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        committed = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(int)
    built = np.round(synthesize() * 32767).astype(int)
    assert committed.shape == built.shape
    off = int(abs(committed - built).max())
    assert off <= 1, f"expected the same samples but for rounding, got {off} steps apart"


def test_compiled_networks_are_ready_before_the_first_voice_and_keep_their_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler itself is left out: `tests/models/token2wav/voice/test_voice_regions.py` has it."""
    threads: list[str] = []
    run = VoiceRegions.uncaptured

    def noted(regions: VoiceRegions, name: str, *given: Any, **static: Any) -> Any:
        threads.append(threading.current_thread().name)
        return run(regions, name, *given, **static)

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(VoiceRegions, "compile", lambda _, **options: asked.append(options))
    monkeypatch.setattr(VoiceRegions, "uncaptured", noted)
    compiling = CompileConfig(enabled=True, voices=True, mode="max-autotune", dynamic=False)
    folder = ROOT / TINY / "assets" / "token2wav"
    made = voices.Voices(folder, compile=compiling)
    assert asked == [{"by_layer": True, "mode": "max-autotune", "dynamic": False}]
    assert len(threads) == 6, f"expected every bucket of both networks, got {len(threads)} runs"
    sound = voices.ReferenceSound(torch.from_numpy(prompt(0.6, 16_000)), 16_000)
    assert_close(made.of(sound).speaker, voices.Voices(folder).of(sound).speaker, 1e-4)
    assert len(threads) == 8 and len(set(threads)) == 1 and threads[0] != threading.current_thread().name
    with pytest.raises(AudioError):
        made.of(voices.ReferenceSound(torch.zeros(1, 10), 16_000))
