"""What happens in one evaluated session, and what came of it. Values only."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from training.grammar.camera import Target
from training.timelines.speech import Samples
from training.timelines.timeline import View

LEAD_UNITS = 3  # of silence in front of the first act: serving listens in these units


@dataclass(frozen=True)
class Say:
    """The person says something and waits for the reply.

    Args:
        sound: [n] samples at 16 kHz.
        phase: when in its second it begins, 0 to 1.
        reply: a right answer; empty: silence is right.
        after: 0: the model is silent before. n: it is said once the model has spoken for n units.
        waits: False: the next act follows when the sentence is complete.
    """

    skill: str
    text: str
    sound: Samples
    phase: float
    reply: str
    after: int = 0
    waits: bool = True


@dataclass(frozen=True)
class Show:
    """The camera shows something from the next unit on; None: it is off."""

    view: View | None


@dataclass(frozen=True)
class Appear:
    """What the model watches for is shown from the next unit on, and the session waits for what the model says."""

    view: View
    target: Target
    reply: str


@dataclass(frozen=True)
class Idle:
    """Nothing is said. watching: the model watches for something that is not there."""

    units: int
    watching: bool = False


Act = Say | Show | Appear | Idle


@dataclass(frozen=True)
class Case:
    """One session.

    Args:
        name: unique; part of the session's id.
        part: of the evaluation, such as `requests` or `watch`.
        group: what the part is divided by, such as the kind of voice.
        noise: standard deviation of white noise in the sound of all units.
        max_units: the session ends after this many, whatever is left.
        is_voiced: the model's words are voiced too. Without it only their text is judged, which takes a quarter of the
            time.
    """

    name: str
    part: str
    group: str
    seed: int
    acts: tuple[Act, ...]
    noise: float = 0.0
    max_units: int = 1_000_000
    is_voiced: bool = True


@dataclass(frozen=True)
class HeardUnit:
    """The result of one unit.

    Args:
        sound: [n] samples at 24 kHz; empty without sound.
        speaks: it has text, or sound above silence.
        listens: the model's decision.
        ends: a turn ends in it.
        ms: from sending the unit to its result.
        is_late: the result came after the unit's second.
    """

    text: str
    sound: npt.NDArray[np.float32]
    speaks: bool
    listens: bool
    ends: bool
    ms: float
    is_late: bool


@dataclass(frozen=True)
class Happened:
    """An act that was played.

    Args:
        start, end: seconds; of a sentence, or of the units that an act takes.
        until: the first unit of what follows.
        reached: an interruption found the model speaking; True for other acts.
    """

    act: Act
    start: float
    end: float
    until: int
    reached: bool = True


@dataclass
class Played:
    """One session as it went. error: why it ended early."""

    case: Case
    units: list[HeardUnit] = field(default_factory=list)
    happened: list[Happened] = field(default_factory=list)
    error: str = ""

    @property
    def speaks(self) -> list[bool]:
        return [unit.speaks for unit in self.units]

    @property
    def ends(self) -> list[bool]:
        return [unit.ends for unit in self.units]

    def text(self, first: int, until: int) -> str:
        """What the model says in units [first, until)."""
        return "".join(unit.text for unit in self.units[first:until]).strip()
