"""Speaker vector and reference codes of a sound, and the files that keep those of registered voices."""

import hashlib
import logging
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.qwen3_tts.prompt import Array
from worker.voice_registry import prepared_file

LOG = logging.getLogger(__name__)
SOUND = "sound"  # key of the digest in a file's metadata


@dataclass(frozen=True)
class ClonedVoice:
    """A reference sound for a Base model. vector: float32 [dim]. codes: int64 [frames, 16]."""

    vector: Array
    codes: Array


class PreparedVoices:
    """Files of cloned voices beside the sounds of registered ones, for one checkpoint.

    Another start reads them instead of running the networks. The registry deletes them with the voice.
    """

    def __init__(self, registered: Path, checkpoint: Path):
        """checkpoint: folder of the speech model; a changed file of it makes all voices anew."""
        facts = [(str(file.relative_to(checkpoint)), file.stat()) for file in sorted(checkpoint.rglob("*.safetensors"))]
        text = repr([(name, about.st_size, about.st_mtime_ns) for name, about in facts])
        self._registered, self._key = registered, hashlib.sha256(text.encode()).hexdigest()[:16]

    def read(self, voice_file: Path, digest: str) -> ClonedVoice | None:
        """The voice of a registered sound; None if there is none for this sound. digest: of the sound."""
        file = self._file(voice_file)
        if file is None or not file.is_file():
            return None
        try:
            with safe_open(file, "numpy") as stored:
                if (stored.metadata() or {}).get(SOUND) != digest:
                    return None
                return ClonedVoice(stored.get_tensor("vector"), stored.get_tensor("codes"))
        except (SafetensorError, OSError) as error:
            LOG.warning("%s: expected a prepared voice, got %s; it is prepared again", file, error)
            return None

    def write(self, voice_file: Path, digest: str, voice: ClonedVoice) -> None:
        """Keep a voice. Without the right to write here it is prepared again after the next start."""
        file = self._file(voice_file)
        if file is None:
            return
        draft = file.with_name(f"{file.name}.{uuid.uuid4().hex}.part")
        tensors = {"vector": np.ascontiguousarray(voice.vector), "codes": np.ascontiguousarray(voice.codes)}
        try:
            file.parent.mkdir(exist_ok=True)
            save_file(tensors, draft, {SOUND: digest})
            draft.replace(file)
            if not voice_file.exists():  # deleted meanwhile
                file.unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:
            LOG.warning("%s: a prepared voice is not kept: %s", file, error)

    def _file(self, voice_file: Path) -> Path | None:
        """Where the voice of a sound is kept; None for a sound that is not registered."""
        if voice_file.parent != self._registered:
            return None
        return prepared_file(self._registered, voice_file.stem, self._key)
