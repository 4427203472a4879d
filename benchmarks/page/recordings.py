"""Recorded speech for the voice detector, from the test data in the source package of pocketsphinx.

    pip download --no-deps --no-binary pocketsphinx pocketsphinx==5.1.1

The two halves have no speaker in common. Every utterance is a case: peak 0.3, in pink noise that begins 1 s earlier.
"""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile

from benchmarks.page.sounds import RATE, VoiceCase, coloured

TUNING = (
    *(f"data/cards/00{n}.wav" for n in range(1, 6)),
    *(f"data/{name}.raw" for name in ("goforward", "something", "numbers")),
)
READER = "data/librivox/sense_and_sensibility_01_austen_64kb-0{}.wav"
HELD_OUT = (
    *(READER.format(n) for n in (870, 880, 890, 920, 930)),
    *(
        "data/forever/input_2_16k.wav",
        "data/forever/input_4_16k.wav",
        "data/tidigits/dhd.2934z.raw",
        "regression/chan3.raw",
    ),
)
FRAME = 160  # samples: 10 ms
LOUD, QUIET = 0.1, 0.06  # of the loudest frame
BEFORE, AFTER = 25, 20  # frames: quiet ones before an onset, and those after it of which 80 % are not quiet
KEPT_S = 2.5


class SpeechArchive:
    """The recordings of an archive."""

    def __init__(self, archive: Path):
        with tarfile.open(archive) as files:
            root = Path(files.getnames()[0]).parts[0]
            self._sounds = {name: _decoded(name, _read(files, f"{root}/test/{name}")) for name in (*TUNING, *HELD_OUT)}

    def sound(self, name: str, begin_s: float = 0.0, end_s: float | None = None) -> np.ndarray:
        """A part of a recording, peak 0.3."""
        part = self._sounds[name][int(begin_s * RATE) : None if end_s is None else int(end_s * RATE)]
        return 0.3 * part / np.abs(part).max()

    def cases(self, names: tuple[str, ...], rng: np.random.Generator) -> Iterator[VoiceCase]:
        for name in names:
            sound = self._sounds[name]
            for onset in onsets(sound):
                start = max(0, onset - 800)
                part = sound[start : onset + int(KEPT_S * RATE)]
                if len(part) < RATE // 2:
                    continue
                for noise_db in (-60, -40, -30):
                    for shift in (0, 170, 340):  # against the detector's windows
                        lead = RATE + shift
                        mic = np.concatenate([np.zeros(lead), 0.3 * part / np.abs(part).max()])
                        mic += 10 ** (noise_db / 20) * coloured(rng, len(mic) / RATE + 0.01, 1)[: len(mic)]
                        label = f"{Path(name).name} at {onset / RATE:.2f} s, noise {noise_db} dB, {shift}"
                        yield VoiceCase("speech", label, mic, np.zeros(len(mic)), lead + onset - start)


def _read(files: tarfile.TarFile, name: str) -> bytes:
    file = files.extractfile(name)
    assert file is not None, f"{name}: expected a file, got a folder"
    return file.read()


def _decoded(name: str, data: bytes) -> np.ndarray:
    if name.endswith(".raw"):
        return np.frombuffer(data, "<i2") / 32768
    sound, rate = soundfile.read(io.BytesIO(data))
    assert rate == RATE, f"{name}: expected {RATE} Hz, got {rate}"
    return sound


def onsets(sound: np.ndarray) -> list[int]:
    """Samples at which speech begins: loud after quiet, and not a click."""
    n = len(sound) // FRAME
    level = np.sqrt((sound[: n * FRAME].reshape(-1, FRAME) ** 2).mean(1))
    loud, quiet = level > LOUD * level.max(), level < QUIET * level.max()
    found, n_quiet = [], BEFORE
    for frame in range(n - AFTER):
        if not loud[frame]:
            n_quiet += quiet[frame]
        elif n_quiet < BEFORE:
            n_quiet = 0
        elif np.mean(~quiet[frame : frame + AFTER]) >= 0.8:
            found.append(frame * FRAME)
            n_quiet = 0
    return found
