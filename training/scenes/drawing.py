"""Objects of a scene as pictures with transparency: shapes, digits, letters and things. Needs Pillow only.

Things are characters of Debian's `fonts-noto-color-emoji`. `$SCENE_FONTS`, made by `training.scenes.pack`, is a folder
of fonts and of finished things for a machine without Debian's; without either, `has_things` is false.
"""

import math
import os
import random
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from training.scenes.labels import COLORS, DIGITS, THINGS, Shown

SIDE = 256  # of the square that an object is drawn on
FONTS = Path(os.environ.get("SCENE_FONTS", "/usr/share/fonts/truetype"))
EMOJI_FONT = FONTS / "noto" / "NotoColorEmoji.ttf"
THING_PICTURES = FONTS / "things"  # NAME.png, used instead of the font
EMOJI_SIZE = 109  # the one size of the font's pictures
TEXT_FONTS = (
    *("dejavu/DejaVuSans.ttf", "dejavu/DejaVuSans-Bold.ttf", "dejavu/DejaVuSerif.ttf", "dejavu/DejaVuSansMono.ttf"),
    *("liberation/LiberationSans-Regular.ttf", "liberation/LiberationSerif-Bold.ttf"),
)
JITTER = 22  # levels that a named color varies by

Color = tuple[int, int, int]


def draw_object(shown: Shown, color: Color | None, rng: random.Random) -> Image.Image:
    """One object, filling a SIDE x SIDE picture with transparency around it.

    Args:
        color: of a shape, digit or letter.
    Raises: ValueError for a thing without its font or picture.
    """
    if shown.kind == "thing":
        return draw_thing(shown.name)
    picture = Image.new("RGBA", (SIDE, SIDE))
    draw = ImageDraw.Draw(picture)
    if shown.kind == "shape":
        outlined = rng.random() < 0.2
        width = rng.randint(18, 30)
        _draw_shape(draw, shown.name, color, None if not outlined else width)
    else:
        text = str(DIGITS.index(shown.name)) if shown.kind == "digit" else shown.name
        draw.text((SIDE / 2, SIDE / 2), text, fill=color, font=_text_font(rng.choice(text_fonts())), anchor="mm")
    return picture


def has_things() -> bool:
    """Whether things can be drawn."""
    return EMOJI_FONT.is_file() or THING_PICTURES.is_dir()


def named_color(name: str, rng: random.Random) -> Color:
    """A color of this name: near its usual value."""
    red, green, blue = (max(0, min(255, level + rng.randint(-JITTER, JITTER))) for level in COLORS[name])
    return red, green, blue


@cache
def text_fonts() -> tuple[Path | None, ...]:
    """Fonts of digits and letters; None is Pillow's own, which is always there."""
    return (None, *(FONTS / name for name in TEXT_FONTS if (FONTS / name).is_file()))


@cache
def _text_font(path: Path | None) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(SIDE) if path is None else ImageFont.truetype(str(path), SIDE)


@cache
def draw_thing(name: str) -> Image.Image:
    """A thing, filling a SIDE x SIDE picture. Raises: ValueError without its font or picture."""
    if (file := THING_PICTURES / f"{name}.png").is_file():
        with Image.open(file) as drawn:
            return drawn.convert("RGBA").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    if not EMOJI_FONT.is_file():
        raise ValueError(f"{name}: expected the font {EMOJI_FONT} or {file}, got neither")
    font = ImageFont.truetype(str(EMOJI_FONT), EMOJI_SIZE)
    picture = Image.new("RGBA", (2 * EMOJI_SIZE, 2 * EMOJI_SIZE))
    ImageDraw.Draw(picture).text((EMOJI_SIZE, EMOJI_SIZE), THINGS[name][0], font=font, anchor="mm", embedded_color=True)
    box = picture.getbbox()
    return picture.crop(box).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def _draw_shape(draw: ImageDraw.ImageDraw, name: str, color: Color | None, width: int | None) -> None:
    """Draw a shape filled, or as an outline of this width."""
    low, high, middle = 16, SIDE - 16, SIDE / 2
    style = {"fill": color} if width is None else {"outline": color, "width": width}
    if name == "circle":
        draw.ellipse((low, low, high, high), **style)
    elif name == "heart":
        draw.polygon(_heart(), **style)
    else:
        outlines: dict[str, list[tuple[float, float]]] = {
            "square": [(low + 12, low + 12), (high - 12, low + 12), (high - 12, high - 12), (low + 12, high - 12)],
            "rectangle": [(low, 68), (high, 68), (high, SIDE - 68), (low, SIDE - 68)],
            "triangle": [(middle, low), (high, high - 12), (low, high - 12)],
            "diamond": [(middle, low), (SIDE - 56, middle), (middle, high), (56, middle)],
            "cross": _cross(),
            "star": _star(),
        }
        draw.polygon(outlines[name], **style)


def _cross() -> list[tuple[float, float]]:
    low, high, a, b = 20, SIDE - 20, 96, SIDE - 96
    return [(a, low), (b, low), (b, a), (high, a), (high, b), (b, b), (b, high), (a, high), (a, b), (low, b), (low, a),
            (a, a)]  # fmt: skip


def _star() -> list[tuple[float, float]]:
    points = []
    for i in range(10):
        radius, angle = (120 if i % 2 == 0 else 50), math.pi * (i / 5 - 0.5)
        points.append((SIDE / 2 + radius * math.cos(angle), SIDE / 2 + radius * math.sin(angle)))
    return points


def _heart() -> list[tuple[float, float]]:
    points = []
    for i in range(60):
        t = 2 * math.pi * i / 60
        x = 16 * math.sin(t) ** 3
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((SIDE / 2 + 7 * x, SIDE / 2 - 7 * y - 8))
    return points
