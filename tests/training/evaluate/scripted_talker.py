"""Scripted replies of a fake worker to tones and labels, right or with a chosen flaw."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from benchmarks.serve.fake_replies import ScriptedUnit
from training.evaluate.acts import Appear, Case, Say
from training.timelines.speech import RATE, Samples, spoken_s
from training.timelines.stage import NOTICE_S, answer_unit, heard_in
from training.timelines.timeline import Picture
from worker.protocol.messages import AudioChunk

# wrong: other words. late: three units later. early: before the sentence is complete. mute: no reply. deaf: it does not
# stop. alarm: it speaks once, with nothing to be seen.
Flaw = Literal["wrong", "late", "early", "mute", "deaf", "alarm"]
LOUD, QUIET = 0.5, 0.2
WORDS = 3  # of a unit
DELAY = 3
WRONG = "Elephants sing loudly."


def tone_voice(text: str) -> Samples:
    """A stand-in for the person: a tone whose first sample is loud, at least 1.3 s long."""
    n = round((1.3 + spoken_s(text)) * RATE)
    return (LOUD * np.cos(np.pi * np.arange(n) / 20)).astype(np.float32)


def label(picture: Picture) -> bytes:
    """A stand-in for the file of a picture."""
    return repr(picture.shown).encode()


@dataclass
class _Conversation:
    """What the talker knows. said: words of each unit to come. deaf_until: second up to which a known tone lasts."""

    acts: list[Say | Appear]
    said: dict[int, ScriptedUnit] = field(default_factory=dict)
    deaf_until: float = 0.0
    has_alarmed: bool = False


class ScriptedTalker:
    """The decisions of a fake worker for sessions of an evaluation.

    Args:
        flaws: case -> what it does badly. Without one it is a perfect talker.
    """

    def __init__(self, cases: list[Case], flaws: Mapping[str, Flaw]):
        self._flaws = flaws
        self._conversations = {
            case.name: _Conversation([act for act in case.acts if isinstance(act, Say | Appear)]) for case in cases
        }

    def __call__(self, session: str, number: int, chunk: AudioChunk) -> ScriptedUnit | None:
        name = session.removeprefix("evaluate_")
        heard, flaw, unit = self._conversations[name], self._flaws.get(name), number - 1
        loud = np.flatnonzero(np.abs(chunk.samples()) > QUIET)
        loud = loud[loud / RATE + unit >= heard.deaf_until - 1e-6]
        next_act = heard.acts[0] if heard.acts else None
        if isinstance(next_act, Say) and len(loud):
            self._hear(heard, next_act, unit + loud[0] / RATE, flaw)
        elif isinstance(next_act, Appear) and chunk.pictures() == [repr(next_act.view.shown).encode()]:
            heard.acts.pop(0)
            self._plan(heard, next_act.reply, unit, flaw, WORDS)
        elif flaw == "alarm" and not heard.acts and not heard.has_alarmed and chunk.pictures() != [b"None"]:
            heard.has_alarmed = True
            self._plan(heard, "Now!", unit, None, WORDS)
        return heard.said.pop(unit, None)

    def _hear(self, heard: _Conversation, act: Say, start: float, flaw: Flaw | None) -> None:
        heard.acts.pop(0)
        heard.deaf_until = end = start + len(act.sound) / RATE
        if act.after and flaw != "deaf":
            noticed = heard_in(start + NOTICE_S)
            heard.said = {unit: said for unit, said in heard.said.items() if unit < noticed}
        first = heard_in(start) if flaw == "early" else answer_unit(end)
        self._plan(heard, act.reply, first, flaw, 1 if act.skill.startswith("count") else WORDS)

    def _plan(self, heard: _Conversation, reply: str, first: int, flaw: Flaw | None, n_words: int) -> None:
        if flaw == "mute" or not reply:
            return
        words = (WRONG if flaw == "wrong" else reply).split()
        first = max(first + (DELAY if flaw == "late" else 0), max(heard.said, default=-1) + 1)
        pieces = [" ".join(words[at : at + n_words]) for at in range(0, len(words), n_words)]
        for number, piece in enumerate(pieces):
            heard.said[first + number] = ScriptedUnit(f"{piece} ", number == len(pieces) - 1)
