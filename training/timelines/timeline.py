"""A conversation second by second: what the model hears, sees and decides. Values only."""

from dataclasses import dataclass

from PIL import Image

from training.scenes.labels import Shown
from training.scenes.random_scenes import Movement
from training.scenes.render import Look, render
from training.timelines.speech import RATE, Samples

FORCED_UNITS = 3  # serving listens in the first units (`force_listen_count`)


@dataclass(frozen=True)
class Picture:
    """What the camera shows in one unit. shown: None: only the background. at: offset of a moving object."""

    shown: Shown | None
    look: Look
    frame: int
    at: tuple[float, float] | None = None

    def render(self) -> Image.Image:
        return render(self.shown, self.look, self.frame, self.at)


@dataclass(frozen=True)
class View:
    """What the camera shows from a unit on."""

    shown: Shown | None
    look: Look
    start: int
    movement: Movement | None = None

    def picture(self, unit: int) -> Picture:
        """The picture of a unit; an object that has moved stays at the end of its way."""
        age = unit - self.start
        at = None if self.movement is None else self.movement.offset(min(age, self.movement.n_units - 1))
        return Picture(self.shown, self.look, age, at)


@dataclass(frozen=True)
class TimelineUnit:
    """One second.

    Args:
        tokens: what the model decides, in order, the terminator last: `<|listen|>` alone, or `<|speak|>` and text.
        picture: of the camera; None if it is off.
        is_forced: serving listens in this unit whatever the model would do.
        skill: of the reply whose text is in the unit; empty if there is none.
        watched: class of what the model watches for when it decides, see `training.scenes.labels.watched_class`.
    """

    tokens: tuple[int, ...]
    picture: Picture | None = None
    is_forced: bool = False
    skill: str = ""
    watched: int = 0


@dataclass(frozen=True)
class Said:
    """One utterance.

    Args:
        start, end: seconds from the beginning, of the sound.
        is_cut: the model was interrupted.
        parts: of the model's text; each begins in a unit of its own.
    """

    by: str  # "person" or "model"
    text: str
    start: float
    end: float
    skill: str
    is_cut: bool = False
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placed:
    """A text that the person's voice spoke at once, the second at which its sound begins, and its samples at 16 kHz."""

    text: str
    start: float
    n_samples: int


@dataclass(frozen=True)
class Timeline:
    """A conversation.

    Args:
        sound: [16 000 * units] samples of the person.
        script: all utterances in order of their start.
        placed: the pieces that the person's sound consists of; a sentence with a pause has two.
    """

    sound: Samples
    units: tuple[TimelineUnit, ...]
    script: tuple[Said, ...]
    placed: tuple[Placed, ...] = ()

    def __post_init__(self) -> None:
        if len(self.sound) != RATE * len(self.units):
            raise ValueError(f"sound: expected {RATE * len(self.units)} samples, got {len(self.sound)}")
