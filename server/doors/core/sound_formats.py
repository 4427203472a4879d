"""Sound in the file formats of the OpenAI API, encoded while it arrives, and its speed without a change of pitch.

Contains no files and no HTTP. Encoding takes milliseconds a second of sound: call it on a thread of `ENCODERS`.
"""

import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, get_args

import av
import numpy as np
from av.audio.stream import AudioStream

from server.doors.core.tempo import Tempo, pcm_frame
from worker.protocol.wire import SOUND_RATE, Sound

ENCODERS = ThreadPoolExecutor(4, "encode")
FormatName = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
FORMAT_NAMES: tuple[FormatName, ...] = get_args(FormatName)
MIN_SPEED, MAX_SPEED = 0.25, 4.0
UNKNOWN_SIZE = 0xFFFFFFFF  # in the header of a WAV file of unknown length
SAMPLE_BYTES = 2


@dataclass(frozen=True)
class _Encoding:
    """How libav encodes a format. container: its muxer. options: of the muxer."""

    container: str
    codec: str
    bit_rate: int | None
    options: dict[str, str]


MEDIA_TYPES: dict[FormatName, str] = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
# Frames without the header of a file with a known length: the output cannot be changed once it is sent.
ENCODINGS: dict[FormatName, _Encoding] = {
    "mp3": _Encoding("mp3", "libmp3lame", 64_000, {"write_xing": "0", "id3v2_version": "0"}),
    "opus": _Encoding("ogg", "libopus", 48_000, {"page_duration": "20000"}),
    "aac": _Encoding("adts", "aac", 64_000, {}),
    "flac": _Encoding("flac", "flac", None, {}),
}


class _Output:
    """A file that cannot seek: it keeps what is written until it is taken."""

    def __init__(self) -> None:
        self._written = bytearray()

    def write(self, data: bytes) -> int:
        self._written += data
        return len(data)

    def take(self) -> bytes:
        """Remove and return everything written so far."""
        data = bytes(self._written)
        self._written.clear()
        return data


class _Muxed:
    """A format that libav encodes."""

    def __init__(self, encoding: _Encoding):
        self._output = _Output()
        self._container = av.open(
            self._output, "w", format=encoding.container, options={**encoding.options, "flush_packets": "1"}
        )
        stream = self._container.add_stream(encoding.codec, rate=SOUND_RATE, layout="mono")
        assert isinstance(stream, AudioStream)
        if encoding.bit_rate is not None:
            stream.bit_rate = encoding.bit_rate
        self._stream = stream

    def push(self, pcm: bytes) -> bytes:
        if pcm:
            self._container.mux(self._stream.encode(pcm_frame(pcm)))
        return self._output.take()

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._output.take()


class SoundEncoder:
    """One sound in one format.

    Args:
        name: the format.
        speed: of the sound, `MIN_SPEED` to `MAX_SPEED`; its pitch stays.
    """

    def __init__(self, name: FormatName, speed: float = 1.0):
        self._tempo = None if speed == 1.0 else Tempo(speed)
        self._muxed = _Muxed(ENCODINGS[name]) if name in ENCODINGS else None
        self._head = wav_header(None) if name == "wav" else b""

    def push(self, pcm: np.ndarray) -> bytes:
        """The encoded bytes that further sound completes. pcm: [n] float32 at 24 kHz, in [-1, 1]."""
        data = Sound(pcm).packed("pcm16")
        return self._encoded(data if self._tempo is None else self._tempo.push(data))

    def finish(self) -> bytes:
        """The rest of the encoded bytes, once."""
        rest = b"" if self._tempo is None else self._encoded(self._tempo.finish())
        return rest + (self._encoded(b"") if self._muxed is None else self._muxed.finish())

    def _encoded(self, pcm: bytes) -> bytes:
        if self._muxed is not None:
            return self._muxed.push(pcm)
        head, self._head = self._head, b""
        return head + pcm


def encoded(pcm: np.ndarray, name: FormatName) -> bytes:
    """A whole sound as a file whose header has its length, where the format has one. pcm: as in `SoundEncoder.push`."""
    if name == "wav":
        data = Sound(pcm).packed("pcm16")
        return wav_header(len(data)) + data
    encoder = SoundEncoder(name)
    return encoder.push(pcm) + encoder.finish()


def wav_header(n_bytes: int | None) -> bytes:
    """The header of a mono WAV file of 16 bit at 24 kHz. n_bytes: of its samples; None: unknown."""
    size, whole = (UNKNOWN_SIZE, UNKNOWN_SIZE) if n_bytes is None else (n_bytes, n_bytes + 36)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, SOUND_RATE, SOUND_RATE * SAMPLE_BYTES, SAMPLE_BYTES, 16)
    return b"RIFF" + struct.pack("<I", whole) + b"WAVE" + form + b"data" + struct.pack("<I", size)
