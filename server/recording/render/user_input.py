"""The last message of the user in a request: its text, sounds, pictures and videos as files of the recording."""

import subprocess
from typing import Any

import numpy as np

from models.inputs.audio_sizes import SAMPLE_RATE
from server.recording.render.frames import text_of
from server.recording.render.media_files import MediaFiles
from worker.media import MediaError, ffmpeg_program
from worker.protocol.wire import WireError, base64_bytes, picture_bytes

# How sound files begin, as against raw samples.
CONTAINERS = (b"RIFF", b"ID3", b"OggS", b"fLaC", b"\x1aE\xdf\xa3", b"FORM", b"\xff\xfb", b"\xff\xf3", b"\xff\xf1")
DECODE_S = 60.0
MAX_SOUND_S = 600  # of one file, so that a small one cannot fill the memory; requests have shorter ones


class UserInput:
    """Reads messages of requests. fields: the `input` of the turn. sounds: [n] float32 at 16 kHz each."""

    def __init__(self, media: MediaFiles):
        self._media = media
        self._n_images = self._n_videos = 0
        self.fields: dict[str, Any] = {}
        self.sounds: list[np.ndarray] = []
        self.notes: list[str] = []

    def read(self, messages: list[Any]) -> None:
        """Read a request's messages. Raises: OSError if a file cannot be written."""
        self.fields, self.sounds = {}, []
        users = [one for one in messages if isinstance(one, dict) and one.get("role") == "user"]
        content = users[-1].get("content") if users else None
        if isinstance(content, str):
            self.fields["text"] = content
            return
        items = [one for one in content if isinstance(one, dict)] if isinstance(content, list) else []
        texts = [text for one in items if one.get("type") == "text" and (text := text_of(one.get("text")))]
        if texts:
            self.fields["text"] = "\n".join(texts)
        for item in items:
            try:
                self._add(text_of(item.get("type")), text_of(item.get("data")))
            except (WireError, MediaError) as error:
                self.notes.append(f"an item of a message was not recorded: {error}")

    def _add(self, kind: str, data: str) -> None:
        if not data:
            return
        if kind == "image":
            path = self._media.user_image(self._n_images, picture_bytes(data, "image"))
            self.fields.setdefault("images", []).append(path)
            self._n_images += 1
        elif kind == "video":
            path = self._media.user_video(self._n_videos, base64_bytes(data, "video"))
            self.fields.setdefault("videos", []).append(path)
            self._n_videos += 1
        elif kind == "audio":
            self.sounds.append(_samples(base64_bytes(data, "audio")))


def _samples(data: bytes) -> np.ndarray:
    """[n] float32 at 16 kHz from raw samples or from a sound file. Raises: MediaError."""
    if not data.startswith(CONTAINERS) and data[4:8] != b"ftyp":
        return np.frombuffer(data[: len(data) // 4 * 4], "<f4").astype(np.float32)
    command = [ffmpeg_program(), "-nostdin", "-hide_banner", "-loglevel", "error"]
    command += ["-protocol_whitelist", "pipe", "-i", "pipe:0", "-vn"]
    command += ["-t", str(MAX_SOUND_S), "-ac", "1", "-ar", str(SAMPLE_RATE), "-f", "f32le", "pipe:1"]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=DECODE_S, check=False)
    except subprocess.TimeoutExpired:
        raise MediaError("audio", expected=f"sound decoded within {DECODE_S:g} s", got="none") from None
    if done.returncode or len(done.stdout) < 4:
        raise MediaError("audio", expected="sound that ffmpeg decodes", got=f"exit status {done.returncode}")
    return np.frombuffer(done.stdout[: len(done.stdout) // 4 * 4], "<f4").astype(np.float32)
