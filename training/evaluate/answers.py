"""Whether a reply is a right answer, by the facts in it and not by its exact words.

`is_right` compares a reply with one right answer of the grammar, the reference:

- A reference without text asks for silence: any word is wrong.
- Counting: the numbers of the reply are the wanted ones in order, and at most three other words are said. Counting
  without a limit has to reach three.
- A sum or difference: the result alone, or both numbers and then the result. Any other number is wrong.
- A repeated sentence: its words in order without a gap, and at most three others.
- A reference that a block of the grammar contains as it stands (small talk, `I don't understand`, `You did not tell
  me`): the reply differs from one of the block's answers by at most a fifth of that answer's words. The answers of a
  block are equally right.
- Everything else carries facts: colors, shapes, things, numbers, letters, names, animals, objects, places, motions.
  Those kinds that the skill is about are the same in both, no more and no less, and the reply has at most 14 words.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache

from training.edits import edit_distance
from training.grammar import words
from training.grammar.phrases import intents
from training.scenes.labels import COLORS, DIGITS, LETTERS, MOTIONS, PLACES, SHAPES, THINGS, Shown

MAX_WORDS = 14  # the longest answer with facts has eleven
MAX_OTHER_WORDS = 3
MIN_COUNTED = 3
WORD_TOLERANCE = 0.2
COUNTING = ("count_to", "count_freely", "count_down")
ARITHMETIC = ("add", "subtract")
SEEN = ("color", "shape", "thing", "number", "letter")
# Skill -> kinds of facts that its answer must have as the reference has them.
FACTS = {
    "tell_name": ("name",),
    "ask_name": ("name",),
    "tell_color": ("color",),
    "ask_color": ("color",),
    "tell_animal": ("animal",),
    "ask_animal": ("animal",),
    "tell_place": ("object", "home_place"),
    "ask_place": ("home_place",),
    "show_color": ("color",),
    "show_shape": ("shape",),
    "show_digit": ("number",),
    "show_letter": ("letter",),
    "show_count": ("number",),
    "show_place": ("place",),
    "show_motion": ("motion",),
    "show_thing": SEEN,
    "shown_before": SEEN,
    "watch_for": SEEN,
    "watch_alert": SEEN,
}

Words = tuple[str, ...]
Facts = tuple[str, ...]


def is_right(skill: str, said: str, reference: str, reply: str) -> bool:
    """Whether `reply` answers what the person said.

    Args:
        skill: block of the grammar that `said` is from.
        said: the person's words; empty where the model speaks by itself.
        reference: a right answer; empty: silence is right.
    Raises: ValueError for a skill without a rule.
    """
    got, wanted = spoken_words(reply), spoken_words(reference)
    if not wanted or not got:
        return not wanted and not got
    if skill in COUNTING:
        numbers = numbers_in(got)
        is_counted = numbers == numbers_in(wanted)
        if skill == "count_freely":
            is_counted = len(numbers) >= MIN_COUNTED and numbers == list(range(1, len(numbers) + 1))
        return is_counted and _n_others(got) <= MAX_OTHER_WORDS
    if skill in ARITHMETIC:
        result = numbers_in(wanted)[-1]
        terms = sorted(numbers_in(spoken_words(said)), reverse=skill == "subtract")
        numbers = numbers_in(got)
        if skill == "add" and len(numbers) == 3:
            numbers = [*sorted(numbers[:2]), numbers[2]]
        return numbers in ([result], [*terms, result]) and len(got) <= MAX_WORDS
    if skill == "repeat":
        return _contains(got, wanted) and len(got) - len(wanted) <= MAX_OTHER_WORDS
    if block := _blocks_of_answers().get(wanted):
        return any(_is_near(got, answer) for answer in block)
    if skill not in FACTS:
        raise ValueError(f"skill {skill!r}: expected one with a rule, or an answer of a block, got {reference!r}")
    return len(got) <= MAX_WORDS and all(facts(kind, reply) == facts(kind, reference) for kind in FACTS[skill])


def facts(kind: str, text: str) -> Facts:
    """The facts of a kind in a text, each once, in the order of the alphabet; numbers are digits."""
    return tuple(sorted(set(_READERS[kind](text))))


def spoken_words(text: str) -> Words:
    """The words of a text in lower case, without punctuation; contractions are written out."""
    plain = text.lower().replace("’", "'").replace("don't", "do not").replace("doesn't", "does not")
    return tuple(re.findall(r"[a-z0-9']+", plain))


def numbers_in(spoken: Sequence[str]) -> list[int]:
    """The numbers from 0 to 59 in words or digits, in order."""
    found: list[int] = []
    tens_before = False
    for word in spoken:
        value = int(word) if word.isdecimal() else _numbers().get(word)
        if value is not None and tens_before and 0 < value < 10:
            found[-1] += value
        elif value is not None:
            found.append(value)
        tens_before = value is not None and value >= 20 and value % 10 == 0 and not word.isdecimal()
    return found


def _contains(spoken: Words, part: Words) -> bool:
    return any(spoken[start : start + len(part)] == part for start in range(len(spoken) - len(part) + 1))


def _is_near(spoken: Words, answer: Words) -> bool:
    return edit_distance(spoken, answer) <= WORD_TOLERANCE * len(answer)


def _n_others(spoken: Words) -> int:
    return sum(not numbers_in([word]) for word in spoken)


@cache
def _blocks_of_answers() -> dict[Words, tuple[Words, ...]]:
    """Answer without slots -> the answers of all blocks that contain it."""
    blocks: dict[Words, tuple[Words, ...]] = {}
    for intent in intents().values():
        answers = tuple(spoken_words(answer) for answer in intent.answers if "{" not in answer)
        for answer in answers:
            blocks[answer] = blocks.get(answer, ()) + answers
    return blocks


@cache
def _numbers() -> dict[str, int]:
    return {words.number(n): n for n in (*range(21), 30, 40, 50)}


def _reader(names: dict[str, str]) -> Callable[[str], list[str]]:
    """Finds names (words -> fact) in a text as whole words; a longer name hides those inside of it."""
    ordered = sorted(names, key=len, reverse=True)
    pattern = re.compile(r"\b(" + "|".join(re.escape(name) for name in ordered) + r")\b")
    return lambda text: [names[found] for found in pattern.findall(" ".join(spoken_words(text)))]


def _letters(text: str) -> list[str]:
    """A capital letter after the word `letter`, or as the last word: `A` and `I` are words elsewhere."""
    found = re.findall(r"\bletter ([A-Z])\b", text) + re.findall(r"\b([A-Z])[.!]?\s*$", text)
    return [letter for letter in found if letter in LETTERS]


def _lower(names: Sequence[str]) -> dict[str, str]:
    return {name.lower(): name for name in names}


def _with_plurals(names: Sequence[str], kind: str) -> dict[str, str]:
    color = None if kind == "thing" else "red"
    plurals = {Shown(kind, name, color).plural: name for name in names}  # type: ignore[arg-type]
    return {**{name: name for name in names}, **plurals}


def _numbers_of(text: str) -> list[str]:
    singular = {Shown("digit", name, "red").plural: name for name in DIGITS}
    return [str(n) for n in numbers_in([singular.get(word, word) for word in spoken_words(text)])]


def _motions(text: str) -> list[str]:
    if any(_is_near(spoken_words(text), spoken_words(answer)) for answer in intents()["still"].answers):
        return ["not at all"]
    return _reader({motion: motion for motion in MOTIONS if motion != "not at all"})(text)


_READERS: dict[str, Callable[[str], list[str]]] = {
    "color": _reader(_lower(sorted(COLORS))),
    "shape": _reader(_with_plurals(SHAPES, "shape")),
    "thing": _reader(_with_plurals(sorted(THINGS), "thing")),
    "number": _numbers_of,
    "letter": _letters,
    "name": _reader(_lower(words.NAMES)),
    "animal": _reader(_lower(words.ANIMALS)),
    "object": _reader(_lower(words.OBJECTS)),
    "home_place": _reader({words.second_person(place): place for place in words.PLACES}),
    "place": _reader({place: place for place in PLACES}),
    "motion": _motions,
}
