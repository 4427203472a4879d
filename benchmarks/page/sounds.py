"""Sounds on which the thresholds of the voice detector were chosen: speech, noise, music, knocks and coughs, echo.

All sounds are generated, 16 kHz, float64, one channel. The voices are those of `assets/ref_audio`, which are synthetic.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

RATE = 16000
VOICES = Path(__file__).parents[2] / "assets" / "ref_audio"
LEAD_S = 1.0  # of background before speech
ONSET_SHARE = 0.1  # of the loudest 10 ms: speech begins with the first 10 ms that are louder


@dataclass(frozen=True)
class VoiceCase:
    """mic, played: [samples]. onset: sample at which the user begins to speak; None: does not speak.

    is_cancelled: the browser reports an active echo canceller; mic is what it leaves.
    """

    kind: str
    name: str
    mic: np.ndarray
    played: np.ndarray
    onset: int | None = None
    is_cancelled: bool = False


def tuning_cases(seed: int = 0) -> list[VoiceCase]:
    rng = np.random.default_rng(seed)
    return [*_speech(rng), *_noise(rng), *_echo(rng)]


def voice(name: str, speed: int = 100) -> np.ndarray:
    """A voice at a speed in percent, peak 0.5."""
    sound, _ = soundfile.read(VOICES / f"{name}.wav")
    sound = np.interp(np.arange(0, len(sound) - 1, speed / 100), np.arange(len(sound)), sound)
    return 0.5 * sound / np.abs(sound).max()


def begin(sound: np.ndarray) -> int:
    frames = sound[: len(sound) // 160 * 160].reshape(-1, 160)
    level = np.sqrt((frames**2).mean(1))
    return int(np.argmax(level > ONSET_SHARE * level.max())) * 160


def band(sound: np.ndarray, low: float, high: float) -> np.ndarray:
    """The sound between two frequencies in Hz, with slopes of the second order."""
    frequency = np.maximum(1e-3, np.fft.rfftfreq(len(sound), 1 / RATE))
    gain = 1 / np.sqrt((1 + (low / frequency) ** 4) * (1 + (frequency / high) ** 4))
    return np.fft.irfft(np.fft.rfft(sound) * gain, len(sound))


def _convolved(sound: np.ndarray, response: np.ndarray) -> np.ndarray:
    n = len(sound) + len(response) - 1
    return np.fft.irfft(np.fft.rfft(sound, n) * np.fft.rfft(response, n), n)


def coloured(rng: np.random.Generator, seconds: float, slope: float) -> np.ndarray:
    """Noise whose power falls with frequency**slope, RMS 1."""
    n = int(seconds * RATE)
    spectrum = np.fft.rfft(rng.standard_normal(n))
    spectrum /= np.maximum(1, np.arange(len(spectrum))) ** (slope / 2)
    sound = np.fft.irfft(spectrum, n)
    return sound / sound.std()


def _speech(rng: np.random.Generator) -> list[VoiceCase]:
    found = []
    for name in ("default", "high"):
        for speed in (85, 92, 100, 108, 115):
            for noise_db in (-60, -40, -30):
                for shift in (0, 170, 340):  # against the detector's windows
                    sound = 0.6 * voice(name, speed)
                    lead = int(LEAD_S * RATE) + shift
                    mic = np.concatenate([np.zeros(lead), sound])
                    mic += 10 ** (noise_db / 20) * coloured(rng, len(mic) / RATE, 1)[: len(mic)]
                    onset = lead + begin(sound)
                    found.append(
                        VoiceCase("speech", f"{name} {speed} % noise {noise_db} dB", mic, np.zeros(len(mic)), onset)
                    )
    return found


def _noise(rng: np.random.Generator) -> list[VoiceCase]:
    found = []
    for level_db in (-40, -26, -14):
        level = 10 ** (level_db / 20)
        kinds = {
            "white": coloured(rng, 10, 0),
            "pink": coloured(rng, 10, 1),
            "brown": coloured(rng, 10, 2),
            "claps": _bursts(rng, 0.03, 1800, 3000),
            "knocks": _bursts(rng, 0.05, 120, 400),
            "keys": _bursts(rng, 0.01, 2500, 6000),
            "coughs": _coughs(rng),
            "chords": _music(rng, decay=0.8),
            "melody": _music(rng, decay=3.0),
            "siren": np.sin(np.cumsum(2 * np.pi * (900 + 300 * np.sin(np.arange(10 * RATE) / RATE * 3)) / RATE)),
        }
        for name, sound in kinds.items():
            mic = level * sound / sound.std() * (1 if name in ("white", "pink", "brown") else 0.7)
            found.append(VoiceCase("noise", f"{name} {level_db} dB", np.clip(mic, -1, 1), np.zeros(len(mic))))
    return found


def _bursts(rng: np.random.Generator, decay_s: float, low: float, high: float) -> np.ndarray:
    sound = 1e-4 * rng.standard_normal(10 * RATE)
    for start in np.arange(0.5, 9.5, 0.45) + rng.uniform(0, 0.2, 20):
        n = int(6 * decay_s * RATE)
        burst = band(rng.standard_normal(n), low, high) * np.exp(-np.arange(n) / RATE / decay_s)
        at = int(start * RATE)
        sound[at : at + n] += burst[: len(sound) - at]
    return sound


def _coughs(rng: np.random.Generator) -> np.ndarray:
    """An explosive burst of air, a weaker one after it, shaped by two wide resonances."""
    sound = 1e-4 * rng.standard_normal(10 * RATE)
    for start in np.arange(0.5, 9.0, 1.2):
        n = int(0.45 * RATE)
        time = np.arange(n) / RATE
        air = rng.standard_normal(n)
        tone = band(air, 350, 900) + band(air, 1200, 2600)
        shape = np.exp(-time / 0.05) + 0.35 * np.exp(-(((time - 0.22) / 0.06) ** 2))
        at = int(start * RATE)
        sound[at : at + n] += tone * shape
    return sound


def _music(rng: np.random.Generator, decay: float) -> np.ndarray:
    sound = np.zeros(10 * RATE)
    scale = 220 * 2 ** (np.array([0, 2, 4, 7, 9, 12, 14, 16]) / 12)
    for start in np.arange(0, 9.5, 0.5):
        notes = rng.choice(scale, 3 if decay < 1 else 1, replace=False)
        time = np.arange(int(1.2 * RATE)) / RATE
        tone = sum(np.sin(2 * np.pi * note * k * time) / k**1.5 for note in notes for k in range(1, 6))
        part = tone * np.exp(-time * decay) * np.minimum(1, time / 0.01)
        at = int(start * RATE)
        sound[at : at + len(part)] += part[: len(sound) - at]
    return sound


def echo_of(played: np.ndarray, delay_ms: float, level_db: float, rng: np.random.Generator) -> np.ndarray:
    """What a microphone hears of a loudspeaker: delay, room, a small loudspeaker's frequencies, noise."""
    room = np.zeros(int(0.3 * RATE))
    room[0] = 1
    tail = np.arange(len(room)) / RATE
    room += 0.15 * rng.standard_normal(len(room)) * np.exp(-tail / 0.08)
    heard = band(_convolved(played, room), 250, 6000)
    heard *= played.std() / heard.std() * 10 ** (level_db / 20)
    delay = int(delay_ms * RATE / 1000)
    mic = np.concatenate([np.zeros(delay), heard])[: len(played)]
    return mic + 1e-3 * rng.standard_normal(len(mic))


def _echo(rng: np.random.Generator) -> list[VoiceCase]:
    """The reply alone in a room without echo cancellation, and the user speaking over it."""
    found = []
    for mine, other in (("default", "high"), ("high", "default")):
        for delay_ms in (20, 60, 120, 250, 400):
            for level_db in (-30, -20, -10):
                played = 0.6 * np.tile(voice(mine), 3)
                mic = echo_of(played, delay_ms, level_db, rng)
                label = f"{delay_ms} ms {level_db} dB"
                found.append(VoiceCase("echo", f"{mine} {label}", mic, played))
                if level_db > -20:
                    continue  # after echo cancellation, what is left is quieter
                user = 0.6 * voice(other, 108)
                lead = int(1.5 * RATE)
                both = mic.copy()
                both[lead : lead + len(user)] += user
                found.append(VoiceCase("over echo", f"{other} over {mine} {label}", both, played, lead + begin(user)))
    return found
