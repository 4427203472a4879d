"""Builds `assets/warmup.mp4`: twelve seconds of drawn scenes with spoken sentences, for the warm-up of workers.

Run `python -m assets.build_warmup` from the root. Requires espeak-ng, and an imageio-ffmpeg whose ffmpeg has libx264
and AAC. The committed file was made with espeak-ng 1.51, ffmpeg 9.0.2 (imageio-ffmpeg 0.8.1), Pillow 13.0.0 and
NumPy 2. Encoding uses one thread and writes no date, so the same versions write the same file. Other versions may round
single pixels or samples differently.
"""

import argparse
import math
import subprocess
import tempfile
import wave
from collections.abc import Callable
from pathlib import Path

import imageio_ffmpeg
import numpy as np
from PIL import Image, ImageDraw

HERE = Path(__file__).parent
SIDE, FPS = 448, 15
SCENE_S = 2
FINE = 2  # scenes are drawn at this multiple of the size and scaled down for smooth edges
RATE = 22_050  # sample rate of espeak-ng
WORDS_PER_MINUTE = 190
PAUSE_S = 0.1  # before each sentence
PEAK = 0.7

Draw = ImageDraw.ImageDraw


def ball(pen: Draw, t: float) -> None:
    """A red ball rolls down a hill under a sun. t: time from 0 to 1, in every scene."""
    _sky(pen, (150, 205, 245), (225, 240, 250))
    _disc(pen, 0.8, 0.2, 0.09, (255, 215, 60))
    pen.polygon([_at(0, 0.45), _at(1, 0.85), _at(1, 1), _at(0, 1)], fill=(70, 150, 60))
    x = 0.1 + 0.75 * t * t
    y = 0.45 + 0.4 * x - 0.095
    _disc(pen, x, y, 0.085, (205, 40, 35))
    angle = 14 * (x - 0.1)
    _disc(pen, x + 0.05 * math.cos(angle), y + 0.05 * math.sin(angle), 0.02, (250, 235, 225))


