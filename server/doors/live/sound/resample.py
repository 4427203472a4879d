"""Sound between the wire and the engine: resampling, G.711 and PCM16, chunk by chunk without seams.

A resampler keeps the samples that later outputs need, so that any split of the sound into chunks gives the same output.
Its delay is below 4 ms; `soxr.ResampleStream` holds back 20 ms and more, which is why it is not used here.
"""

import functools
import math

import numpy as np

ENGINE_RATE = 16_000  # Hz, of sound to the engine
SPEECH_RATE = 24_000  # Hz, of sound from the engine
STEP = np.float32(1 / 32768)  # of PCM16

# Of the low-pass filter at the common multiple of both rates, relative to the lower rate: a tone below 0.4375 of it
# (7 kHz at 16 kHz) passes, and one above 0.5625 (9 kHz) is suppressed by 76 dB.
PASS, STOP = 0.4375, 0.5625
ATTENUATION_DB = 76.0


@functools.cache
def _phases(up: int, down: int) -> tuple[np.ndarray, int]:
    """The low-pass filter, one row for each phase of the output, [up, n] float32, and its delay at the common rate.

    Each row is reversed in time.
    """
    widest = max(up, down)  # the common rate in units of the lower rate
    pass_edge, stop_edge = PASS / widest, STOP / widest  # cycles a sample of the common rate
    n_taps = math.ceil((ATTENUATION_DB - 8) / (2.285 * 2 * math.pi * (stop_edge - pass_edge)))
    n_taps = math.ceil((n_taps - 1) / 4) * 4 + 1  # a delay of a whole number of samples at the common rate
    beta = 0.1102 * (ATTENUATION_DB - 8.7)
    at = np.arange(n_taps) - (n_taps - 1) / 2
    cutoff = pass_edge + stop_edge
    taps = cutoff * np.sinc(cutoff * at) * np.kaiser(n_taps, beta) * up
    n_phase = math.ceil(n_taps / up)
    padded = np.zeros(n_phase * up)
    padded[:n_taps] = taps
    rows = np.ascontiguousarray(padded.reshape(n_phase, up).T[:, ::-1]).astype(np.float32)
    return rows, (n_taps - 1) // 2


@functools.cache
def _block(up: int, down: int, phase: int) -> np.ndarray:
    """The filter of `up` outputs in a row, [n, up] float32, for the inputs from that of the first output on.

    phase: of the first output.
    """
    rows, _ = _phases(up, down)
    places = [divmod(phase + index * down, up) for index in range(up)]
    block = np.zeros((rows.shape[1] + places[-1][0], up), np.float32)
    for index, (shift, row) in enumerate(places):
        block[shift : shift + rows.shape[1], index] = rows[row]
    return block


class StreamResampler:
    """A polyphase resampler for one stream of mono sound.

    Args:
        rate_in: Hz, of the input.
        rate_out: Hz, of the output.
    """

    def __init__(self, rate_in: int, rate_out: int):
        common = math.gcd(rate_in, rate_out)
        self._up, self._down = rate_out // common, rate_in // common
        rows, delay = _phases(self._up, self._down)
        self._n_kept = rows.shape[1] - 1
        self.delay_s = 0.0 if self._up == self._down else delay / (rate_in * self._up)
        self.reset()

    def reset(self) -> None:
        """Forget the sound so far."""
        self._kept = np.zeros(self._n_kept, np.float32)
        self._at = 0  # of the next output, at the common rate, from the next input sample

    def push(self, samples: np.ndarray) -> np.ndarray:
        """The output that the sound so far determines, [m] float32. samples: [n] float32."""
        up, down = self._up, self._down
        if up == down:
            return samples
        n_out = max(0, -(-(len(samples) * up - self._at) // down))
        first, phase = divmod(self._at, up)
        block = _block(up, down, phase)
        n_blocks, width = -(-n_out // up), len(block)
        n_missing = first + (n_blocks - 1) * down + width - self._n_kept - len(samples)
        parts = (self._kept, samples)
        sound = np.concatenate(parts if n_missing <= 0 else (*parts, np.zeros(n_missing, np.float32)))
        # Overlapping windows as a copy: a view would keep the product from using BLAS.
        size = sound.itemsize
        windows: np.ndarray = np.ndarray((n_blocks, width), np.float32, sound, first * size, (down * size, size))
        out: np.ndarray = (windows.copy() @ block).reshape(-1)[:n_out]
        self._at += n_out * down - len(samples) * up
        self._kept = sound[len(samples) : len(samples) + self._n_kept].copy()
        return out


# --- PCM16 ----------------------------------------------------------------------------------------


def floats_of(pcm16: bytes) -> np.ndarray:
    """Little-endian PCM16 as [n] float32. pcm16: a whole number of samples."""
    return np.frombuffer(pcm16, "<i2") * STEP


def pcm16_of(samples: np.ndarray) -> bytes:
    """Rounded and clipped PCM16. samples: [n] float32 in [-1, 1]."""
    steps = np.rint(samples * np.float32(32768)).clip(-32768, 32767)
    data: bytes = steps.astype("<i2").tobytes()
    return data


# --- G.711 ----------------------------------------------------------------------------------------


def _ulaw_steps() -> np.ndarray:
    code = ~np.arange(256) & 0xFF
    size = ((((code & 0x0F) << 3) + 0x84) << ((code & 0x70) >> 4)) - 0x84
    return np.where(code & 0x80, -size, size)


def _alaw_steps() -> np.ndarray:
    code = np.arange(256) ^ 0x55
    exponent, size = (code & 0x70) >> 4, (code & 0x0F) << 4
    size = np.where(exponent == 0, size + 8, (size + 0x108) << np.maximum(exponent - 1, 0))
    return np.where(code & 0x80, size, -size)


class Companding:
    """One law of G.711: bytes to samples by a table, samples to the byte with the nearest value."""

    def __init__(self, steps: np.ndarray):
        """steps: value of each byte, [256] in PCM16 steps."""
        self._values = steps.astype(np.float32) * STEP
        order = np.argsort(steps, kind="stable")
        ordered = steps[order]
        edges = (ordered[1:] + ordered[:-1]) / 2
        self._codes = order[np.searchsorted(edges, np.arange(-32768, 32768))].astype(np.uint8)

    def decode(self, data: bytes) -> np.ndarray:
        """[n] float32."""
        return self._values[np.frombuffer(data, np.uint8)]

    def encode(self, samples: np.ndarray) -> bytes:
        """One byte a sample. samples: [n] float32 in [-1, 1]."""
        steps = np.rint(samples * np.float32(32768)).clip(-32768, 32767).astype(np.int32)
        data: bytes = self._codes[steps + 32768].tobytes()
        return data


@functools.cache
def ulaw() -> Companding:
    return Companding(_ulaw_steps())


@functools.cache
def alaw() -> Companding:
    return Companding(_alaw_steps())
