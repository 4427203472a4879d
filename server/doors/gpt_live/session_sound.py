"""One session's sound between its wire format and the engine, stateful in both directions."""

import numpy as np

from server.doors.live.sound.resample import (
    ENGINE_RATE,
    SPEECH_RATE,
    STEP,
    Companding,
    StreamResampler,
    alaw,
    pcm16_of,
    steps_of,
    ulaw,
)
from server.doors.live.sound.wire_sound import WireFormat

RATES: dict[WireFormat, tuple[int, ...]] = {
    "audio/pcm": (24_000, 16_000),  # the first is the default
    "audio/pcmu": (8000,),
    "audio/pcma": (8000,),
}


class SessionSound:
    """Decodes and encodes a session's sound.

    Args:
        kind: encoding.
        rate: Hz, one of `RATES`.
    """

    def __init__(self, kind: WireFormat, rate: int):
        self.kind, self.rate = kind, rate
        self._law: Companding | None = {"audio/pcm": None, "audio/pcmu": ulaw(), "audio/pcma": alaw()}[kind]
        self._to_engine = StreamResampler(rate, ENGINE_RATE, STEP if self._law is None else 1.0)
        self._from_engine = StreamResampler(SPEECH_RATE, rate)
        self._odd = b""  # half a sample at the end of the last chunk

    def decode(self, data: bytes) -> np.ndarray:
        """[n] float32 at 16 kHz."""
        if self._law is not None:
            return self._to_engine.push(self._law.decode(data))
        data = self._odd + data
        n_whole = len(data) - len(data) % 2
        self._odd = data[n_whole:]
        return self._to_engine.push(steps_of(data[:n_whole]))

    def encode(self, samples: np.ndarray) -> bytes:
        """The sound in the wire format. samples: [n] float32 at 24 kHz."""
        samples = self._from_engine.push(samples)
        return pcm16_of(samples) if self._law is None else self._law.encode(samples)
