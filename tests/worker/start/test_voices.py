"""Reference sounds: what is heard of them, when networks are loaded for a voice, and the one that comes with us."""

import wave
from pathlib import Path

import numpy as np
import soundfile

from assets.build_ref_audio import synthesize
from worker.offline.options import DEFAULT_SOUND, TINY
from worker.start import voices


def test_networks_are_loaded_for_the_first_voice(monkeypatch) -> None:
    loads = []
    load = voices.load_voice_parts
    monkeypatch.setattr(voices, "load_voice_parts", lambda *args, **named: loads.append(args) or load(*args, **named))
    desk = voices.Voices(TINY / "assets" / "token2wav")
    assert not loads, "expected nothing loaded before a voice is asked for"
    first, again = (desk.of(voices.ReferenceSound.read(DEFAULT_SOUND)) for _ in range(2))
    assert len(loads) == 1 and first.digest == again.digest


def test_mixes_all_channels_for_the_language_model(tmp_path: Path) -> None:
    left, right = np.zeros((2, 24_000), np.float32)
    left[:], right[:12_000] = 0.25, 0.5
    soundfile.write(tmp_path / "two.wav", np.stack([left, right], axis=1), 24_000, subtype="FLOAT")
    heard = voices.ReferenceSound.read(tmp_path / "two.wav").heard()
    assert (heard.dtype, len(heard)) == (np.float32, 16_000)
    np.testing.assert_allclose(heard[[4000, 12_000]], [0.375, 0.125], atol=1e-3)


def test_default_voice_equals_its_scripts_output() -> None:
    assert DEFAULT_SOUND.stat().st_size <= 100_000
    with wave.open(str(DEFAULT_SOUND)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        committed = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(int)
    built = np.round(synthesize() * 32767).astype(int)
    assert committed.shape == built.shape
    off = int(abs(committed - built).max())
    assert off <= 1, f"expected the same samples but for rounding, got {off} steps apart"
