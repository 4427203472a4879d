"""Pictures of scenes as a camera sends them: objects on a background, light, blur, noise, JPEG.

A look (background, light, size, turn, noise) is drawn once for a scene and kept over its units, so that only what the
label says changes from frame to frame.
"""

import io
import math
import random
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter

from training.scenes.drawing import Color, draw_object, named_color
from training.scenes.labels import Place, Shown

FRAME_SIDE = 448  # as the page's camera sends
NOISE_SIDE = 1024  # of the field that the noise of each frame is cut from
MIN_CONTRAST = 90  # levels between an object and its background, in the channel where they differ most
CENTERS: dict[Place, tuple[float, float]] = {
    "on the left": (-0.27, 0),
    "on the right": (0.27, 0),
    "at the top": (0, -0.27),
    "at the bottom": (0, 0.27),
    "in the middle": (0, 0),
}


@dataclass(frozen=True)
class Look:
    """How a scene looks beside its label.

    Args:
        seed: of everything that one frame draws for itself.
        color: of the objects; None for things.
        background: base color.
        texture: plain, gradient, stripes or clutter.
        size: of an object as a share of the picture's side.
        turn: degrees.
        brightness, contrast, warmth: of the light; 1, 1 and 0 change nothing.
        blur: radius in pixels. noise: standard deviation in levels. quality: of the JPEG.
    """

    seed: int
    color: Color | None
    background: Color
    texture: str
    size: float
    turn: float
    brightness: float
    contrast: float
    warmth: float
    blur: float
    noise: float
    quality: int


def draw_look(shown: Shown | None, rng: random.Random) -> Look:
    """A random look, in which the object's color differs from the background's."""
    color = None if shown is None or shown.color is None else named_color(shown.color, rng)
    background = _random_background(rng)
    while color is not None and max(abs(a - b) for a, b in zip(color, background, strict=True)) < MIN_CONTRAST:
        background = _random_background(rng)
    if shown is None or shown.count == 1:
        largest = 0.42 if shown is not None and shown.place != "in the middle" else 0.85
        size = rng.uniform(0.3, largest)
    else:
        size = rng.uniform(0.2, 0.26)
    return Look(
        seed=rng.getrandbits(32),
        color=color,
        background=background,
        texture=rng.choice(("plain", "gradient", "stripes", "clutter")),
        size=size,
        turn=rng.gauss(0, 8),
        brightness=rng.uniform(0.7, 1.2),
        contrast=rng.uniform(0.75, 1.15),
        warmth=rng.uniform(-0.1, 0.1),
        blur=max(0.0, rng.gauss(0.4, 0.7)),
        noise=rng.uniform(0, 9),
        quality=rng.randint(45, 92),
    )


def render(shown: Shown | None, look: Look, frame: int = 0, offset: tuple[float, float] | None = None) -> Image.Image:
    """One frame.

    Args:
        shown: None: only the background.
        frame: number of the unit; it changes the noise and a small shake.
        offset: of the object's center from the picture's middle, in shares of its side; None: by the label's place.
    Returns: 448 x 448 RGB.
    """
    steady, shaken = random.Random(look.seed), random.Random(f"{look.seed} {frame}")
    picture = _background(look, steady)
    if shown is not None:
        single = draw_object(shown, look.color, steady)
        side = round(look.size * FRAME_SIDE)
        centers = _centers(shown, steady) if offset is None else [offset]
        for x, y in centers:
            turned = single.resize((side, side), Image.Resampling.BICUBIC)
            turned = turned.rotate(look.turn + steady.gauss(0, 3), Image.Resampling.BICUBIC, expand=True)
            left = round((0.5 + x) * FRAME_SIDE - turned.width / 2 + shaken.gauss(0, 2))
            top = round((0.5 + y) * FRAME_SIDE - turned.height / 2 + shaken.gauss(0, 2))
            picture.paste(turned, (left, top), turned)
    return _camera(picture, look, shaken)


