"""Random labels of pictures, and how a picture changes from unit to unit."""

import random
from dataclasses import dataclass, replace

from training.scenes.labels import (
    COLORS,
    DIGITS,
    LETTERS,
    MAX_COUNT,
    MOTIONS,
    PLACES,
    SHAPES,
    THINGS,
    UNCOUNTED,
    Kind,
    Motion,
    Shown,
)

KINDS: tuple[Kind, ...] = ("shape", "shape", "digit", "letter", "thing", "thing")
NAMES: dict[Kind, tuple[str, ...]] = {
    "shape": SHAPES,
    "digit": DIGITS,
    "letter": LETTERS,
    "thing": tuple(sorted(THINGS)),
}
MANY_SHARE = 0.3  # pictures of several equal objects
_STEPS = {"to the left": (-1, 0), "to the right": (1, 0), "up": (0, -1), "down": (0, 1), "not at all": (0, 0)}


@dataclass(frozen=True)
class Movement:
    """One object that moves over `n_units` frames, one a unit."""

    shown: Shown
    motion: Motion
    n_units: int

    def offset(self, unit: int) -> tuple[float, float]:
        """Where the object's center is at a unit, as shares of the picture's side from its middle."""
        x, y = _STEPS[self.motion]
        along = 0.6 * (unit / max(self.n_units - 1, 1) - 0.5)
        return x * along, y * along


def draw_shown(rng: random.Random, things: bool = True) -> Shown:
    """A random label. things: whether the font of things is there."""
    kind = rng.choice([kind for kind in KINDS if things or kind != "thing"])
    name = rng.choice(NAMES[kind])
    return draw_placed(rng, kind, name, None if kind == "thing" else rng.choice(sorted(COLORS)))


def draw_placed(rng: random.Random, kind: Kind, name: str, color: str | None) -> Shown:
    """A label of an object with a random number and place."""
    if kind in ("shape", "thing") and name not in UNCOUNTED and rng.random() < MANY_SHARE:
        return Shown(kind, name, color, rng.randint(2, MAX_COUNT))
    return Shown(kind, name, color, 1, rng.choice(PLACES))


def draw_movement(rng: random.Random, n_units: int, things: bool = True) -> Movement:
    """A random object that crosses the picture."""
    shown = replace(draw_shown(rng, things), count=1, place="in the middle")
    return Movement(shown, rng.choice(MOTIONS), n_units)
