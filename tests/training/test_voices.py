"""Voices of the person: trimmed speech at 16 kHz, kept in a folder; the speaker kal is never used."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from training.mind import voices
from training.speech.voices import VOICES
from training.timelines.speech import RATE

FLITE = next(one for one in VOICES if one.engine == "flite")


def test_the_speaker_kal_stays_unseen() -> None:
    used = voices.engine_voices()
    assert len(used) == len(voices.TEMPOS) * len(VOICES)
    assert not [one for one in used if "kal" in one.voice.voice]


@pytest.mark.skipif(shutil.which("flite") is None, reason="needs flite")
def test_speech_is_trimmed_and_follows_the_tempo() -> None:
    usual, quick = (voices.utterance(replace(FLITE, speed=speed), "what color is this") for speed in (1.0, 1.25))
    peak = np.abs(usual).max()
    assert usual.dtype == np.float32 and 0.5 < len(usual) / RATE < 2.5
    assert min(abs(usual[0]), abs(usual[-1])) > 0.9 * voices.AUDIBLE * peak
    assert len(quick) == pytest.approx(len(usual) / 1.25, rel=0.05)


def test_an_utterance_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def utterance(_: object, text: str) -> np.ndarray:
        made.append(text)
        return np.linspace(-0.5, 0.5, 800, dtype=np.float32)

    monkeypatch.setattr(voices, "utterance", utterance)
    voice = voices.EngineVoice(FLITE, tmp_path)
    first, again = voice("hello"), voice("hello")
    assert made == ["hello"]
    assert np.array_equal(first, again)
    assert np.abs(first - np.linspace(-0.5, 0.5, 800)).max() < 1e-3
    assert len(list(tmp_path.rglob("*.npy"))) == 1
