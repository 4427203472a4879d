"""Prepared voices on disk, found by the content of their sound.

Knows files, digests and how much room there is. Does not know how a voice is made.

One safetensors file per voice, named by a digest of samples, rate and maker. A file counts only if the seal inside
fits its name and its content; anything else is made anew and replaced. Files appear whole, so writers and readers
need no lock: at worst two make the same voice. When the folder is full, the files not asked for the longest go.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from models.atomic_file import PENDING, write_atomically
from models.errors import SettingsError
from models.token2wav.prompt.prompt_sound import check_prompt
from models.token2wav.voice.voice import Voice

MAX_BYTES = 256_000_000  # about 500 voices of 30 s
SUFFIX = ".safetensors"
_OURS = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}")
_DTYPES = {"codes": torch.int64, "mel": torch.float32, "speaker": torch.float32}  # by name in the file
_SEAL = "seal"
_ABANDONED_S = 3600.0  # a file still being written after that long never will be


class VoiceCache:
    """A folder of voices, which is made when the first one is stored. Several processes may share it.

    `problem` says why the voice asked for last is not on disk; None if it is.
    """

    def __init__(self, folder: str | Path, maker_digest: str, *, max_bytes: int = MAX_BYTES):
        """
        Args:
            maker_digest: changes whenever the same sound would become another voice; see `maker_digest`.
            max_bytes: of all voices in the folder, whoever made them.
        Raises: SettingsError.
        """
        if max_bytes < 1:
            raise SettingsError("voice cache: max_bytes", expected="at least 1", got=max_bytes)
        self.folder, self.maker_digest, self.max_bytes = Path(folder), maker_digest, max_bytes
        self.problem: str | None = None

    def get_or_make(self, wave: object, rate: int, make: Callable[[Tensor, int], Voice]) -> Voice:
        """The voice of this sound: from disk, or by `make(wave, rate)` and from then on from disk.

        A folder that cannot be read or written, and a full disk, cost time only; then `problem` tells.
        Args: wave, rate: see `check_prompt`; `make` gets [channels, n] float32.
        Raises: AudioError; what `make` raises.
        """
        wave = check_prompt(wave, rate)
        rate = int(rate)
        key = self._key(wave, rate)
        path = self.folder / f"{key}{SUFFIX}"
        self.problem = None
        voice = self._load(path, key)
        if voice is None:
            voice = make(wave, rate)
            self._store(path, key, voice)
        return voice

    def _key(self, wave: Tensor, rate: int) -> str:
        data = hashlib.sha256(f"{self.maker_digest} {rate} {tuple(wave.shape)} ".encode())
        data.update(wave.numpy())
        return data.hexdigest()

    def _load(self, path: Path, key: str) -> Voice | None:
        """The voice of a file that is what it says it is."""
        try:
            if not path.is_file() or path.stat().st_size > self.max_bytes:
                return None
            # Not mapped: the pages of a file that somebody cuts short would end the process.
            tensors = load(path.read_bytes())
            seal = tensors.pop(_SEAL)
            if {name: tensor.dtype for name, tensor in tensors.items()} != _DTYPES:
                return None
            voice = Voice(tensors["codes"], tensors["mel"], tensors["speaker"])
            if not torch.equal(seal, _seal(key, voice)):
                return None
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError):
            return None  # a damaged or foreign file: its header may promise anything
        try:
            os.utime(path)  # asked for just now
        except OSError:
            return voice  # others may only read
        return voice

    def _store(self, path: Path, key: str, voice: Voice) -> None:
        tensors = {"codes": voice.speech_tokens, "mel": voice.mel, "speaker": voice.speaker, _SEAL: _seal(key, voice)}
        data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        if len(data) > self.max_bytes:
            self.problem = f"a voice of {len(data)} bytes, where all together may have {self.max_bytes}"
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
            self._make_room(path)
        except OSError as error:
            self.problem = f"{self.folder}: {error.strerror}"

    def _make_room(self, newest: Path) -> None:
        """Remove what was not asked for the longest, never `newest`, and nothing that is not ours."""
        voices, now = [], time.time()
        for entry in os.scandir(self.folder):
            abandoned = entry.name.endswith(PENDING) and _OURS.match(entry.name[1:])
            if not abandoned and not _OURS.fullmatch(entry.name):
                continue
            try:
                stat = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # somebody else made room
            if not abandoned:
                voices.append((stat.st_mtime_ns, entry.name, stat.st_size))
            elif now - stat.st_mtime > _ABANDONED_S:
                Path(entry.path).unlink(missing_ok=True)
        n_bytes = sum(size for _, _, size in voices)
        for _, name, size in sorted(voices):
            if n_bytes <= self.max_bytes:
                return
            if name != newest.name:
                (self.folder / name).unlink(missing_ok=True)
                n_bytes -= size


def _seal(key: str, voice: Voice) -> Tensor:
    """[32] uint8: this content under this name."""
    return torch.tensor(list(hashlib.sha256(f"{key} {voice.digest}".encode()).digest()), dtype=torch.uint8)
