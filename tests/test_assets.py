"""The warm-up video, the reference voices and the talker: sizes, contents, and agreement with what builds them."""

import io
import wave
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from assets.build_ref_audio import SPEAKERS, synthesize
from assets.build_warmup import FPS, SCENE_S, SCENES, picture
from models.checkpoint.checksums import check_files
from models.inputs.audio_sizes import UNIT_SAMPLES
from worker.media import MediaUnit, read_units

MAX_BYTES = 600_000
MIN_UNITS = 10
LENGTH_S = len(SCENES) * SCENE_S
RATE = 16_000


@pytest.fixture(scope="module")
def units(root: Path) -> list[MediaUnit]:
    return list(read_units(root / "assets" / "warmup.mp4"))


def test_video_is_small_and_long_enough(root: Path, units: list[MediaUnit]) -> None:
    size = (root / "assets" / "warmup.mp4").stat().st_size
    assert size <= MAX_BYTES, f"expected at most {MAX_BYTES} bytes, got {size}"
    whole = [unit for unit in units if unit.n_samples == UNIT_SAMPLES and len(unit.frames) == 1]
    assert len(whole) == len(units) == LENGTH_S >= MIN_UNITS, f"got {len(whole)} whole of {len(units)}"


def test_pictures_change_every_second_after_jpeg(units: list[MediaUnit]) -> None:
    encoded = []
    for unit in units:
        jpeg = io.BytesIO()
        unit.frames[0].save(jpeg, "JPEG", quality=90)
        encoded.append(jpeg.getvalue())
    assert len(set(encoded)) == len(encoded), "expected another picture each second"
    decoded = [np.asarray(Image.open(io.BytesIO(jpeg)), float) for jpeg in encoded]
    moved = [abs(one - other).mean() for one, other in pairwise(decoded)]
    assert min(moved) > 2, f"levels that change per second: expected more than 2 on average, got {min(moved):.2f}"


def test_video_matches_its_script(units: list[MediaUnit]) -> None:
    """Each second shows the frame drawn for it, up to the codec's loss."""
    for number in (0, 3, 6, 9):
        shown = np.asarray(units[number].frames[0], float)
        first = number * FPS
        off = min(abs(shown - np.asarray(picture(at), float)).mean() for at in range(first, first + FPS))
        assert off < 4, f"second {number}: expected at most 4 levels from what is drawn, got {off:.1f}"


def test_speech_fills_most_of_the_video(units: list[MediaUnit]) -> None:
    loud = [float(np.sqrt((unit.sound**2).mean())) for unit in units]
    assert sum(rms > 0.03 for rms in loud) >= MIN_UNITS, f"expected speech in most seconds, got RMS {loud}"
    peak = max(float(abs(unit.sound).max()) for unit in units)
    assert 0.3 < peak < 1, f"expected a level that does not clip, got {peak}"
    for number, unit in enumerate(units):
        power = abs(np.fft.rfft(unit.sound)) ** 2
        at = np.fft.rfftfreq(UNIT_SAMPLES, 1 / RATE)
        share = power[(at > 80) & (at < 4000)].sum() / power.sum()
        assert share > 0.8, f"second {number}: expected most of it where speech is, got {share:.2f}"
        steps = unit.sound.reshape(50, -1)
        rms = np.sqrt((steps**2).mean(1))
        assert rms.max() > 4 * rms.min(), f"second {number}: expected syllables, got steady sound"


@pytest.mark.parametrize("name", sorted(SPEAKERS))
def test_voice_matches_its_script(root: Path, name: str) -> None:
    committed = voice(root, name)
    built = synthesize(SPEAKERS[name])
    assert 0.5 * RATE <= len(committed) <= 30 * RATE and len(committed) == len(built)
    off = abs(32767 * (committed - built)).max()
    assert off <= 2, f"expected the same samples but for rounding, got {off} steps apart"
    assert 0.3 < abs(committed).max() < 1


def test_voices_differ(root: Path) -> None:
    names = {path.stem for path in (root / "assets" / "ref_audio").glob("*.wav")}
    assert names == SPEAKERS.keys(), f"expected a file for each voice, got {names}"
    low, high = (pitch(voice(root, name)) for name in ("default", "high"))
    assert 90 < low < 140 and 170 < high < 240, f"expected a low and a high voice, got {low:.0f} and {high:.0f} Hz"


def voice(root: Path, name: str) -> np.ndarray:
    """[n] float64 at 16 kHz."""
    with wave.open(str(root / "assets" / "ref_audio" / f"{name}.wav")) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32767


def pitch(sound: np.ndarray) -> float:
    """Median fundamental frequency in Hz over the spans with enough energy."""
    found = []
    for start in range(0, len(sound) - 1024, 512):
        window = sound[start : start + 1024] * np.hanning(1024)
        if abs(window).max() > 0.05:
            alike = np.fft.irfft(abs(np.fft.rfft(window, 4096)) ** 2)
            found.append(RATE / (40 + np.argmax(alike[40:300])))
    return float(np.median(found))


def test_files_of_the_talker_equal_their_checksums(root: Path) -> None:
    assert check_files(root / "assets" / "talker") > 0
