"""A cache of prepared voices on disk, keyed by the content of their sound.

Contains files, digests and the size limit. Does not contain the preparation of voices.

Each voice is one safetensors file, named by a digest of samples, rate and maker digest. A file is used only if the seal
inside matches its name and content; any other file is replaced. Files are written atomically, so writers and readers
need no lock; at worst two processes prepare the same voice. When the folder is full, the least recently used files are
removed.
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
_DTYPES = {"codes": torch.int64, "mel": torch.float32, "speaker": torch.float32}  # by the tensors' names in the file
_SEAL = "seal"
_ABANDONED_S = 3600.0  # a pending file of this age belongs to a process that died


class VoiceCache:
    """A folder of voices, created with the first one. Several processes may share it.

    Attributes:
        problem: reason why the voice of the last call is not on disk; None if it is.
    """

    def __init__(self, folder: str | Path, maker_digest: str, *, max_bytes: int = MAX_BYTES):
        """
        Args:
            folder: path of the folder.
            maker_digest: changes whenever the same sound would result in a different voice; see `maker_digest`.
            max_bytes: size limit of all voices in the folder, for all makers together.
        Raises: SettingsError.
        """
        if max_bytes < 1:
            raise SettingsError("voice cache: max_bytes", expected="at least 1", got=max_bytes)
        self.folder, self.maker_digest, self.max_bytes = Path(folder), maker_digest, max_bytes
        self.problem: str | None = None

    def get_or_make(self, wave: object, rate: int, make: Callable[[Tensor, int], Voice]) -> Voice:
        """The voice of this sound, from disk or from `make`, whose result is stored.

        If the folder cannot be read or written, the voice is made again each time and `problem` gives the reason.

        Args:
            wave: see `check_prompt`.
            rate: see `check_prompt`.
            make: prepares a voice from [channels, n] float32 and the rate in Hz.
        Raises: AudioError; any error of `make`.
        """
        samples = check_prompt(wave, rate)
        rate = int(rate)
        key = self._key(samples, rate)
        path = self.folder / f"{key}{SUFFIX}"
        self.problem = None
        voice = self._load(path, key)
        if voice is None:
            voice = make(samples, rate)
            self._store(path, key, voice)
        return voice

    def _key(self, wave: Tensor, rate: int) -> str:
        data = hashlib.sha256(f"{self.maker_digest} {rate} {tuple(wave.shape)} ".encode())
        data.update(wave.numpy().data)
        return data.hexdigest()

    def _load(self, path: Path, key: str) -> Voice | None:
        """The voice of a file whose seal is valid; None for any other file."""
        try:
            if not path.is_file() or path.stat().st_size > self.max_bytes:
                return None
            # Read, not mapped: if another process truncated a mapped file, reading it would kill this process.
            tensors = load(path.read_bytes())
            seal = tensors.pop(_SEAL)
            if {name: tensor.dtype for name, tensor in tensors.items()} != _DTYPES:
                return None
            voice = Voice(tensors["codes"], tensors["mel"], tensors["speaker"])
            if not torch.equal(seal, _seal(key, voice)):
                return None
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError):
            return None  # a damaged or foreign file, whose header may contain anything
        try:
            os.utime(path)  # marks the file as recently used
        except OSError:
            return voice  # read-only folder
        return voice

    def _store(self, path: Path, key: str, voice: Voice) -> None:
        tensors = {"codes": voice.speech_tokens, "mel": voice.mel, "speaker": voice.speaker, _SEAL: _seal(key, voice)}
        data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        if len(data) > self.max_bytes:
            self.problem = f"the voice has {len(data)} bytes, the limit of the cache is {self.max_bytes}"
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
            self._make_room(path)
        except OSError as error:
            self.problem = f"{self.folder}: {error.strerror}"

    def _make_room(self, newest: Path) -> None:
        """Remove the least recently used voices above the limit, except `newest`. Foreign files stay."""
        voices, now = [], time.time()
        for entry in os.scandir(self.folder):
            abandoned = entry.name.endswith(PENDING) and _OURS.match(entry.name[1:])
            if not abandoned and not _OURS.fullmatch(entry.name):
                continue
            try:
                stat = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # removed by another process
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
    """[32] uint8 digest of the key and the content."""
    return torch.tensor(list(hashlib.sha256(f"{key} {voice.digest}".encode()).digest()), dtype=torch.uint8)