def boat(pen: Draw, t: float) -> None:
    """A boat sails over waves."""
    _sky(pen, (250, 190, 130), (255, 235, 200))
    x, y = 0.15 + 0.6 * t, 0.6 + 0.02 * math.sin(9 * t)
    pen.polygon([_at(x, y - 0.4), _at(x, y - 0.08), _at(x + 0.22, y - 0.08)], fill=(250, 250, 245))
    pen.line([_at(x, y - 0.42), _at(x, y)], fill=(90, 60, 40), width=round(0.012 * SIDE * FINE))
    hull = [_at(x - 0.16, y - 0.03), _at(x + 0.22, y - 0.03), _at(x + 0.14, y + 0.08), _at(x - 0.1, y + 0.08)]
    pen.polygon(hull, fill=(120, 60, 35))
    for row, blue in enumerate((200, 170, 140)):
        line = [_at(i / 40, 0.66 + 0.1 * row + 0.02 * math.sin(i / 2.2 + row + 8 * t * (1 + row))) for i in range(41)]
        pen.polygon([*line, _at(1, 1), _at(0, 1)], fill=(25, 70 + blue // 4, blue))


def night(pen: Draw, t: float) -> None:
    """The moon rises over a house whose lights go on."""
    _sky(pen, (8, 10, 40), (40, 45, 100))
    luck = np.random.PCG64(7).random_raw(120).astype(np.float64) / 2**64
    for number, (x, y) in enumerate(luck.reshape(60, 2)):
        light = 140 + round(110 * math.sin(number + 6 * t) ** 2)
        _disc(pen, x, 0.7 * y, 0.004 + 0.003 * (number % 2), (light, light, light - 30))
    _disc(pen, 0.75, 0.6 - 0.38 * t, 0.11, (240, 240, 215))
    _disc(pen, 0.71, 0.57 - 0.38 * t, 0.02, (215, 215, 190))
    pen.rectangle([_at(0, 0.86), _at(1, 1)], fill=(15, 25, 20))
    pen.rectangle([_at(0.12, 0.55), _at(0.5, 0.88)], fill=(60, 45, 50))
    pen.polygon([_at(0.07, 0.56), _at(0.31, 0.36), _at(0.55, 0.56)], fill=(110, 40, 40))
    for number, x in enumerate((0.17, 0.28, 0.39)):
        lit = t > 0.15 + 0.28 * number
        pen.rectangle([_at(x, 0.63), _at(x + 0.07, 0.73)], fill=(255, 220, 110) if lit else (25, 25, 35))


def clock(pen: Draw, t: float) -> None:
    """A clock runs fast."""
    _sky(pen, (120, 90, 70), (170, 135, 105))
    _disc(pen, 0.5, 0.5, 0.4, (45, 35, 30))
    _disc(pen, 0.5, 0.5, 0.37, (245, 242, 230))
    for hour in range(12):
        _ray(pen, hour / 12, 0.3, 0.35, 0.02 if hour % 3 == 0 else 0.01)
    _ray(pen, (3 + 1.3 * t) / 12, -0.03, 0.19, 0.026)
    _ray(pen, 1.3 * t, -0.04, 0.28, 0.016)
    _disc(pen, 0.5, 0.5, 0.022, (190, 40, 40))


def street(pen: Draw, t: float) -> None:
    """A car waits at a red light and goes when it is green."""
    _sky(pen, (190, 200, 210), (215, 220, 225))
    for number, height in enumerate((0.3, 0.42, 0.25, 0.36, 0.48)):
        x = 0.2 * number
        pen.rectangle([_at(x, 0.68 - height), _at(x + 0.19, 0.7)], fill=(150 - 15 * number, 110 + 9 * number, 105))
        for window in range(int(height / 0.08) - 1):
            y = 0.72 - height + 0.08 * window
            pen.rectangle([_at(x + 0.03, y), _at(x + 0.16, y + 0.035)], fill=(225, 225, 190))
    pen.rectangle([_at(0, 0.7), _at(1, 1)], fill=(70, 70, 75))
    for number in range(6):
        pen.rectangle([_at(0.2 * number, 0.89), _at(0.2 * number + 0.1, 0.905)], fill=(230, 230, 230))
    goes = t > 0.45
    x = 0.1 + (1.1 * (t - 0.45) ** 2 / 0.55 if goes else 0)
    pen.rounded_rectangle([_at(x, 0.71), _at(x + 0.4, 0.82)], radius=0.03 * SIDE * FINE, fill=(30, 90, 190))
    roof = [_at(x + 0.07, 0.72), _at(x + 0.13, 0.62), _at(x + 0.29, 0.62), _at(x + 0.35, 0.72)]
    pen.polygon(roof, fill=(25, 70, 150))
    for wheel in (x + 0.09, x + 0.31):
        _disc(pen, wheel, 0.82, 0.05, (20, 20, 20))
        _disc(pen, wheel, 0.82, 0.022, (170, 170, 175))
    pen.rectangle([_at(0.79, 0.5), _at(0.805, 0.72)], fill=(40, 40, 40))
    pen.rectangle([_at(0.745, 0.2), _at(0.85, 0.52)], fill=(30, 30, 30))
    for row, (lit, color) in enumerate(((not goes, (240, 40, 30)), (False, (250, 190, 40)), (goes, (50, 220, 80)))):
        _disc(pen, 0.7975, 0.255 + 0.1 * row, 0.042, color if lit else tuple(value // 4 for value in color))


def garden(pen: Draw, t: float) -> None:
    """Flowers grow in the rain."""
    _sky(pen, (95, 120, 140), (150, 170, 175))
    pen.rectangle([_at(0, 0.8), _at(1, 1)], fill=(95, 65, 45))
    luck = np.random.PCG64(11).random_raw(160).astype(np.float64) / 2**64
    for x, start in luck.reshape(80, 2):
        y = (start + 3 * t) % 1 - 0.05
        pen.line([_at(x, y), _at(x - 0.01, y + 0.05)], fill=(200, 220, 235), width=FINE)
    for number, color in enumerate(((240, 90, 140), (250, 200, 60), (150, 90, 220), (245, 120, 50))):
        x, height = 0.14 + 0.24 * number, 0.12 + (0.2 + 0.09 * (number % 2)) * t
        top = 0.82 - height
        pen.line([_at(x, 0.82), _at(x, top)], fill=(50, 130, 55), width=round(0.02 * SIDE * FINE))
        for petal in range(6):
            angle = math.tau * petal / 6 + t
            _disc(pen, x + 0.05 * math.cos(angle), top + 0.05 * math.sin(angle), 0.02 + 0.025 * t, color)
        _disc(pen, x, top, 0.028, (120, 75, 30))


# Scenes of SCENE_S seconds, and the sentence spoken in each.
SCENES: tuple[tuple[Callable[[Draw, float], None], str], ...] = (
    (ball, "A red ball rolls down the hill."),
    (boat, "The little boat sails to the island."),
    (night, "At night the moon shines on my house."),
    (clock, "What time is it? It is past three."),
    (street, "The blue car waits for the green light."),
    (garden, "Do you like the flowers in the rain?"),
)


def _at(x: float, y: float) -> tuple[float, float]:
    """A position in the picture, both coordinates 0 to 1, in pixels."""
    return x * SIDE * FINE, y * SIDE * FINE


def _disc(pen: Draw, x: float, y: float, radius: float, color: tuple[int, ...]) -> None:
    pen.ellipse([_at(x - radius, y - radius), _at(x + radius, y + radius)], fill=color)


def _ray(pen: Draw, turn: float, inner: float, outer: float, width: float) -> None:
    """Part of a clock hand or a mark. turn: 0 to 1 clockwise from the top."""
    dx, dy = math.sin(math.tau * turn), -math.cos(math.tau * turn)
    ends = [_at(0.5 + length * dx, 0.5 + length * dy) for length in (inner, outer)]
    pen.line(ends, fill=(35, 30, 30), width=round(width * SIDE * FINE))


def _sky(pen: Draw, top: tuple[int, int, int], bottom: tuple[int, int, int]) -> None:
    side = SIDE * FINE
    for y in range(0, side, FINE):
        share = y / side
        color = tuple(round(a + share * (b - a)) for a, b in zip(top, bottom, strict=True))
        pen.rectangle([(0, y), (side, y + FINE)], fill=color)


def picture(number: int) -> Image.Image:
    """The frame with this index."""
    scene, at = divmod(number, SCENE_S * FPS)
    image = Image.new("RGB", (SIDE * FINE, SIDE * FINE))
    draw, _ = SCENES[scene]
    draw(ImageDraw.Draw(image), at / (SCENE_S * FPS))
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


def speech() -> np.ndarray:
    """[n] float64 in [-1, 1] at 22 050 Hz: one sentence in each scene.

    Raises: ValueError for a sentence that is longer than its scene.
    """
    sound = np.zeros(len(SCENES) * SCENE_S * RATE)
    for number, (_, sentence) in enumerate(SCENES):
        voice = "en-us+m3" if number % 2 else "en-us+f2"
        spoken = _spoken(sentence, voice)
        start = round((number * SCENE_S + PAUSE_S) * RATE)
        if len(spoken) > (SCENE_S - PAUSE_S) * RATE:
            raise ValueError(f"{sentence!r}: expected at most {SCENE_S - PAUSE_S} s, got {len(spoken) / RATE:.2f} s")
        sound[start : start + len(spoken)] = spoken
    return PEAK * sound / np.abs(sound).max()


def _spoken(sentence: str, voice: str) -> np.ndarray:
    """[n] float64 samples of one sentence, without silence at both ends."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spoken.wav"
        command = ["espeak-ng", "-v", voice, "-s", str(WORDS_PER_MINUTE), "-w", str(path), sentence]
        subprocess.run(command, check=True)
        with wave.open(str(path)) as file:
            assert file.getframerate() == RATE, f"espeak-ng: expected {RATE} Hz, got {file.getframerate()}"
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    loud = np.flatnonzero(np.abs(samples) > 0.005)
    return samples[loud[0] : loud[-1] + 1]


def main(out: Path) -> None:
    """Write the file; an existing one is replaced."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wav = Path(folder) / "speech.wav"
        with wave.open(str(wav), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(np.round(speech() * 32767).astype("<i2").tobytes())
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-loglevel", "error", "-y"]
        command += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{SIDE}x{SIDE}", "-r", str(FPS), "-i", "pipe:"]
        command += ["-i", str(wav), "-map_metadata", "-1", "-fflags", "+bitexact"]
        command += ["-c:v", "libx264", "-preset", "slow", "-crf", "24", "-pix_fmt", "yuv420p", "-threads", "1"]
        command += ["-flags:v", "+bitexact", "-c:a", "aac", "-b:a", "64k", "-ac", "1", "-flags:a", "+bitexact"]
        command += ["-movflags", "+faststart", str(out)]
        frames = (picture(number).tobytes() for number in range(len(SCENES) * SCENE_S * FPS))
        subprocess.run(command, input=b"".join(frames), check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "warmup.mp4")
    main(parser.parse_args().out)
