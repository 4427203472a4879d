"""The registry of reference voices: uploaded ones, which can be added and deleted, and those that come with the server.

Contains files only; `sound_upload` decodes uploads. Safe to call from any thread and any number of processes. The index
is replaced atomically, and changes are made under a file lock.
"""

import io
import json
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import numpy as np
import soundfile
from filelock import FileLock, Timeout

from models.atomic_file import write_atomically
from models.errors import AudioError, ModelError
from server.registry.reference_sound import duration_of
from worker.config.service import ROOT
from worker.protocol.speech_messages import VoiceRate
from worker.voice_registry import INDEX, MAX_NAME, RegisteredVoice, VoiceFolder, prepared_files

LOG = logging.getLogger(__name__)
BUILTIN = ROOT / "assets" / "ref_audio"
MAX_VOICES = 200
LOCK_NAME, LOCK_S = "registry.lock", 10.0


class VoiceNameError(ModelError, ValueError):
    """A name is unfit, or another voice has it."""


class UnknownVoiceError(ModelError, LookupError):
    """No voice has this id."""


class ReadOnlyVoiceError(ModelError, ValueError):
    """The voice comes with the server and cannot be deleted."""


class TooManyVoicesError(ModelError, ValueError):
    """The registry is full."""


class RegistryBusyError(ModelError, RuntimeError):
    """Another process keeps the registry locked."""


class VoiceRegistry:
    """Voices in a folder, created on the first upload.

    Args:
        folder: of uploaded voices.
        builtin: folder of the voices that come with the server.
    """

    def __init__(self, folder: Path, builtin: Path = BUILTIN):
        self._folder, self._builtin = folder, builtin
        self._reported: set[str] = set()

    def all(self) -> list[RegisteredVoice]:
        """The voices of the server, then uploaded ones, oldest first. Each damaged entry is logged once."""
        return [*self._builtin_voices(), *self._uploaded().voices]

    def find(self, voice_id: str) -> RegisteredVoice:
        """The voice with this id. Raises: UnknownVoiceError."""
        voice = next((voice for voice in self.all() if voice.id == voice_id), None)
        if voice is None:
            raise UnknownVoiceError("voice", expected="the id of a registered voice", got=voice_id[:60])
        return voice

    def file_of(self, voice: RegisteredVoice) -> Path:
        return (self._builtin if voice.source_type == "builtin" else self._folder) / voice.filename

    def add(self, name: str, samples: np.ndarray, transcript: str = "", *, rate: VoiceRate = 16_000) -> RegisteredVoice:
        """Store a voice.

        Args:
            samples: [n] float32 in [-1, 1].
            name: what clients call it.
            transcript: what is said; "" if it is unknown.
            rate: of the samples, Hz.
        Raises: VoiceNameError, TooManyVoicesError, RegistryBusyError; OSError if the files cannot be written.
        """
        name = checked_name(name)
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            voices = self._uploaded().voices
            if len(voices) >= MAX_VOICES:
                raise TooManyVoicesError("voices", expected=f"at most {MAX_VOICES}", got=len(voices) + 1)
            if any(voice.answers_to(name) for voice in [*self._builtin_voices(), *voices]):
                raise VoiceNameError("name", expected="a name that no other voice has", got=repr(name))
            voice_id = str(uuid.uuid4())
            voice = RegisteredVoice(
                id=voice_id,
                name=name,
                filename=f"{voice_id}.wav",
                duration_ms=len(samples) * 1000 // rate,
                sample_rate=rate,
                created_at=datetime.now().isoformat(),
                transcript=transcript,
            )
            write_atomically(self.file_of(voice), _wav(samples, rate, title=name))
            self._write_index([*voices, voice])
        return voice

    def delete(self, voice_id: str) -> RegisteredVoice:
        """Delete an uploaded voice. Sessions that use it continue.

        Raises: UnknownVoiceError, ReadOnlyVoiceError, RegistryBusyError; OSError.
        """
        if self.find(voice_id).source_type == "builtin":
            raise ReadOnlyVoiceError(
                "voice", expected="an uploaded voice", got=f"{voice_id}, which comes with the server"
            )
        with self._locked():
            voice = self.find(voice_id)  # another process may have deleted it
            # The sound first: a worker that keeps a prepared voice afterwards sees that it is gone.
            self.file_of(voice).unlink(missing_ok=True)
            for file in prepared_files(self._folder, voice_id):
                file.unlink(missing_ok=True)
            self._write_index([other for other in self._uploaded().voices if other.id != voice_id])
        return voice

    def _uploaded(self) -> VoiceFolder:
        found = VoiceFolder.read(self._folder)
        for problem in found.problems:
            if problem not in self._reported:
                self._reported.add(problem)
                LOG.warning("voice registry: %s", problem)
        return found

    def _builtin_voices(self) -> list[RegisteredVoice]:
        voices = []
        for file in sorted(self._builtin.glob("*.wav")):
            try:
                seconds = duration_of(file)
            except AudioError as error:
                LOG.warning("voice registry: %s", error)
                continue
            created = datetime.fromtimestamp(file.stat().st_mtime).isoformat()
            voices.append(
                RegisteredVoice(
                    id=file.stem,
                    name=file.stem,
                    filename=file.name,
                    source_type="builtin",
                    duration_ms=round(seconds * 1000),
                    created_at=created,
                )
            )
        return voices

    def _write_index(self, voices: list[RegisteredVoice]) -> None:
        entries = {"ref_audios": [voice.model_dump() for voice in voices]}
        write_atomically(self._folder / INDEX, json.dumps(entries, ensure_ascii=False, indent=1).encode())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self._folder / LOCK_NAME, timeout=LOCK_S)
        try:
            lock.acquire()
        except Timeout:
            raise RegistryBusyError("voice registry", expected=f"its lock within {LOCK_S:.0f} s", got="none") from None
        try:
            yield
        finally:
            lock.release()


def checked_name(name: str) -> str:
    """The name without white space around it. Raises: VoiceNameError."""
    name = name.strip()
    if not 0 < len(name) <= MAX_NAME:
        raise VoiceNameError("name", expected=f"1 to {MAX_NAME} characters", got=len(name))
    if not name.isprintable() or "/" in name or "\\" in name:
        raise VoiceNameError("name", expected="printable characters without / and \\", got=ascii(name))
    return name


def _wav(samples: np.ndarray, rate: int, title: str) -> bytes:
    """A mono PCM16 file with the title in its header."""
    data = io.BytesIO()
    with soundfile.SoundFile(data, "w", rate, 1, "PCM_16", format="WAV") as sound:
        sound.title = title
        sound.write(np.clip(samples, -1, 1))
    return data.getvalue()