def jpeg(picture: Image.Image, quality: int) -> bytes:
    """The file that the page would send."""
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=quality)
    return out.getvalue()


def _random_background(rng: random.Random) -> Color:
    if rng.random() < 0.5:
        level = rng.randint(20, 235)
        red, green, blue = (max(0, min(255, level + rng.randint(-18, 18))) for _ in range(3))
        return red, green, blue
    return rng.randint(20, 235), rng.randint(20, 235), rng.randint(20, 235)


def _centers(shown: Shown, rng: random.Random) -> list[tuple[float, float]]:
    if shown.count == 1:
        x, y = CENTERS[shown.place]
        return [(x + rng.uniform(-0.04, 0.04), y + rng.uniform(-0.04, 0.04))]
    cells = [(column, row) for row in (-1, 0, 1) for column in (-1, 0, 1)]
    return [
        (0.3 * column + rng.uniform(-0.03, 0.03), 0.3 * row + rng.uniform(-0.03, 0.03))
        for column, row in rng.sample(cells, shown.count)
    ]


def _background(look: Look, rng: random.Random) -> Image.Image:
    base = np.array(look.background, np.float32)
    if look.texture == "gradient":
        angle = rng.uniform(0, 2 * math.pi)
        y, x = np.mgrid[-0.5 : 0.5 : FRAME_SIDE * 1j, -0.5 : 0.5 : FRAME_SIDE * 1j]
        ramp = (math.cos(angle) * x + math.sin(angle) * y)[..., None]
        return Image.fromarray((base + 60 * ramp).clip(0, 255).astype(np.uint8))
    picture = Image.new("RGB", (FRAME_SIDE, FRAME_SIDE), look.background)
    draw = ImageDraw.Draw(picture)
    near: list[Color] = []
    for _ in range(4):
        red, green, blue = (max(0, min(255, level + rng.randint(-22, 22))) for level in look.background)
        near.append((red, green, blue))
    if look.texture == "stripes":
        step = rng.randint(30, 90)
        for i in range(-FRAME_SIDE, 2 * FRAME_SIDE, 2 * step):
            draw.polygon([(i, 0), (i + step, 0), (i + step + 60, FRAME_SIDE), (i + 60, FRAME_SIDE)], fill=near[0])
    elif look.texture == "clutter":
        for color in 2 * near:
            x, y = rng.randint(-60, FRAME_SIDE), rng.randint(-60, FRAME_SIDE)
            draw.rectangle((x, y, x + rng.randint(40, 220), y + rng.randint(40, 220)), fill=color)
    return picture


@cache
def _noise_field() -> npt.NDArray[np.float32]:
    """Noise of standard deviation one, [NOISE_SIDE, NOISE_SIDE, 3]: drawing it anew takes most of a frame's time."""
    return np.random.default_rng(0).standard_normal((NOISE_SIDE, NOISE_SIDE, 3), np.float32)


def _camera(picture: Image.Image, look: Look, rng: random.Random) -> Image.Image:
    """The picture after light, lens, sensor and JPEG."""
    picture = ImageEnhance.Brightness(picture).enhance(look.brightness * rng.uniform(0.97, 1.03))
    picture = ImageEnhance.Contrast(picture).enhance(look.contrast)
    picture = picture.filter(ImageFilter.BoxBlur(look.blur))
    levels = np.asarray(picture, np.float32) * np.array([1 + look.warmth, 1, 1 - look.warmth], np.float32)
    y, x = rng.randrange(NOISE_SIDE - FRAME_SIDE), rng.randrange(NOISE_SIDE - FRAME_SIDE)
    levels += look.noise * _noise_field()[y : y + FRAME_SIDE, x : x + FRAME_SIDE]
    levels = levels.clip(0, 255).astype(np.uint8)
    with Image.open(io.BytesIO(jpeg(Image.fromarray(levels), look.quality))) as decoded:
        return decoded.convert("RGB")
