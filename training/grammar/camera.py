"""Turns about what the camera shows: questions, memory of earlier pictures, and watching for something."""

import random
from dataclasses import dataclass

from training.grammar.phrases import Split, fill, intents
from training.grammar.turns import Exchange, answered
from training.scenes.labels import COLORS, DIGITS, SHAPES, THINGS, UNCOUNTED, Motion, Shown, with_article
from training.scenes.random_scenes import KINDS, NAMES, draw_placed

QUESTIONS = ("show_thing", "show_color", "show_shape", "show_digit", "show_letter", "show_count", "show_place")


@dataclass(frozen=True)
class Target:
    """What the person asks to be told about: a color, or the name of a shape, digit, thing or letter."""

    words: str
    color: str | None = None
    name: str | None = None

    @property
    def is_thing(self) -> bool:
        """Whether only the font of things can show it."""
        return self.name in THINGS

    def matches(self, shown: Shown | None) -> bool:
        """Whether a picture shows it."""
        if shown is None:
            return False
        return self.color == shown.color if self.color is not None else self.name == shown.name


def draw_question(rng: random.Random, split: Split, shown: Shown | None) -> Exchange:
    """A question about the picture; None: the camera is off, and nothing can be seen."""
    if shown is None:
        skill = rng.choice(("show_thing", "show_color", "show_digit"))
        return answered(skill, intents()[skill].draw(rng, split), intents()["no_picture"].answers, rng)
    skill = rng.choice([one for one in QUESTIONS if fits(one, shown)])
    slots = answers(skill, shown)
    intent = intents()[skill]
    asked = {"plural": shown.plural, "thing_name": "letter" if shown.kind == "letter" else shown.name}
    right = [fill(one, **slots) for one in intent.answers]
    return answered(skill, fill(intent.draw(rng, split), **asked), right, rng)


def draw_nothing(rng: random.Random, split: Split, skill: str) -> Exchange:
    """A question while the camera shows nothing but its surroundings."""
    return Exchange(skill, intents()[skill].draw(rng, split), (intents()["see_nothing"].answer(rng),))


def fits(skill: str, shown: Shown) -> bool:
    """Whether a question has one answer for this picture."""
    if skill == "show_color":
        return shown.color is not None
    if skill == "show_count":
        return shown.kind in ("shape", "thing") and shown.name not in UNCOUNTED
    if skill in ("show_shape", "show_digit", "show_letter"):
        return shown.kind == skill.removeprefix("show_") and shown.count == 1
    return skill == "show_thing" or shown.count == 1


def answers(skill: str, shown: Shown) -> dict[str, str]:
    """The slots of an answer."""
    if skill == "show_color":
        return {"color": shown.color or ""}
    if skill == "show_count":
        return {"count": DIGITS[shown.count]}
    if skill == "show_place":
        return {"place": shown.place}
    if skill == "show_shape":
        return {"thing": with_article(shown.name)}
    if skill in ("show_digit", "show_letter"):
        return {"thing": shown.name}
    return {"thing": shown.words}


def draw_motion(rng: random.Random, split: Split, shown: Shown, motion: Motion) -> Exchange:
    """The question where something has moved."""
    intent = intents()["show_motion"]
    said = fill(intent.draw(rng, split), thing_name=shown.name)
    answer = intents()["still"].answer(rng) if motion == "not at all" else fill(intent.answer(rng), motion=motion)
    return Exchange("show_motion", said, (answer,))


def draw_shown_before(rng: random.Random, split: Split, before: Shown | None) -> Exchange:
    """The question for the picture before; None: there was none."""
    intent = intents()["shown_before"]
    reply = intents()["not_told"].answer(rng) if before is None else fill(intent.answer(rng), thing=before.words)
    return Exchange("shown_before", intent.draw(rng, split), (reply,))


def draw_target(rng: random.Random) -> Target:
    """Something that can be watched for."""
    kind = rng.choice(("color", "shape", "digit", "thing"))
    if kind == "color":
        color = rng.choice(sorted(COLORS))
        return Target(f"something {color}", color=color)
    if kind == "digit":
        name = rng.choice(DIGITS)
        return Target(f"the number {name}", name=name)
    name = rng.choice(SHAPES if kind == "shape" else sorted(THINGS))
    return Target(f"the {name}" if name in UNCOUNTED else with_article(name), name=name)


def draw_match(rng: random.Random, target: Target) -> Shown:
    """A label that matches. Numbers and places are drawn as for other labels, so that they do not reveal it."""
    if target.color is not None:
        kind = rng.choice([kind for kind in KINDS if kind != "thing"])
        return draw_placed(rng, kind, rng.choice(NAMES[kind]), target.color)
    assert target.name is not None
    if target.is_thing:
        return draw_placed(rng, "thing", target.name, None)
    return draw_placed(rng, "digit" if target.name in DIGITS else "shape", target.name, rng.choice(sorted(COLORS)))


def draw_watch(rng: random.Random, split: Split, target: Target) -> Exchange:
    """The request to speak when something appears."""
    intent = intents()["watch_for"]
    said, reply = fill(intent.draw(rng, split), target=target.words), fill(intent.answer(rng), target=target.words)
    return Exchange("watch_for", said, (reply,))


def draw_alert(rng: random.Random, target: Target) -> Exchange:
    """What the model says by itself when it appears."""
    return Exchange("watch_alert", "", (fill(intents()["watch_alert"].answer(rng), target=target.words),))
