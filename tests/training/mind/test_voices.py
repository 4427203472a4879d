"""Voices of the person: trimmed speech at 16 kHz, kept in memory; the speaker kal is never used."""

import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.errors import ModelError
from training.mind import voices
from training.speech import voices as engines
from training.speech.corpus import NO_PHONE, PHONES
from training.speech.festival import Festival
from training.speech.voices import TARGET, VOICES
from training.timelines.speech import RATE

VOWELS = ("ih", "ae")
KED_FOLDER = Path("/usr/share/festival/voices/english/ked_diphone")
TARGET_VOICE = next(one for one in VOICES if one.name == TARGET)
FLITE = next(one for one in VOICES if one.engine == "flite")


def test_the_speaker_kal_stays_unseen() -> None:
    used = voices.engine_voices()
    assert len(used) == len(voices.TEMPOS) * len(VOICES)
    more = voices.training_voices()
    assert set(used) < set(more) and len({one.voice.voice for one in more}) > 2 * len({one.voice.voice for one in used})
    assert not [one for one in more if "kal" in one.voice.voice]


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng")
def test_more_speakers_differ() -> None:
    more = [
        one
        for one in voices.training_voices()
        if one.voice.weight == 0 and one.voice.speed == 1 and one.voice.engine == "espeak-ng"
    ]
    assert len(more) == len(voices.ACCENTS) * len(voices.VARIANTS)
    waves = [voices.utterance(one.voice, "hello").wave for one in more]
    assert len({one.tobytes() for one in waves}) > 0.8 * len(waves)


@pytest.mark.skipif(not KED_FOLDER.exists(), reason="needs festvox-kdlpc16k")
def test_the_voice_of_diphones_has_phonemes() -> None:
    spoken = voices.utterance(voices.KED, "six cats")
    assert 0.4 < len(spoken.wave) / RATE < 2 and len(spoken.phones) > 6


@pytest.mark.skipif(shutil.which("flite") is None, reason="needs flite")
def test_speech_is_trimmed_and_follows_the_tempo() -> None:
    usual, quick = (voices.utterance(replace(FLITE, speed=speed), "what color is this").wave for speed in (1.0, 1.25))
    peak = np.abs(usual).max()
    assert usual.dtype == np.float32 and 0.5 < len(usual) / RATE < 2.5
    assert min(abs(usual[0]), abs(usual[-1])) > 0.9 * voices.AUDIBLE * peak
    assert len(quick) == pytest.approx(len(usual) / 1.25, rel=0.05)


@pytest.mark.skipif(shutil.which("flite") is None, reason="needs flite")
def test_phonemes_lie_where_their_sound_is() -> None:
    spoken = voices.utterance(FLITE, "six cats")
    times = np.arange(0, len(spoken.wave) / RATE, 0.01)
    names = [PHONES[phone] for phone in spoken.phones_at(times)]
    changes = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    assert changes[:5] == ["s", "ih", "k", "s", "k"]
    loudness = [float(np.square(spoken.wave[int(RATE * at) :][:160]).mean()) for at in times]
    vowels, others = ([one for one, name in zip(loudness, names, strict=True) if (name in VOWELS) is is_vowel]
                      for is_vowel in (True, False))  # fmt: skip
    assert np.median(vowels) > 4 * np.median(others)


def test_an_utterance_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def utterance(_: object, text: str) -> voices.Utterance:
        made.append(text)
        return voices.Utterance(np.zeros(800, np.float32), np.zeros(0, np.int64), np.zeros(0))

    monkeypatch.setattr(voices, "utterance", utterance)
    voice = voices.EngineVoice(FLITE).with_memory(3 * 800 * 4)
    for _ in range(2):
        assert len(voice("hello")) == 800
    assert made == ["hello"]
    assert voice.utterance("hello").phones_at(np.zeros(3)).tolist() == [NO_PHONE] * 3
    for text in ("one", "two", "hello", "three"):
        voice(text)
    assert list(voice.kept) == ["two", "hello", "three"], "expected the latest used"
    assert len(voice("one")) == 800 and made[-1] == "one" and made.count("hello") == 1
    assert not voice.with_memory(100).kept and len(voice.kept) == 3


def test_sound_is_kept_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wave = np.linspace(-0.5, 0.5, 800, dtype=np.float32)
    made: list[str] = []

    def utterance(_: object, text: str) -> voices.Utterance:
        made.append(text)
        return voices.Utterance(wave, np.zeros(0, np.int64), np.zeros(0))

    monkeypatch.setattr(voices, "utterance", utterance)
    for _ in range(2):
        assert np.abs(voices.EngineVoice(FLITE, tmp_path)("hello") - wave).max() < 1e-3
    assert made == ["hello"] and len(list(tmp_path.rglob("*.npy"))) == 1


def test_each_engine_has_its_share() -> None:
    rng, all_voices = random.Random(0), voices.engine_voices()
    drawn = Counter(voices.draw_voice(rng, all_voices).voice.engine for _ in range(2000))
    for engine, share in voices.ENGINE_SHARES.items():
        assert drawn[engine] / 2000 == pytest.approx(share, abs=0.05)


@pytest.mark.skipif(shutil.which("festival") is None, reason="needs festival")
def test_festival_goes_on_with_its_next_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_festivals", running := {})
    first = voices.utterance(TARGET_VOICE, "six cats")
    assert {PHONES[phone] for phone in first.phones.tolist()} >= {"s", "ih", "k", "ae", "t"}
    (process,) = running.values()
    (again,) = voices.utterances(TARGET_VOICE, ["six cats"])
    assert np.array_equal(first.wave, again.wave) and list(running.values()) == [process] and process.n_texts == 2
    process._process.kill()
    with pytest.raises(ModelError, match="expected a running process"):
        voices.utterance(TARGET_VOICE, "six cats")
    assert not running, "expected the next text to start another process"


@pytest.mark.skipif(shutil.which("festival") is None, reason="needs festival")
def test_festival_never_gives_another_voice_or_the_sound_of_the_text_before(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected the voice absent"):
        Festival(["festival"], "voice_absent")
    one = Festival(["festival"], TARGET_VOICE.voice)
    one.speak("six cats", tmp_path / "a.wav", tmp_path / "a.segs")
    one._tell("(define (utt.synth utt) (error 'none))")
    with pytest.raises(ModelError, match="none of 'five dogs'"):
        one.speak("five dogs", tmp_path / "b.wav", tmp_path / "b.segs")
    one.close()


def test_a_festival_that_does_not_start_is_told() -> None:
    with pytest.raises(ModelError, match="expected a running process"):
        Festival(["true"], "voice")


def test_festival_without_sound_is_told(tmp_path: Path) -> None:
    # Like festival after an error: it goes on, and there is no file.
    answers = "case $line in *current-voice*) echo kal;; *format*) echo done;; esac"
    command = ["sh", "-c", f"while read line; do {answers}; done"]
    with pytest.raises(ModelError, match="expected the voice slt"):
        Festival(command, "voice_slt")
    one = Festival(command, "voice_kal")
    with pytest.raises(ModelError, match="none of 'hello'"):
        one.speak("hello", tmp_path / "a.wav", tmp_path / "a.segs")
    one.close()
