"""One session's sound in its wire formats: from the client to the engine, and back. Stateful in both directions."""

from typing import Literal

import numpy as np

from server.doors.core.tempo import Tempo
from server.doors.live.sound.resample import (
    ENGINE_RATE,
    SPEECH_RATE,
    STEP,
    Companding,
    StreamResampler,
    alaw,
    floats_of,
    steps_of,
    ulaw,
)

WireFormat = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
G711_RATE = 8000


def _law(form: WireFormat) -> Companding | None:
    if form == "audio/pcm":
        return None
    return ulaw() if form == "audio/pcmu" else alaw()


class SoundInput:
    """Decodes the client's sound to float32 at 16 kHz."""

    def __init__(self, form: WireFormat):
        self.form = form
        self._law = _law(form)
        if self._law is None:
            self._resampler = StreamResampler(SPEECH_RATE, ENGINE_RATE, STEP)
        else:
            self._resampler = StreamResampler(G711_RATE, ENGINE_RATE)
        self._odd = b""  # half a sample at the end of the last chunk

    def push(self, data: bytes) -> np.ndarray:
        """[n] float32 at 16 kHz."""
        if self._law is not None:
            return self._resampler.push(self._law.decode(data))
        if self._odd or len(data) % 2:
            data = self._odd + data
            n_whole = len(data) - len(data) % 2
            data, self._odd = data[:n_whole], data[n_whole:]
        return self._resampler.push(steps_of(data))

    def reset(self) -> None:
        """Forget the sound so far."""
        self._resampler.reset()
        self._odd = b""


class SoundOutput:
    """Encodes one speech of the engine, PCM16 at 24 kHz. speed: of the speech; its pitch stays."""

    def __init__(self, form: WireFormat, speed: float = 1.0):
        self.form = form
        self._law = _law(form)
        self._resampler = StreamResampler(SPEECH_RATE, G711_RATE) if self._law else None
        self._tempo = None if speed == 1.0 else Tempo(speed)

    def push(self, pcm16: bytes) -> bytes:
        """The sound in the wire format that is complete."""
        return self._encoded(pcm16 if self._tempo is None else self._tempo.push(pcm16))

    def finish(self) -> bytes:
        """The rest of the sound, once."""
        return b"" if self._tempo is None else self._encoded(self._tempo.finish())

    def _encoded(self, pcm16: bytes) -> bytes:
        if self._law is None or self._resampler is None:
            return pcm16
        return self._law.encode(self._resampler.push(floats_of(pcm16)))


def without_padding(pcm16: bytes) -> bytes:
    """The sound without the zeros in front, by which a short unit is padded to a second."""
    steps = np.frombuffer(pcm16, "<i2")
    if not len(steps) or steps[0] != 0:
        return pcm16
    found = np.flatnonzero(steps)
    return pcm16[2 * int(found[0]) :] if len(found) else b""
