"""What the wire formats leave of a tone: 24 to 16 and back to 24 kHz, and G.711, as signal to noise ratio.

No servers and no clock: the same result on every machine with the same numpy.
"""

from collections.abc import Callable

import numpy as np

from server.doors.live.sound.resample import ENGINE_RATE, SPEECH_RATE, StreamResampler, alaw, pcm16_of, ulaw
from server.doors.live.sound.wire_sound import G711_RATE, SoundInput, SoundOutput

SECONDS, AMPLITUDE = 2.0, 0.5
CHUNK_S = 0.02
WIDE_HZ = (53, 101, 307, 1009, 2003, 3001, 3989, 5003, 5987, 6491, 6899)  # below 7 kHz, no divisors of the rates
NARROW_HZ = (307, 1009, 2003, 2999)  # of a telephone


def snr_rows() -> list[dict[str, object]]:
    """One row for each way and tone: `way`, `hz`, `snr_db`."""
    return [
        {"way": way, "hz": hz, "snr_db": snr_db(there_and_back, rate_in, rate_out, hz)}
        for way, tones, rate_in, rate_out, there_and_back in (
            ("24 kHz, 16 kHz, 24 kHz", WIDE_HZ, SPEECH_RATE, SPEECH_RATE, _by_engine_rate),
            ("PCM16 at 24 kHz in", WIDE_HZ, SPEECH_RATE, ENGINE_RATE, _pcm16_in),
            ("G.711 mu-law in", NARROW_HZ, G711_RATE, ENGINE_RATE, _ulaw_in),
            ("G.711 A-law in", NARROW_HZ, G711_RATE, ENGINE_RATE, _alaw_in),
            ("G.711 mu-law out", NARROW_HZ, SPEECH_RATE, G711_RATE, _ulaw_out),
            ("G.711 A-law out", NARROW_HZ, SPEECH_RATE, G711_RATE, _alaw_out),
        )
        for hz in tones
    ]


def snr_db(way: Callable[[np.ndarray], np.ndarray], rate_in: int, rate_out: int, hz: float) -> float:
    """Power of the tone over that of everything else in the output. The tone's delay and gain are fitted."""
    n = round(SECONDS * rate_in)
    sound = (AMPLITUDE * np.sin(2 * np.pi * hz * np.arange(n) / rate_in)).astype(np.float32)
    out = way(sound).astype(np.float64)
    settled = out[len(out) // 4 : -len(out) // 4]
    phase = 2 * np.pi * hz * np.arange(len(settled)) / rate_out
    basis = np.stack((np.sin(phase), np.cos(phase)), axis=1)
    weights, *_ = np.linalg.lstsq(basis, settled, rcond=None)
    tone = basis @ weights
    gain = np.hypot(*weights) / AMPLITUDE
    assert 0.5 < gain < 2, f"gain at {hz} Hz: expected about 1, got {gain:.3f}"
    return float(10 * np.log10(np.mean(tone**2) / np.mean((settled - tone) ** 2)))


def _chunks(sound: np.ndarray, rate: int) -> list[np.ndarray]:
    size = round(CHUNK_S * rate)
    return [sound[start : start + size] for start in range(0, len(sound), size)]


def _by_engine_rate(sound: np.ndarray) -> np.ndarray:
    down, up = StreamResampler(SPEECH_RATE, ENGINE_RATE), StreamResampler(ENGINE_RATE, SPEECH_RATE)
    return np.concatenate([up.push(down.push(chunk)) for chunk in _chunks(sound, SPEECH_RATE)])


def _pcm16_in(sound: np.ndarray) -> np.ndarray:
    given = SoundInput("audio/pcm")
    return np.concatenate([given.push(pcm16_of(chunk)) for chunk in _chunks(sound, SPEECH_RATE)])


def _ulaw_in(sound: np.ndarray) -> np.ndarray:
    given = SoundInput("audio/pcmu")
    return np.concatenate([given.push(ulaw().encode(chunk)) for chunk in _chunks(sound, G711_RATE)])


def _alaw_in(sound: np.ndarray) -> np.ndarray:
    given = SoundInput("audio/pcma")
    return np.concatenate([given.push(alaw().encode(chunk)) for chunk in _chunks(sound, G711_RATE)])


def _ulaw_out(sound: np.ndarray) -> np.ndarray:
    made = SoundOutput("audio/pcmu")
    return ulaw().decode(b"".join(made.push(pcm16_of(chunk)) for chunk in _chunks(sound, SPEECH_RATE)))


def _alaw_out(sound: np.ndarray) -> np.ndarray:
    made = SoundOutput("audio/pcma")
    return alaw().decode(b"".join(made.push(pcm16_of(chunk)) for chunk in _chunks(sound, SPEECH_RATE)))
