"""What a producer makes once and uses in several records: utterances of a few voices, and pictures.

Speaking takes most of the time of a conversation. A producer therefore has few voices at a time, which say a phrase
several times before it is replaced by another one, see `training.timelines.recurring`; and after some records another
voice takes the place of one. Order, context, pauses, pictures and answers are new in each record.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from training.mind.records import FRAMES_OF_A_VIEW, rendered
from training.mind.voices import EngineVoice, draw_voice
from training.timelines.recurring import Recurring
from training.timelines.timeline import Picture

N_VOICES = 6  # at a time
DRAWS_OF_A_VOICE = 1000
VOICE_BYTES = 64_000_000  # utterances that a voice keeps: about 700
USES = {"echo": 2.0, "talk": 4.0, "chat": 4.0}  # of a phrase in a voice, by task; hearing needs more recordings
PICTURE_USES = 5.0
N_PICTURES = 192  # rendered ones that are kept, 0.6 MB each


@dataclass
class StockVoice:
    """A voice with its utterances. phrases: recurring ones, by task. n_left: draws until it is replaced."""

    voice: EngineVoice
    phrases: dict[str, Recurring]
    n_left: int


@dataclass
class Stock:
    """Voices and pictures of one producer.

    Args:
        voices: of which a few are used at a time.
        seed: of everything that recurs; producers have different ones.
    """

    voices: tuple[EngineVoice, ...]
    seed: str
    _used: list[StockVoice] = field(default_factory=list)
    _n_voices: int = 0
    _pictures: "OrderedDict[object, npt.NDArray[np.uint8]]" = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.views = Recurring(f"{self.seed} views", PICTURE_USES)

    def draw(self, rng: random.Random) -> StockVoice:
        """One of the voices that are used at the time, for one record."""
        place = rng.randrange(N_VOICES)
        while place >= len(self._used):
            self._used.append(self._new_voice(rng))
        if not self._used[place].n_left:
            self._used[place] = self._new_voice(rng)
        self._used[place].n_left -= 1
        return self._used[place]

    def render(self, picture: Picture) -> npt.NDArray[np.uint8]:
        """As `rendered`; the frames of a view that count as one picture may be any of them."""
        key = (picture.shown, picture.look, picture.at, picture.frame // FRAMES_OF_A_VIEW)
        if key not in self._pictures:
            self._pictures[key] = rendered(picture)
            if len(self._pictures) > N_PICTURES:
                self._pictures.popitem(last=False)
        self._pictures.move_to_end(key)
        return self._pictures[key]

    def _new_voice(self, rng: random.Random) -> StockVoice:
        self._n_voices += 1
        voice = draw_voice(rng, self.voices).with_memory(VOICE_BYTES)
        seed = f"{self.seed} {self._n_voices}"
        phrases = {task: Recurring(f"{seed} {task}", uses) for task, uses in USES.items()}
        return StockVoice(voice, phrases, DRAWS_OF_A_VOICE)
