"""Writes the sounds and pictures of a recording, and names them as `recording.json` does."""

import wave
from pathlib import Path

import numpy as np

from models.inputs.audio_sizes import SAMPLE_RATE
from worker.protocol.wire import SOUND_RATE, Sound

PNG = b"\x89PNG\r\n\x1a\n"


def write_wav(path: Path, samples: np.ndarray, rate: int) -> None:
    """Write mono 16-bit sound. samples: [n] float32; values outside [-1, 1] are clipped. Raises: OSError."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(Sound(samples).packed("pcm16"))


class MediaFiles:
    """Files in the subfolders of one recording. Every method returns the path relative to its folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def user_audio(self, index: int, samples: np.ndarray) -> str:
        """samples: [n] float32 at 16 kHz."""
        name = f"user_audio/{index:03d}.wav"
        write_wav(self.folder / name, samples, SAMPLE_RATE)
        return name

    def user_frame(self, index: int, picture: bytes) -> str:
        """picture: as received."""
        return self._write(f"user_frames/{index:03d}{_suffix(picture)}", picture)

    def user_image(self, index: int, picture: bytes) -> str:
        """picture: as received."""
        return self._write(f"user_images/img_{index}{_suffix(picture)}", picture)

    def user_video(self, index: int, video: bytes) -> str:
        """video: as received."""
        return self._write(f"user_videos/vid_{index}.mp4", video)

    def chunk_audio(self, turn: int, chunk: int, samples: np.ndarray) -> str:
        """samples: [n] float32 at 24 kHz, of one unit."""
        name = f"ai_audio/turn_{turn}_chunk_{chunk:03d}.wav"
        write_wav(self.folder / name, samples, SOUND_RATE)
        return name

    def turn_audio(self, turn: int, samples: np.ndarray) -> str:
        """samples: [n] float32 at 24 kHz, of a whole turn."""
        name = f"ai_audio/turn_{turn}.wav"
        write_wav(self.folder / name, samples, SOUND_RATE)
        return name

    def _write(self, name: str, data: bytes) -> str:
        (self.folder / name).write_bytes(data)
        return name


def _suffix(picture: bytes) -> str:
    return ".png" if picture.startswith(PNG) else ".jpg"
