"""Places utterances, replies and pictures on units. Contains the rules of time; who says what is in `conversations`.

Times are seconds from the beginning. Unit u is the second [u, u + 1). Its decision follows its sound, so the sound of
its text is heard from u + 1 on.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from models.inputs.tokens import SpecialTokens
from training.grammar.phrases import intents
from training.timelines.pacing import Encode, pace, playback_s
from training.timelines.recurring import Recurring
from training.timelines.speech import RATE, Samples, Synthesizer
from training.timelines.timeline import FORCED_UNITS, Placed, Said, Timeline, TimelineUnit, View

SETTLE_S = 0.4  # silence after a sentence before it is answered
NOTICE_S = 0.3  # speech of an interruption before the model stops
PAUSE_S = (0.3, 0.9)  # thinking pauses inside of a sentence
FILLERS = ("um", "uh", "well")


class Stage:
    """A conversation that is being laid out."""

    def __init__(
        self,
        rng: random.Random,
        encode: Encode,
        special: SpecialTokens,
        synthesize: Synthesizer,
        phrases: Recurring | None = None,
    ):
        """
        Args:
            encode: text to token ids, as the tokenizer of the checkpoint.
            synthesize: the person's voice.
            phrases: that recur, always with the same pause.
        """
        self._phrases = phrases or Recurring()
        self._rng, self._encode, self._special, self._synthesize = rng, encode, special, synthesize
        self._sounds: list[tuple[Placed, Samples]] = []
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._skills: dict[int, str] = {}
        self._views: list[View | None] = []
        self._changes: list[int] = []
        self._watches: list[tuple[int, int]] = []
        self._script: list[Said] = []
        self._end = 0.0

    @property
    def next_free(self) -> int:
        """The first unit after all in which the model speaks."""
        return max(self._tokens, default=-1) + 1

    def hear(self, text: str, start: float, skill: str = "", pause: float = 0.0) -> float:
        """Place a sentence. pause: chance of a thinking pause between two of its words. Returns: its end."""
        words = text.split()
        pieces = [text]
        rng = self._phrases.of_text(text, self._rng)
        if pause and rng.random() < pause and (cuts := pause_places(words)):
            cut = rng.choice(cuts)
            filler = [rng.choice(FILLERS)] if rng.random() < 0.3 else []
            pieces = [" ".join(words[:cut] + filler), " ".join(words[cut:])]
        at = start
        for number, piece in enumerate(pieces):
            at += self._rng.uniform(*PAUSE_S) if number else 0.0
            sound = self._synthesize(piece)
            self._sounds.append((Placed(piece, at, len(sound)), sound))
            at += len(sound) / RATE
        self._script.append(Said("person", text, start, at, skill))
        self._end = max(self._end, at)
        return at

    def speak(self, parts: Sequence[str], first: int, skill: str) -> tuple[int, float]:
        """Let the model speak from unit `first` on. Returns: the last unit with text, and when its sound ends."""
        units = pace(parts, self._encode)
        special = self._special
        for number, ids in enumerate(units):
            ends = (special.turn_eos,) if number == len(units) - 1 else ()
            self._put(first + number, (special.speak, *ids, *ends, special.chunk_eos), skill)
        end = first + 1 + playback_s(parts)
        self._script.append(Said("model", " ".join(parts), first + 1, end, skill, parts=tuple(parts)))
        self._end = max(self._end, end)
        return first + len(units) - 1, end

    def interrupt(self, start: float) -> bool:
        """Stop the model's latest reply for speech that begins at `start`. Returns: whether text of it was left."""
        unit, last = heard_in(start + NOTICE_S), max(self._tokens, default=-1)
        if unit > last:
            return False
        special = self._special
        if unit not in self._tokens:
            raise ValueError(f"interruption at {start:.1f} s: expected the model to speak in unit {unit}")
        for later in range(unit, last + 1):
            del self._tokens[later], self._skills[later]
        self._tokens[unit] = (special.turn_eos, special.listen)
        at = max(i for i, said in enumerate(self._script) if said.by == "model")
        said = self._script[at]
        self._script[at] = replace(said, end=unit + 1.0, is_cut=True)
        return True

    def show(self, view: View | None, unit: int) -> None:
        """Let the camera show a view from a unit on; None: it is off."""
        if self._changes and unit < self._changes[-1]:
            raise ValueError(f"view of unit {unit}: expected one from {self._changes[-1]} on")
        self._changes.append(unit)
        self._views.append(view)

    def watch(self, watched: int, unit: int) -> None:
        """Let the model watch from a unit on. watched: as in `TimelineUnit`."""
        if self._watches and unit < self._watches[-1][0]:
            raise ValueError(f"watching from unit {unit}: expected one from {self._watches[-1][0]} on")
        self._watches.append((unit, watched))

    def build(self, end: float) -> Timeline:
        """The timeline up to `end` or the end of the last sound."""
        n_units = math.ceil(max(end, self._end, max(self._tokens, default=0) + 1))
        sound = np.zeros(n_units * RATE, np.float32)
        for placed, samples in self._sounds:
            first = round(placed.start * RATE)
            room = sound[first : first + len(samples)]
            room += samples[: len(room)]
        units = tuple(self._unit(unit) for unit in range(n_units))
        script = tuple(sorted(self._script, key=lambda said: said.start))
        return Timeline(sound, units, script, tuple(placed for placed, _ in self._sounds))

    def _unit(self, unit: int) -> TimelineUnit:
        current = [view for view, start in zip(self._views, self._changes, strict=True) if start <= unit]
        picture = current[-1].picture(unit) if current and current[-1] is not None else None
        tokens = self._tokens.get(unit, (self._special.listen,))
        watched = [one for start, one in self._watches if start <= unit]
        return TimelineUnit(
            tokens, picture, unit < FORCED_UNITS, self._skills.get(unit, ""), watched[-1] if watched else 0
        )

    def _put(self, unit: int, tokens: tuple[int, ...], skill: str) -> None:
        if unit < FORCED_UNITS or unit in self._tokens:
            raise ValueError(f"unit {unit}: expected one in which the model may begin to speak")
        self._tokens[unit], self._skills[unit] = tokens, skill


def pause_places(words: Sequence[str]) -> list[int]:
    """Numbers of words after which a speaker may pause so that what was said so far is no sentence by itself.

    The second half of a long sentence is left out: `the cat sees a bird` is complete without `in the morning`.
    """
    last = len(words) - 1 if len(words) < 6 else len(words) // 2
    return [n for n in range(1, last + 1) if " ".join(words[:n]) not in _complete()]


@cache
def _complete() -> frozenset[str]:
    """All phrases without slots."""
    return frozenset(phrase for intent in intents().values() for phrase in (*intent.train, *intent.held_out))


def heard_in(time: float) -> int:
    """The first unit whose decision follows everything before `time`."""
    return max(0, math.ceil(time - 1e-9) - 1)


def answer_unit(end: float) -> int:
    """The unit that answers a sentence which ends at `end`."""
    return max(FORCED_UNITS, heard_in(end + SETTLE_S))
