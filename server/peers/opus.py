"""A decoder of Opus that also makes sound for lost packets, which PyAV's cannot: libopus through its C interface.

The library is the one that PyAV brings along, or the system's.
"""

import ctypes
import ctypes.util
from functools import cache
from pathlib import Path

import av
import numpy as np

from server.doors.live.sound.resample import ENGINE_RATE

MAX_SAMPLES = ENGINE_RATE * 120 // 1000  # of one packet
USUAL_SAMPLES = ENGINE_RATE * 20 // 1000
NAMES = ("../av.libs/libopus*", ".dylibs/libopus*")  # beside PyAV's modules, in its wheels


class OpusError(Exception):
    """libopus is missing, or refuses a packet."""


class OpusDecoder:
    """The decoder of one stream: mono sound at 16 kHz, which libopus makes of any packet. Raises: OpusError."""

    def __init__(self) -> None:
        self._library = library()
        error = ctypes.c_int()
        self._state = self._library.opus_decoder_create(ENGINE_RATE, 1, ctypes.byref(error))
        if error.value or not self._state:
            raise OpusError(f"libopus: expected a decoder, got error {error.value}")
        self._out = np.zeros(MAX_SAMPLES, np.float32)
        self._n_last = USUAL_SAMPLES  # samples of the last packet

    def __del__(self) -> None:
        if getattr(self, "_state", None):
            self._library.opus_decoder_destroy(self._state)

    def decode(self, packet: bytes) -> np.ndarray:
        """The sound of a packet, [n] float32. Raises: OpusError for one that is none."""
        sound = self._run(packet, MAX_SAMPLES, is_repair=False)
        self._n_last = len(sound)
        return sound

    def repair(self, n_samples: int, following: bytes) -> np.ndarray:
        """Sound in place of lost packets, [about n_samples] float32.

        The last one is decoded from its copy in the packet that follows; the decoder extrapolates those before.
        """
        n_lost = max(1, round(n_samples / self._n_last))
        guessed = [self._run(None, self._n_last, is_repair=False) for _ in range(n_lost - 1)]
        return np.concatenate([*guessed, self._run(following, self._n_last, is_repair=True)])

    def _run(self, packet: bytes | None, n_samples: int, *, is_repair: bool) -> np.ndarray:
        n_bytes = 0 if packet is None else len(packet)
        out = self._out.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        n = self._library.opus_decode_float(self._state, packet, n_bytes, out, n_samples, int(is_repair))
        if n < 0:
            raise OpusError(f"libopus: expected a packet of Opus, got {n_bytes} bytes with error {n}")
        return self._out[:n].copy()


@cache
def library() -> ctypes.CDLL:
    """libopus. Raises: OpusError where there is none."""
    folder = Path(av.__file__).parent
    found = [str(path) for name in NAMES for path in sorted(folder.glob(name))]
    name = next(iter(found), None) or ctypes.util.find_library("opus")
    if name is None:
        raise OpusError("libopus: expected it beside PyAV or in the system, found none")
    opus = ctypes.CDLL(name)
    number, pointer = ctypes.c_int, ctypes.c_void_p
    opus.opus_decoder_create.argtypes = [ctypes.c_int32, number, ctypes.POINTER(number)]
    opus.opus_decoder_create.restype = pointer
    opus.opus_decoder_destroy.argtypes = [pointer]
    opus.opus_decoder_destroy.restype = None
    opus.opus_decode_float.argtypes = [
        pointer,
        ctypes.c_char_p,
        ctypes.c_int32,
        ctypes.POINTER(ctypes.c_float),
        number,
        number,
    ]
    opus.opus_decode_float.restype = number
    return opus
