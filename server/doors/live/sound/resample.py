"""Sound between the wire and the engine: resampling, G.711 and PCM16, chunk by chunk without seams.

A resampler keeps the samples that later outputs need, so that any split of the sound into chunks gives the same output,
up to its rounding in float32 (at most 2e-6, a tenth of a PCM16 step).
Its delay is below 4 ms; `soxr.ResampleStream` holds back 20 ms and more, which is why it is not used here.
"""

import functools
import math

import numpy as np

ENGINE_RATE = 16_000  # Hz, of sound to the engine
SPEECH_RATE = 24_000  # Hz, of sound from the engine
STEP = np.float32(1 / 32768)  # of PCM16
PCM16 = np.dtype("<i2")

# Of the low-pass filter at the common multiple of both rates, relative to the lower rate: a tone below 0.4375 of it
# (7 kHz at 16 kHz) passes, and one above 0.5625 (9 kHz) is suppressed by 76 dB.
PASS, STOP = 0.4375, 0.5625
ATTENUATION_DB = 76.0

MIN_BLOCK = 16  # outputs of a block at least, where it costs no more than their product with the filter
MAX_PRODUCT = 2**17  # multiplications at once: BLAS spreads larger products over threads, which wait for other programs


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
def _block(up: int, down: int, scale: float | np.float32) -> np.ndarray:
    """The filter of the outputs of one block, [n, n_block] float32, for the inputs from that of the first output on.

    A block begins where an output coincides with an input; its length is a multiple of `up`.
    """
    rows, _ = _phases(up, down)
    places = [divmod(index * down, up) for index in range(up * max(1, MIN_BLOCK // up))]
    block = np.zeros((rows.shape[1] + places[-1][0], len(places)), np.float32)
    for index, (shift, phase) in enumerate(places):
        block[shift : shift + rows.shape[1], index] = rows[phase]
    return block * np.float32(scale)


class StreamResampler:
    """A polyphase resampler for one stream of mono sound.

    Args:
        rate_in: Hz, of the input.
        rate_out: Hz, of the output.
        scale: factor on the input.
    """

    def __init__(self, rate_in: int, rate_out: int, scale: float | np.float32 = 1.0):
        common = math.gcd(rate_in, rate_out)
        self._up, self._down, self._scale = rate_out // common, rate_in // common, np.float32(scale)
        rows, delay = _phases(self._up, self._down)
        self._n_before = rows.shape[1] - 1  # inputs that an output needs besides its own
        self._block = _block(self._up, self._down, scale)
        n_rows, self._n_block = self._block.shape
        self._step = self._n_block // self._up * self._down  # inputs between two blocks
        n_blocks = max(2, MAX_PRODUCT // self._block.size)  # in one product
        self._n_piece = (n_blocks - 1) * self._step  # inputs at once
        # The inputs of the block that is not complete, then new ones; for a product, each block's, which overlap.
        self._sound = np.zeros(self._n_before + (n_blocks + 1) * self._step, np.float32)
        shape, strides = (n_blocks, n_rows), (4 * self._step, 4)
        self._overlapping: np.ndarray = np.ndarray(shape, np.float32, self._sound, 0, strides)
        self._windows = np.empty(shape, np.float32)  # a copy of them, without which the product would not use BLAS
        self._last = self._windows, self._overlapping  # the blocks of the last product; most have the same number
        self.delay_s = 0.0 if self._up == self._down else delay / (rate_in * self._up)
        self.reset()

    def reset(self) -> None:
        """Forget the sound so far."""
        self._n_kept = self._n_before  # inputs of the block that is not complete
        self._n_given = 0  # outputs of that block
        self._sound[: self._n_kept] = 0.0

    def push(self, samples: np.ndarray) -> np.ndarray:
        """The output that the sound so far determines, [m] float32. samples: [n] float32 or int16."""
        if self._up == self._down:
            return samples if self._scale == 1.0 else samples * self._scale
        if len(samples) <= self._n_piece:
            return self._push(samples)
        pieces = range(0, len(samples), self._n_piece)
        return np.concatenate([self._push(samples[start : start + self._n_piece]) for start in pieces])

    def _push(self, samples: np.ndarray) -> np.ndarray:
        n_block, step, sound = self._n_block, self._step, self._sound
        n_in = self._n_kept + len(samples)
        n_out = -((self._n_before - n_in) * self._up // self._down)  # of the block that is not complete, and later ones
        n_blocks = -(-n_out // n_block)
        sound[self._n_kept : n_in] = samples
        n_needed = (n_blocks - 1) * step + len(self._block)
        if n_in < n_needed:
            sound[n_in:n_needed] = 0.0
        if len(self._last[0]) != n_blocks:
            self._last = self._windows[:n_blocks], self._overlapping[:n_blocks]
        windows, overlapping = self._last
        windows[...] = overlapping
        made: np.ndarray = windows.dot(self._block).reshape(-1)[self._n_given : n_out]
        n_whole = n_out // n_block
        self._n_given = n_out - n_whole * n_block
        self._n_kept = n_in - n_whole * step
        sound[: self._n_kept] = sound[n_in - self._n_kept : n_in]
        return made


# --- PCM16 ----------------------------------------------------------------------------------------


def steps_of(pcm16: bytes) -> np.ndarray:
    """Little-endian PCM16 as [n] int16, without a copy. pcm16: a whole number of samples."""
    return np.frombuffer(pcm16, PCM16)


def floats_of(pcm16: bytes) -> np.ndarray:
    """Little-endian PCM16 as [n] float32. pcm16: a whole number of samples."""
    return steps_of(pcm16) * STEP


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
