"""The registry of reference voices: its files, limits, locks and damage."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile
from filelock import FileLock

from server.registry import voices
from server.registry.voices import (
    ReadOnlyVoiceError,
    RegistryBusyError,
    TooManyVoicesError,
    UnknownVoiceError,
    VoiceNameError,
    VoiceRegistry,
)
from worker.voice_registry import INDEX, UUID

SECOND = np.linspace(-0.5, 0.5, 16_000, dtype=np.float32)


@pytest.fixture
def registry(tmp_path: Path) -> VoiceRegistry:
    builtin = tmp_path / "builtin"
    builtin.mkdir()
    soundfile.write(builtin / "low.wav", SECOND, 16_000)
    return VoiceRegistry(tmp_path / "voices", builtin)


def again(registry: VoiceRegistry) -> VoiceRegistry:
    """The registry of a new process."""
    return VoiceRegistry(registry._folder, registry._builtin)


def uploaded(registry: VoiceRegistry) -> list[str]:
    return [voice.name for voice in registry.all() if voice.source_type == "upload"]


def test_voice_is_stored_as_pcm16_at_16_khz(registry: VoiceRegistry) -> None:
    voice = registry.add("  Ännchen ", SECOND)
    assert UUID.fullmatch(voice.id) and voice.filename == f"{voice.id}.wav" and voice.name == "Ännchen"
    assert (voice.duration_ms, voice.sample_rate, voice.source_type) == (1000, 16_000, "upload")
    with soundfile.SoundFile(registry.file_of(voice)) as sound:
        assert (sound.samplerate, sound.channels, sound.subtype) == (16_000, 1, "PCM_16")
        assert np.abs(sound.read(dtype="float32") - SECOND).max() < 1e-4
    assert again(registry).find(voice.id) == voice


def test_loud_samples_are_clipped(registry: VoiceRegistry) -> None:
    voice = registry.add("loud", SECOND * 10)
    samples, _ = soundfile.read(registry.file_of(voice))
    assert samples.min() == pytest.approx(-1, abs=1e-3) and samples.max() == pytest.approx(1, abs=1e-3)


def test_builtin_voices_are_listed_first_and_kept(registry: VoiceRegistry) -> None:
    registry.add("mine", SECOND)
    assert next((one.id, one.source_type) for one in registry.all()) == ("low", "builtin")
    with pytest.raises(ReadOnlyVoiceError, match="expected an uploaded voice, got low"):
        registry.delete("low")
    assert registry.find("low").duration_ms == 1000


def test_deleted_voice_is_gone(registry: VoiceRegistry) -> None:
    first, second = registry.add("first", SECOND), registry.add("second", SECOND)
    registry.delete(first.id)
    assert uploaded(again(registry)) == ["second"] and not registry.file_of(first).exists()
    for voice_id in (first.id, "../builtin/low", "", second.filename):
        with pytest.raises(UnknownVoiceError):
            registry.delete(voice_id)
    assert uploaded(registry) == ["second"]


@pytest.mark.parametrize(
    "name", ["", "   ", "x" * 101, "a/b", "a\\b", "a\nb", "\x00", "a\u202eb", "low", "low.wav", "mine"]
)
def test_unfit_names_are_refused(registry: VoiceRegistry, name: str) -> None:
    registry.add("mine", SECOND)
    with pytest.raises(VoiceNameError, match=r"name: expected .*, got"):
        registry.add(name, SECOND)
    assert uploaded(registry) == ["mine"] and len(list(registry._folder.glob("*.wav"))) == 1


def test_number_of_voices_is_limited(registry: VoiceRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voices, "MAX_VOICES", 2)
    for name in ("a", "b"):
        registry.add(name, SECOND)
    with pytest.raises(TooManyVoicesError, match="expected at most 2, got 3"):
        registry.add("c", SECOND)


def test_concurrent_changes_lose_nothing(registry: VoiceRegistry) -> None:
    extra = [registry.add(f"old {i}", SECOND) for i in range(4)]
    work = [lambda i=i: again(registry).add(f"new {i}", SECOND) for i in range(6)]
    work += [lambda voice=voice: again(registry).delete(voice.id) for voice in extra]
    with ThreadPoolExecutor(len(work)) as threads:
        for change in [threads.submit(one) for one in work]:
            change.result()
    assert sorted(uploaded(registry)) == [f"new {i}" for i in range(6)]
    assert len(json.loads((registry._folder / INDEX).read_text())["ref_audios"]) == 6


def test_locked_registry_is_reported(registry: VoiceRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    voice = registry.add("mine", SECOND)
    monkeypatch.setattr(voices, "LOCK_S", 0.05)
    with FileLock(registry._folder / voices.LOCK_NAME), pytest.raises(RegistryBusyError):
        registry.delete(voice.id)
    assert uploaded(registry) == ["mine"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"ref_audios": 3}', '{"ref_audios": [{"id": 1}]}', None])
def test_lost_index_keeps_voices_and_names(
    registry: VoiceRegistry, damage: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    voice = registry.add("Ännchen 小明", SECOND)
    index = registry._folder / INDEX
    index.unlink() if damage is None else index.write_text(damage)
    with caplog.at_level(logging.WARNING):
        found = again(registry)
        for _ in range(3):
            assert uploaded(found) == ["Ännchen 小明"]
    assert len(caplog.records) == (damage is not None), "expected one report of the damage"
    assert found.find(voice.id).duration_ms == 1000
    found.add("next", SECOND)
    assert uploaded(again(registry)) == ["Ännchen 小明", "next"]
    found.delete(voice.id)
    assert uploaded(again(registry)) == ["next"]


@pytest.mark.parametrize("indexed", [True, False])
def test_damaged_sound_is_left_out(registry: VoiceRegistry, indexed: bool, caplog: pytest.LogCaptureFixture) -> None:
    voice = registry.add("damaged", SECOND)
    registry.add("whole", SECOND)
    file = registry.file_of(voice)
    file.write_bytes(file.read_bytes()[:20])
    if not indexed:
        (registry._folder / INDEX).unlink()
    with caplog.at_level(logging.WARNING):
        assert uploaded(registry) == ["whole"]
    assert voice.filename in caplog.text
    assert uploaded(again(registry)) == ["whole"]


def test_interrupted_writes_leave_no_voice(registry: VoiceRegistry) -> None:
    registry.add("mine", SECOND)
    (registry._folder / ".x.wav.0011.tmp").write_bytes(b"RIFF")
    (registry._folder / "notes.wav").write_bytes(b"RIFF")
    assert uploaded(registry) == ["mine"]
