"""Turns of a conversation: what a person says and what the model answers, with the memory of what was said.

Contains no time and no sound: `training.timelines` places turns on units.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from training.grammar import words
from training.grammar.phrases import Split, fill, intents, small_talk
from training.scenes.labels import COLORS

MAX_SUM = 20
MAX_COUNTED = 30  # where counting without a limit ends by itself
FACTS = ("name", "color", "animal", "place")


@dataclass(frozen=True)
class Exchange:
    """One exchange.

    Args:
        skill: the block of phrases that the person's words are from.
        said: the person's words, without punctuation.
        reply: the model's text in parts; each part starts in a unit of its own. Empty: the model stays silent.
        accepted: all replies that are right, in one part; empty if `reply` is the only one.
    """

    skill: str
    said: str
    reply: tuple[str, ...]
    accepted: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The whole reply."""
        return " ".join(self.reply)


def answered(skill: str, said: str, answers: Sequence[str], rng: random.Random) -> Exchange:
    """An exchange with one of several right answers."""
    return Exchange(skill, said, (rng.choice(answers),), tuple(answers))


@dataclass
class ToldFacts:
    """What the person has told in this conversation: fact -> slot values."""

    facts: dict[str, dict[str, str]] = field(default_factory=dict)


def draw_small_talk(rng: random.Random, split: Split) -> Exchange:
    intent = rng.choice(list(small_talk().values()))
    return answered(intent.name, intent.draw(rng, split), intent.answers, rng)


def draw_counting(rng: random.Random, split: Split) -> Exchange:
    """Counting up to a number, down from one, or until stopped; a number in each unit."""
    skill = rng.choice(("count_to", "count_freely", "count_down"))
    n = rng.randint(2, MAX_SUM)
    said = fill(intents()[skill].draw(rng, split), n=words.number(n))
    if skill == "count_down":
        return Exchange(skill, said, _counted(range(n, 0, -1)))
    return Exchange(skill, said, _counted(range(1, (n if skill == "count_to" else MAX_COUNTED) + 1)))


def draw_arithmetic(rng: random.Random, split: Split) -> Exchange:
    """A sum or difference of numbers up to twenty."""
    skill = rng.choice(("add", "subtract"))
    total = rng.randint(0, MAX_SUM)
    part = rng.randint(0, total)
    a, b, c = (part, total - part, total) if skill == "add" else (total, part, total - part)
    slots = {"a": words.number(a), "b": words.number(b), "c": words.number(c)}
    intent = intents()[skill]
    answers = [fill(one, **slots) for one in intent.answers]
    return answered(skill, fill(intent.draw(rng, split), **slots), answers, rng)


def draw_repetition(rng: random.Random, split: Split) -> Exchange:
    slots = {"sentence": words.sentence(rng, split)}
    intent = intents()["repeat"]
    return Exchange("repeat", fill(intent.draw(rng, split), **slots), (fill(intent.answer(rng), **slots),))


def draw_unknown(rng: random.Random, split: Split) -> Exchange:
    """A sentence outside the model's world."""
    return answered("unknown", words.far_sentence(rng, split), intents()["unknown"].answers, rng)


def draw_told(rng: random.Random, split: Split, memory: ToldFacts) -> Exchange:
    """The person tells a fact, which replaces an earlier one of its kind."""
    fact = rng.choice(FACTS)
    object_, place = rng.choice(words.OBJECTS), rng.choice(words.PLACES)
    slots = {
        "name": {"name": rng.choice(words.NAMES)},
        "color": {"color": rng.choice(sorted(COLORS))},
        "animal": {"animal": rng.choice(words.ANIMALS)},
        "place": {"object": object_, "place": place},
    }[fact]
    memory.facts[fact] = slots
    intent = intents()[f"tell_{fact}"]
    return answered(intent.name, fill(intent.draw(rng, split), **slots), _answers(intent.answers, slots), rng)


def draw_recall(rng: random.Random, split: Split, memory: ToldFacts) -> Exchange:
    """The person asks for a fact; one that was not told is not known."""
    fact = rng.choice(sorted(memory.facts) if memory.facts and rng.random() < 0.8 else FACTS)
    intent = intents()[f"ask_{fact}"]
    known = memory.facts.get(fact)
    asked = rng.choice(words.OBJECTS) if known is None or rng.random() < 0.15 else known.get("object", "")
    said = fill(intent.draw(rng, split), object=asked)
    if known is None or (fact == "place" and asked != known["object"]):
        return answered(intent.name, said, intents()["not_told"].answers, rng)
    return answered(intent.name, said, _answers(intent.answers, known), rng)


def draw_plain(skill: str, rng: random.Random, split: Split, **slots: str) -> Exchange:
    """A turn of a block whose answers need no more than these slots; a block without answers is met by silence."""
    intent = intents()[skill]
    reply = (fill(intent.answer(rng), **slots),) if intent.answers else ()
    accepted = tuple(fill(one, **slots) for one in intent.answers)
    return Exchange(skill, fill(intent.draw(rng, split), **slots), reply, accepted)


def answered_anew(turn: Exchange, rng: random.Random) -> Exchange:
    """A turn with any of its right answers."""
    return replace(turn, reply=(rng.choice(turn.accepted),)) if turn.accepted else turn


def _answers(templates: Sequence[str], slots: dict[str, str]) -> list[str]:
    """Answers with the person's places seen from the other side."""
    seen = {name: words.second_person(value) for name, value in slots.items()}
    return [fill(template, **seen) for template in templates]


def _counted(numbers: range) -> tuple[str, ...]:
    spoken = [words.number(n) for n in numbers]
    return tuple(
        f"{one[:1].upper() + one[1:] if i == 0 else one}{',' if i < len(spoken) - 1 else '.'}"
        for i, one in enumerate(spoken)
    )


def weighted_draws(rng: random.Random, split: Split, memory: ToldFacts) -> list[tuple[Callable[[], Exchange], float]]:
    """Draws of requests that need no camera, without counting, and how often each kind is drawn."""
    return [
        (lambda: draw_small_talk(rng, split), 5),
        (lambda: draw_arithmetic(rng, split), 3),
        (lambda: draw_repetition(rng, split), 1.5),
        (lambda: draw_unknown(rng, split), 1.5),
        (lambda: draw_told(rng, split, memory), 1.5),
        (lambda: draw_recall(rng, split, memory), 1.5),
    ]
