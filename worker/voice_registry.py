"""Registered voices on disk: `<id>.wav` files, and `registry.json` with their names. Torch-free.

The gateway writes the folder, the workers of the same machine read it, and keep what they have made of a voice in
`prepared`. Each sound has its name in its own header too:
a damaged or lost index loses nothing.
"""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

import soundfile
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from models.errors import ConfigError, SettingsError
from worker.config.json_file import read_json
from worker.config.service import FOREIGN_VOICE, AudioSection
from worker.describe import shown
from worker.protocol.speech_messages import VoiceRate

INDEX = "registry.json"
PREPARED = "prepared"
MAX_NAME = 100
MAX_TRANSCRIPT = 4096  # characters
MAX_LISTED = 20  # names in an error
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_SAMPLE_BYTES = 2


def voice_folder(data_dir: Path) -> Path:
    """The folder of registered voices."""
    return data_dir / "assets" / "ref_audio"


def prepared_file(registered: Path, voice_id: str, checkpoint: str) -> Path:
    """Where the vector and the codes of a voice are kept for a checkpoint of the speech model."""
    return registered / PREPARED / f"{voice_id}.{checkpoint}.safetensors"


def prepared_files(registered: Path, voice_id: str) -> list[Path]:
    """What is kept of a voice for all checkpoints."""
    return sorted((registered / PREPARED).glob(f"{voice_id}.*"))


class RegisteredVoice(BaseModel):
    """One sound: mono PCM16. At 24 kHz; older ones at 16 kHz.

    created_at: local ISO time. source_type: builtin voices come with the server.
    transcript: what is said; "" if it is unknown.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    name: str = Field(min_length=1, max_length=MAX_NAME)
    filename: str
    source_type: Literal["upload", "builtin"] = "upload"
    duration_ms: int = Field(ge=0)
    sample_rate: VoiceRate = 16_000
    created_at: str
    transcript: str = Field("", max_length=MAX_TRANSCRIPT)

    def answers_to(self, named: str) -> bool:
        """Whether a client's `ref_audio_path` names this voice: by its name, id or file name."""
        return named in (self.name, self.id, self.filename)


@dataclass
class VoiceFolder:
    """What a folder contains. problems: a sentence for each entry or file that is left out."""

    voices: list[RegisteredVoice] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> "VoiceFolder":
        """The voices, oldest first. A folder that does not exist has none.

        Reading takes no lock: other processes may add and delete files meanwhile. A file deleted after it was listed
        is absent, and no problem.
        """
        found = cls()
        files = {file.stem: file for file in folder.glob("*.wav") if UUID.fullmatch(file.stem)}
        for entry in found._indexed(folder / INDEX):
            n_bytes, listed = _size(folder / entry.filename), files.pop(entry.id, None)
            if any(voice.id == entry.id for voice in found.voices):
                found.problems.append(f"{entry.filename}: expected one entry, got another")
            elif n_bytes is not None and n_bytes >= entry.duration_ms * (entry.sample_rate // 1000) * _SAMPLE_BYTES > 0:
                found.voices.append(entry)
            elif n_bytes is not None or listed is None or os.path.lexists(listed):
                got = "no file" if n_bytes is None else f"{n_bytes} bytes"
                found.problems.append(f"{entry.filename}: expected {entry.duration_ms} ms of sound, got {got}")
        for file in files.values():
            if _size(file) is not None:
                found._adopt(file)
        found.voices.sort(key=lambda voice: (voice.created_at, voice.id))
        return found

    def find(self, named: str) -> RegisteredVoice | None:
        """The voice that `named` means."""
        return next((voice for voice in self.voices if voice.answers_to(named)), None)

    def _indexed(self, index: Path) -> Iterator[RegisteredVoice]:
        if not index.exists():
            return
        try:
            entries = read_json(index).get("ref_audios")
        except ConfigError as error:
            if index.exists():
                self.problems.append(str(error))
            return
        if not isinstance(entries, list):
            self.problems.append(f"{index}: expected a list ref_audios, got {shown(entries)}")
            return
        for entry in entries:
            try:
                yield _entry(entry)
            except ValueError as error:
                self.problems.append(f"{index}: expected a voice, got {shown(entry)}: {str(error)[:200]}")

    def _adopt(self, file: Path) -> None:
        """Add a sound that the index does not contain."""
        try:
            with file.open("rb") as data, soundfile.SoundFile(data) as sound:
                name, n_samples, rate = sound.title, sound.frames, sound.samplerate
                modified = os.fstat(data.fileno()).st_mtime
        except FileNotFoundError:
            return
        except soundfile.LibsndfileError as error:
            self.problems.append(f"{file.name}: expected a sound file, got {error.error_string}")
            return
        if rate not in get_args(VoiceRate) or not n_samples:
            rates = " or ".join(map(str, get_args(VoiceRate)))
            self.problems.append(f"{file.name}: expected sound at {rates} Hz, got {n_samples} samples at {rate} Hz")
            return
        self.voices.append(
            RegisteredVoice(
                id=file.stem,
                name=name[:MAX_NAME] or file.stem,
                filename=file.name,
                duration_ms=n_samples * 1000 // rate,
                sample_rate=rate,
                created_at=datetime.fromtimestamp(modified).isoformat(),
            )
        )


def voice_file(named: str, builtin: Path, registered: Path) -> Path:
    """The file of the voice that a client names.

    A name is compared with the names that exist and never used as a path. Of a path only the last part counts.

    Args:
        named: `ref_audio_path` of a message.
        builtin: folder of the voices that come with the server, named by file name, with or without its suffix.
        registered: folder of registered voices, named by name, id or file name.
    Raises: SettingsError for an unknown name.
    """
    files = {path.name: path for path in sorted(builtin.glob("*")) if path.is_file()}
    name = named.replace("\\", "/").rpartition("/")[2]
    if name == FOREIGN_VOICE and name not in files:
        default = AudioSection().ref_audio_path  # clients of the public implementation name its voice
        assert default is not None
        name = default.name
    found = files.get(name) or files.get(f"{name}.wav")
    if found is not None:
        return found
    folder = VoiceFolder.read(registered)
    voice = folder.find(name)
    if voice is None:
        names = [*files, *(voice.name for voice in folder.voices)]
        listed = f"one of {names[:MAX_LISTED]}" + (f" and {len(names) - MAX_LISTED} more" * (len(names) > MAX_LISTED))
        raise SettingsError("ref_audio_path", expected=listed, got=named[:200])
    return registered / voice.filename


def _size(file: Path) -> int | None:
    """Bytes of a regular file; None for anything else, also a link, and where there is none."""
    try:
        found = file.lstat()
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _entry(given: Any) -> RegisteredVoice:
    """Raises: ValueError for anything but an entry of an uploaded voice."""
    try:
        voice = RegisteredVoice.model_validate(given)
    except ValidationError as error:
        raise ValueError(error.errors(include_url=False, include_context=False)[0]["msg"]) from None
    if not UUID.fullmatch(voice.id) or voice.filename != f"{voice.id}.wav" or voice.source_type != "upload":
        raise ValueError("id and filename do not belong to an uploaded voice")
    return voice
