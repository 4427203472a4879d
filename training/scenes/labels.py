"""What a camera picture shows, as values: the label of a rendered scene and the subject of questions about it."""

from dataclasses import dataclass
from typing import Literal

COLORS = {
    "red": (214, 40, 40),
    "green": (46, 160, 67),
    "blue": (36, 84, 214),
    "yellow": (245, 208, 30),
    "orange": (245, 130, 32),
    "purple": (128, 50, 170),
    "pink": (245, 130, 180),
    "brown": (120, 72, 36),
    "black": (24, 24, 24),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "star", "rectangle", "cross", "heart", "diamond")
LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
# Thing -> its character in the emoji font.
THINGS = {
    "cat": "🐈",
    "dog": "🐕",
    "fish": "🐟",
    "bird": "🐦",
    "horse": "🐎",
    "rabbit": "🐇",
    "apple": "🍎",
    "banana": "🍌",
    "pizza": "🍕",
    "cake": "🎂",
    "car": "🚗",
    "bus": "🚌",
    "bicycle": "🚲",
    "house": "🏠",
    "tree": "🌳",
    "flower": "🌷",
    "ball": "⚽",
    "book": "📖",
    "key": "🔑",
    "clock": "⏰",
    "cup": "☕",
    "phone": "📱",
    "hat": "🎩",
    "shoe": "👟",
    "umbrella": "☂️",
    "sun": "☀️",
    "moon": "🌙",
    "guitar": "🎸",
}
UNCOUNTED = {"sun", "moon"}  # there is one of each: "the sun"
PLURALS = {
    "fish": "fish",
    "bus": "buses",
    "cross": "crosses",
}

Kind = Literal["shape", "digit", "letter", "thing"]
Place = Literal["on the left", "on the right", "at the top", "at the bottom", "in the middle"]
Motion = Literal["to the left", "to the right", "up", "down", "not at all"]
PLACES: tuple[Place, ...] = ("on the left", "on the right", "at the top", "at the bottom", "in the middle")
MOTIONS: tuple[Motion, ...] = ("to the left", "to the right", "up", "down", "not at all")
MAX_COUNT = 6
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Shown:
    """The objects of one picture: `count` equal ones.

    Args:
        name: a shape, a digit as a word, a letter, or a thing.
        color: of a shape, digit or letter; None for a thing, which has its own.
        place: where one object is; several are spread out, and have the place `in the middle`.
    """

    kind: Kind
    name: str
    color: str | None
    count: int = 1
    place: Place = "in the middle"

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_COUNT:
            raise ValueError(f"count: expected 1 to {MAX_COUNT}, got {self.count}")
        if (self.color is None) != (self.kind == "thing"):
            raise ValueError(f"color of a {self.kind}: expected {'none' if self.color else 'one'}, got {self.color}")

    @property
    def words(self) -> str:
        """With an article or a number: `a red circle`, `three dogs`, `the sun`, `a seven`, `the letter A`."""
        if self.count > 1:
            return f"{DIGITS[self.count]} {self.plural}"
        if self.kind == "letter":
            return f"the letter {self.name}"
        if self.name in UNCOUNTED:
            return f"the {self.name}"
        return with_article(self.name if self.color is None or self.kind == "digit" else f"{self.color} {self.name}")

    @property
    def plural(self) -> str:
        """The name of several, without color: `circles`, `dogs`, `sevens`."""
        if self.name == "six":
            return "sixes"
        return PLURALS.get(self.name, f"{self.name}s")


OBJECTS: tuple[tuple[Kind, str], ...] = (
    *(("shape", name) for name in SHAPES),
    *(("digit", name) for name in DIGITS),
    *(("letter", name) for name in LETTERS),
    *(("thing", name) for name in sorted(THINGS)),
)
UNKNOWN = -1  # a class that a picture does not tell
# Classes of a picture: object or none, color or its own, number of objects, place.
CLASSES = (len(OBJECTS) + 1, len(COLORS) + 1, MAX_COUNT + 1, len(PLACES))


def picture_classes(shown: Shown | None, is_still: bool) -> tuple[int, int, int, int]:
    """The class of a picture in each of CLASSES; places of objects that move are UNKNOWN."""
    if shown is None:
        return 0, UNKNOWN, 0, UNKNOWN
    color = 0 if shown.color is None else 1 + list(COLORS).index(shown.color)
    place = PLACES.index(shown.place) if is_still and shown.count == 1 else UNKNOWN
    return 1 + OBJECTS.index((shown.kind, shown.name)), color, shown.count, place


N_WATCHED = 1 + len(COLORS) + len(OBJECTS)  # classes of `watched_class`


def watched_class(color: str | None, name: str | None) -> int:
    """The class of what is watched for: 0 for nothing, then colors, then names of objects."""
    if color is not None:
        return 1 + list(COLORS).index(color)
    return 0 if name is None else 1 + len(COLORS) + [one for _, one in OBJECTS].index(name)


def with_article(words: str) -> str:
    """`words` after `a` or `an`."""
    is_vowel = words[0] in "aeiou" and words != "one"
    return f"{'an' if is_vowel else 'a'} {words}"
