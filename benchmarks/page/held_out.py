"""Sounds of other speakers, noises and rooms than those on which the thresholds of the voice detector were chosen."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from benchmarks.page.recordings import HELD_OUT, READER, SpeechArchive, onsets
from benchmarks.page.sounds import RATE, VoiceCase, band, coloured, echo_of

SECONDS = 10
AFTER_S = (0.1, 0.25, 0.4, 0.6, 0.8, 1.0, 1.4, 2.1)  # of the reply, when the user begins
REPLIES = ((READER.format(890), 0.2, 5.3), ("regression/chan3.raw", 5.7, 11.2))
USERS = (("data/forever/input_2_16k.wav", 0.13, 2.2), (READER.format(870), 0.2, 2.4))


def held_out_cases(recordings: SpeechArchive, seed: int = 1) -> list[VoiceCase]:
    rng = np.random.default_rng(seed)
    cases = [*recordings.cases(HELD_OUT, rng), *_noise(rng), *_echo(recordings, rng), *_interruptions(recordings, rng)]
    return [*cases, *_cancelled(recordings, rng)]


def _noise(rng: np.random.Generator) -> Iterator[VoiceCase]:
    n = SECONDS * RATE
    time = np.arange(n) / RATE

    def repeated(make: Callable[[np.ndarray], np.ndarray], seconds: float, every: float) -> np.ndarray:
        sound = 1e-4 * rng.standard_normal(n)
        for start in np.arange(0.4, 9.2, every):
            part = make(np.arange(int(seconds * RATE)) / RATE)
            at = int((start + rng.uniform(0, 0.1)) * RATE)
            sound[at : at + len(part)] += part[: n - at]
        return sound

    def noise(t: np.ndarray) -> np.ndarray:
        return rng.standard_normal(len(t))

    def tones(t: np.ndarray, frequency: np.ndarray, n_tones: int) -> np.ndarray:
        phase = 2 * np.pi * np.cumsum(frequency * np.ones(len(t))) / RATE
        return sum(np.sin(k * phase) / k for k in range(1, n_tones))

    def cough(t: np.ndarray) -> np.ndarray:
        air = noise(t)
        breath = band(air, 250, 700) + band(air, 1500, 3200)
        voice = band(tones(t, 140 + 60 * np.exp(-t / 0.05), 12), 200, 2500)
        shape = np.exp(-t / 0.04) + 0.4 * np.exp(-(((t - 0.2) / 0.05) ** 2))
        return breath * shape + 0.25 * voice * np.exp(-(((t - 0.17) / 0.05) ** 2))

    def bark(t: np.ndarray) -> np.ndarray:
        return tones(t, 500 - 900 * t, 9) * np.exp(-t / 0.06) + 0.3 * noise(t) * np.exp(-t / 0.05)

    def bell(t: np.ndarray) -> np.ndarray:
        return sum(np.sin(2 * np.pi * 523 * k * t) * np.exp(-2 * k * t) for k in (1, 2, 3))

    def bird(t: np.ndarray) -> np.ndarray:
        return tones(t, 2500 + 1500 * np.sin(2 * np.pi * 20 * t), 2) * np.sin(np.pi * t / 0.15)

    def drum(t: np.ndarray) -> np.ndarray:
        return tones(t, 60 + 120 * np.exp(-t / 0.02), 2) * np.exp(-t / 0.08)

    def organ(t: np.ndarray) -> np.ndarray:
        return sum(tones(t, np.full(len(t), f), 6) for f in rng.choice(ORGAN, 3, replace=False))

    sounds = {
        "hum": tones(time, np.full(n, 50.0), 12),
        "fan": coloured(rng, SECONDS, 1.5) * (1 + 0.4 * np.sin(2 * np.pi * 7 * time)),
        "vacuum cleaner": band(noise(time), 300, 4000) + 0.8 * tones(time, np.full(n, 230.0), 8),
        "rain": sum(repeated(lambda t: noise(t) * np.exp(-t / 0.002), 0.02, 0.011) for _ in range(3)),
        "barks": repeated(bark, 0.18, 0.7),
        "voiced coughs": repeated(cough, 0.35, 1.1),
        "slams": repeated(lambda t: band(noise(t), 40, 900) * np.exp(-t / 0.07), 0.5, 1.3),
        "bells": repeated(bell, 1.0, 1.1),
        "breaths": repeated(lambda t: band(noise(t), 500, 3500) * np.sin(np.pi * t / 0.7) ** 2, 0.7, 1.4),
        "drums": repeated(drum, 0.2, 0.3),
        "birds": repeated(bird, 0.15, 0.4),
        "organ": repeated(organ, 0.6, 0.6),
    }
    for level_db in (-40, -26, -14):
        for name, sound in sounds.items():
            mic = np.clip(10 ** (level_db / 20) * sound / sound.std(), -1, 1)
            yield VoiceCase("noise", f"{name} {level_db} dB", mic, np.zeros(n))


ORGAN = 130 * 2 ** (np.array([0, 3, 5, 7, 10, 12, 15]) / 12)


def _echo(recordings: SpeechArchive, rng: np.random.Generator) -> Iterator[VoiceCase]:
    """A reply without echo cancellation, alone and with the user over it from 2.1 s on."""
    for reply, user in zip(REPLIES, USERS, strict=True):
        played, said = recordings.sound(*reply), recordings.sound(*user)
        for delay_ms in (30, 75, 150, 270, 420):
            for level_db in (-30, -20, -10):
                mic = echo_of(played, delay_ms, level_db, rng)
                label = f"{reply[0]} {delay_ms} ms {level_db} dB"
                yield VoiceCase("echo", label, mic, played)
                if level_db <= -20:
                    yield _over("over echo", label, mic, played, said, 2.1)


def _interruptions(recordings: SpeechArchive, rng: np.random.Generator) -> Iterator[VoiceCase]:
    """The user over the first seconds of the first reply, with headphones and with echo: nothing is learned yet."""
    silence = np.zeros(RATE)
    for reply, user in zip(REPLIES, USERS, strict=True):
        played, said = np.concatenate([silence, recordings.sound(*reply)]), recordings.sound(*user)
        for level_db in (None, -30, -20):
            for after_s in (0.25, 0.6, 1.0, 2.1):
                delay_ms = int(rng.choice([25, 60, 130, 220]))
                mic = 1e-3 * rng.standard_normal(len(played))
                if level_db is not None:
                    mic = echo_of(played, delay_ms, level_db, rng)
                kind = "over a new reply, headphones" if level_db is None else "over a new reply, echo"
                yield _over(kind, f"{user[0]} {level_db} dB after {after_s} s", mic, played, said, 1 + after_s)


def _cancelled(recordings: SpeechArchive, rng: np.random.Generator) -> Iterator[VoiceCase]:
    """The first reply after the browser's echo canceller, alone and with the user over its first seconds."""
    for reply, user in zip(REPLIES, USERS, strict=True):
        played = np.concatenate([np.zeros(RATE), recordings.sound(*reply)])
        said = recordings.sound(*user)
        for delay_ms in (30, 75, 150, 270, 420):
            label = f"{reply[0]} {delay_ms} ms"
            mics = {f"{db} dB": echo_of(played, delay_ms, db, rng) for db in (-50, -40, -30)}
            mics["-5 dB, after 0.6 s -50 dB"] = _adapting(played, delay_ms, rng)
            for name, mic in mics.items():
                yield VoiceCase("echo of a new reply, canceller", f"{label} {name}", mic, played, is_cancelled=True)
            for level_db in (-20, -10):
                mic = echo_of(played, delay_ms, level_db, rng)
                kind = f"echo of a new reply, failed canceller, {level_db} dB"
                yield VoiceCase(kind, label, mic, played, is_cancelled=True)
        for level_db in (None, -50, -40):
            for after_s in AFTER_S:
                delay_ms = int(rng.choice([25, 60, 130, 220]))
                mic = 1e-3 * rng.standard_normal(len(played))
                if level_db is not None:
                    mic = echo_of(played, delay_ms, level_db, rng)
                label = f"{user[0]} {level_db} dB after {after_s} s"
                case = _over("over a new reply, canceller", label, mic, played, said, 1 + after_s)
                yield replace(case, is_cancelled=True)


def _adapting(played: np.ndarray, delay_ms: float, rng: np.random.Generator) -> np.ndarray:
    """Echo of a canceller that adapts: -5 dB at the reply's begin, 45 dB less 0.6 s later."""
    begin_s = np.argmax(np.abs(played) > 0.01) / RATE
    since_s = np.clip(np.arange(len(played)) / RATE - begin_s, 0, 0.6)
    left = 10 ** (-45 / 20 * since_s / 0.6)
    return left * echo_of(played, delay_ms, -5, rng) + 1e-3 * rng.standard_normal(len(played))


def _over(kind: str, label: str, mic: np.ndarray, played: np.ndarray, said: np.ndarray, at_s: float) -> VoiceCase:
    lead = int(at_s * RATE)
    both = mic.copy()
    both[lead : lead + len(said)] += said[: len(both) - lead]
    return VoiceCase(kind, label, both, played, lead + onsets(said)[0])
