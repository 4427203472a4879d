"""The folder of registered voices as a worker reads it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from models.errors import SettingsError
from server.registry.voices import VoiceRegistry
from worker import voice_registry
from worker.config.json_file import read_json
from worker.voice_registry import INDEX, VoiceFolder, voice_file

SECOND = np.full(16_000, 0.1, np.float32)


@pytest.fixture
def builtin(tmp_path: Path) -> Path:
    folder = tmp_path / "builtin"
    folder.mkdir()
    for name in ("default.wav", "high.wav"):
        soundfile.write(folder / name, SECOND, 16_000)
    return folder


@pytest.fixture
def registered(tmp_path: Path, builtin: Path) -> Path:
    return tmp_path / "registered"


@pytest.mark.parametrize("named", ["high.wav", "high", "assets/ref_audio/high.wav", "C:\\voices\\high.wav"])
def test_builtin_voice_is_found_by_file_name(named: str, builtin: Path, registered: Path) -> None:
    assert voice_file(named, builtin, registered) == builtin / "high.wav"


def test_foreign_voice_is_the_default_one(builtin: Path, registered: Path) -> None:
    got = voice_file("assets/ref_audio/ref_minicpm_signature.wav", builtin, registered)
    assert got == builtin / "default.wav"


def test_registered_voice_is_found_by_name_id_and_file_name(builtin: Path, registered: Path) -> None:
    voice = VoiceRegistry(registered, builtin).add("小明 (calm)", SECOND)
    for named in (voice.name, voice.id, voice.filename, f"data/assets/ref_audio/{voice.filename}"):
        assert voice_file(named, builtin, registered) == registered / voice.filename, named


@pytest.mark.parametrize(
    "named", ["", ".", "..", "/etc/passwd", "../secret.wav", "registry.json", "*", "secret.wav", "\x00", "x" * 10_000]
)
def test_other_names_open_no_file(named: str, tmp_path: Path, builtin: Path, registered: Path) -> None:
    soundfile.write(tmp_path / "secret.wav", SECOND, 16_000)
    VoiceRegistry(registered, builtin).add("known", SECOND)
    with pytest.raises(SettingsError, match=r"expected one of \['default.wav', 'high.wav', 'known'\]") as refused:
        voice_file(named, builtin, registered)
    assert len(str(refused.value)) < 400


def test_index_cannot_name_other_files(tmp_path: Path, builtin: Path, registered: Path) -> None:
    voice = VoiceRegistry(registered, builtin).add("known", SECOND)
    soundfile.write(tmp_path / "secret.wav", SECOND, 16_000)
    index = registered / INDEX
    entry = json.loads(index.read_text())["ref_audios"][0]
    for change in ({"id": "../secret", "filename": "../secret.wav"}, {"filename": "../secret.wav"}, {"name": ""}):
        index.write_text(json.dumps({"ref_audios": [{**entry, **change, "name": change.get("name", "other")}]}))
        folder = VoiceFolder.read(registered)
        assert [one.filename for one in folder.voices] == [voice.filename], change
        assert len(folder.problems) == 1 and folder.find("other") is None, folder.problems


def test_second_entry_of_a_file_is_left_out(builtin: Path, registered: Path) -> None:
    voice = VoiceRegistry(registered, builtin).add("known", SECOND)
    index = registered / INDEX
    entry = json.loads(index.read_text())["ref_audios"][0]
    index.write_text(json.dumps({"ref_audios": [entry, {**entry, "name": "other"}]}))
    folder = VoiceFolder.read(registered)
    assert folder.voices == [voice] and len(folder.problems) == 1, folder


def test_link_is_no_voice(tmp_path: Path, builtin: Path, registered: Path) -> None:
    voice = VoiceRegistry(registered, builtin).add("known", SECOND)
    soundfile.write(tmp_path / "secret.wav", SECOND, 16_000)
    (registered / voice.filename).unlink()
    (registered / voice.filename).symlink_to(tmp_path / "secret.wav")
    folder = VoiceFolder.read(registered)
    assert not folder.voices and "no file" in folder.problems[0], folder


def test_missing_folder_has_no_voices(tmp_path: Path) -> None:
    assert VoiceFolder.read(tmp_path / "none") == VoiceFolder()


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("before", ["its size", "its header"])
def test_file_deleted_after_it_was_listed_is_absent(
    before: str, indexed: bool, builtin: Path, registered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process deletes a file while this one reads the folder."""
    registry = VoiceRegistry(registered, builtin)
    kept, deleted = registry.add("kept", SECOND), registered / registry.add("deleted", SECOND).filename
    if not indexed:
        (registered / INDEX).unlink()
    size_of = voice_registry._size

    def size_and_delete(file: Path) -> int | None:
        if file == deleted and before == "its size":
            deleted.unlink()
        size = size_of(file)
        if file == deleted and before == "its header":
            deleted.unlink()
        return size

    monkeypatch.setattr(voice_registry, "_size", size_and_delete)
    found = VoiceFolder.read(registered)
    assert not found.problems and not deleted.exists(), found
    # An entry is enough to list a voice; its header is not read.
    assert [voice.name for voice in found.voices if voice.filename != deleted.name] == [kept.name]
    assert (len(found.voices) == 2) == (indexed and before == "its header")


def test_index_deleted_after_it_was_found_is_absent(
    builtin: Path, registered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    voice = VoiceRegistry(registered, builtin).add("known", SECOND)

    def delete_and_read(index: Path) -> dict[str, Any]:
        index.unlink()
        return read_json(index)

    monkeypatch.setattr(voice_registry, "read_json", delete_and_read)
    found = VoiceFolder.read(registered)
    assert [one.name for one in found.voices] == [voice.name] and not found.problems, found


def test_voice_added_after_the_files_were_listed_is_found(
    builtin: Path, registered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = VoiceRegistry(registered, builtin)
    registry.add("old", SECOND)

    def add_and_read(index: Path) -> dict[str, Any]:
        monkeypatch.undo()
        registry.add("new", SECOND)
        return read_json(index)

    monkeypatch.setattr(voice_registry, "read_json", add_and_read)
    found = VoiceFolder.read(registered)
    assert [one.name for one in found.voices] == ["old", "new"] and not found.problems, found
