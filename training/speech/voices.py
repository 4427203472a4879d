"""The voices that speak the training sentences, and how each engine is called: text to samples and timed phonemes.

Engines: flite and festival print the time of every phoneme (both of the CMU phone set), espeak-ng does not. The speaker
kal of any engine is never used, so that it stays unseen.

Programs are taken from the folder `$SPEECH_TOOLS` (made by `training.speech.pack`), or else from the system.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import soundfile
import soxr

from models.errors import ModelError
from training.speech.festival import Festival

RATE = 24_000
TOKEN_SAMPLES = 960
LEVEL = 0.08  # root mean square of every utterance
PEAK = 0.95
MAX_TEXTS = 500  # of one festival process

Engine = Literal["festival", "flite", "espeak-ng"]
ENGINES: tuple[Engine, ...] = get_args(Engine)


class Segment(NamedTuple):
    """One phoneme and the time of its end."""

    phone: str
    end: float  # s


@dataclass(frozen=True)
class SpeechVoice:
    """One voice of the corpus; `speed` above one raises pitch, formants and tempo together."""

    name: str
    engine: Engine
    voice: str
    weight: float  # share of the corpus
    speed: float = 1.0
    words_per_minute: int = 165  # espeak-ng only


TARGET = "slt-hts"  # the talker's own voice
VOICES = (
    SpeechVoice(TARGET, "festival", "voice_cmu_us_slt_arctic_hts", 0.42),
    SpeechVoice("slt", "flite", "slt", 0.09),
    SpeechVoice("rms", "flite", "rms", 0.10),
    SpeechVoice("awb", "flite", "awb", 0.10),
    SpeechVoice("slt-high", "flite", "slt", 0.05, speed=1.12),
    SpeechVoice("slt-low", "flite", "slt", 0.05, speed=0.88),
    SpeechVoice("rms-high", "flite", "rms", 0.05, speed=1.15),
    SpeechVoice("awb-low", "flite", "awb", 0.05, speed=0.9),
    SpeechVoice("espeak-m3", "espeak-ng", "en-us+m3", 0.02, words_per_minute=150),
    SpeechVoice("espeak-f2", "espeak-ng", "en-gb+f2", 0.02, words_per_minute=170),
    SpeechVoice("espeak-m7", "espeak-ng", "en-gb+m7", 0.02, words_per_minute=190),
    SpeechVoice("espeak-f4", "espeak-ng", "en-us+f4", 0.02, words_per_minute=140),
)


class Spoken(NamedTuple):
    """One utterance at 24 kHz, a whole number of speech tokens long."""

    wave: np.ndarray  # [n] int16
    segments: list[Segment]  # empty without times


def speak(voice: SpeechVoice, texts: Sequence[str]) -> list[Spoken]:
    """The utterances of these texts, in order. Raises: ModelError if the engine fails."""
    with tempfile.TemporaryDirectory() as folder:
        match voice.engine:
            case "festival":
                return _festival(voice, texts, Path(folder))
            case "flite":
                return [_flite(voice, text, Path(folder)) for text in texts]
            case "espeak-ng":
                return [_espeak(voice, text, Path(folder)) for text in texts]


def tool(name: Engine) -> list[str]:
    """The start of a command line of this engine."""
    folder = os.environ.get("SPEECH_TOOLS")
    if folder:
        return [str(Path(folder) / name)]
    found = shutil.which(name)
    if found is None:
        raise ModelError(name, expected="the program, on the path or in $SPEECH_TOOLS", got="none")
    return [found]


def _flite(voice: SpeechVoice, text: str, folder: Path) -> Spoken:
    out = folder / "out.wav"
    told = _run([*tool("flite"), "-voice", voice.voice, "-psdur", "-t", text, "-o", str(out)])
    segments = [Segment(phone, float(end)) for phone, end in (part.rsplit(":", 1) for part in told.split())]
    return _finished(voice, out, segments)


def _festival(voice: SpeechVoice, texts: Sequence[str], folder: Path) -> list[Spoken]:
    spoken = []
    for n, text in enumerate(texts):
        try:
            _running_festival(voice.voice).speak(text, folder / f"{n}.wav", folder / f"{n}.segs")
        except ModelError:
            _end_festival(voice.voice)
            raise
        rows = (line.split() for line in (folder / f"{n}.segs").read_text().splitlines() if line != "#")
        spoken.append(_finished(voice, folder / f"{n}.wav", [Segment(row[2], float(row[0])) for row in rows]))
    return spoken


_festivals: dict[tuple[int, str], Festival] = {}  # by process, so that none is shared after a fork, and voice


def _running_festival(voice: str) -> Festival:
    """The festival of this process with a voice; a new one after MAX_TEXTS, which bounds its memory."""
    key = (os.getpid(), voice)
    if key in _festivals and _festivals[key].n_texts >= MAX_TEXTS:
        _end_festival(voice)
    if key not in _festivals:
        _festivals[key] = Festival(tool("festival"), voice)
    return _festivals[key]


def _end_festival(voice: str) -> None:
    if (running := _festivals.pop((os.getpid(), voice), None)) is not None:
        running.close()


def _espeak(voice: SpeechVoice, text: str, folder: Path) -> Spoken:
    out = folder / "out.wav"
    _run([*tool("espeak-ng"), "-v", voice.voice, "-s", str(voice.words_per_minute), "-w", str(out), text])
    return _finished(voice, out, [])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise ModelError(command[0], expected="exit status 0", got=f"{done.returncode}: {done.stderr[-300:]}")
    return done.stdout


def _finished(voice: SpeechVoice, file: Path, segments: list[Segment]) -> Spoken:
    wave, rate = soundfile.read(file, dtype="float32")
    wave = soxr.resample(wave, rate * voice.speed, RATE, quality="HQ")
    wave = wave - wave.mean()
    level = float(np.sqrt(np.square(wave).mean())) or 1.0
    gain = min(LEVEL / level, PEAK / max(float(np.abs(wave).max()), 1e-6))
    wave = np.pad(wave * gain, (0, -len(wave) % TOKEN_SAMPLES))
    samples = np.clip(wave * 32_767, -32_768, 32_767).astype(np.int16)
    return Spoken(samples, [Segment(one.phone, one.end / voice.speed) for one in segments])
