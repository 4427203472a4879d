"""English sentences for speech: a small grammar over `words.txt`, drawn by seed and number.

The grammar covers what the model talks about (greetings, numbers, colours, shapes, letters, things, small talk) and the
sounds of the language. Contains text only. Sentence `i` of a seed never depends on other sentences.
"""

import random
import re
from functools import cache
from pathlib import Path

WORDS = Path(__file__).with_name("words.txt")
MAX_PARTS = 3  # sentences spoken in one utterance

# `{section}` is a drawn word. `{number}`, `{sum}`, `{clock}`, `{spelled}` and `{digits}` are made by functions below.
TEMPLATES = """
{greeting}, {name}.
{greeting}! How are you {time}?
{greeting}, my name is {name}. What is your name?
I am {feeling}, and you?
{farewell}, {name}.
{answer}, {farewell}.
{answer}.
{answer}, I can {verb} the {thing}.
{answer}, it is {adjective}.
The {colour} {shape} is {position}.
I see a {colour} {shape} and a {colour} {shape}.
There is a {adjective} {thing} {position}, and a {colour} {thing} {position}.
Is the {shape} {colour} or {colour}?
What colour is the {thing}?
It is {colour}, I think.
You are holding a {adjective} {colour} {thing}.
The {shape} moved from the {place} to the {place}.
I count {number} {thing}s and {number} {animal}s.
{sum}
My number is {digits}.
It is {clock}.
Please wake me up at {clock} {time}.
You spell it {spelled}.
The letter {letter} comes before the letter {letter}.
{letter} as in {thing}, {letter} as in {animal}.
It is {weather} and {weather} {time}.
Will it be {weather} in the {place} {time}?
{time}, {person} wants to {activity}.
Can you {activity} with {person}?
I would like some {food} and a glass of {drink}, please.
Do you prefer {food} or {food}?
{person} {adverb} eats {food} with {food}.
The {adjective} {animal} {adverb} ran through the {place}.
A {animal} and a {animal} live near the {place}.
{person} gave {person} a {adjective} {thing} {time}.
Why is {person} so {feeling}?
{person} was {feeling}, because the {thing} was {adjective}.
Let us {activity} {time}, and then {activity}.
Could you please {verb} the {thing} for me?
I {adverb} {verb} the {adjective} {thing} in the {place}.
Tell me a story about {person} and a {adjective} {animal}.
Once there was a {adjective} {animal} who wanted to {activity}.
{coverage}.
{coverage}, and {coverage}.
{name} said: {coverage}.
First {verb}, then {verb}, and finally {verb}.
{adjective}, {adjective}, {colour}, {feeling}, {thing}.
{thing}, {animal}, {food}, {drink}, {shape}.
In {number} days we will {activity} in the {place}.
It costs {number} dollars and {number} cents.
The train to the {place} leaves at {clock}.
How many {animal}s are there in the {place}?
I heard {person} {adverb} laughing in the {place}.
{answer}. Stop, please.
Wait a moment, {name}. I want to {verb} something {adjective}.
What do you see now? A {colour} {thing}?
Your {thing} looks {adjective} {time}.
"""

_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_TEENS = (
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
)


def sentence(seed: int, number: int) -> str:
    """The text of one utterance: one to three sentences, the same on every machine."""
    draw = random.Random(f"{seed}:{number}")
    n_parts = draw.choices(range(1, MAX_PARTS + 1), (6, 3, 1))[0]
    return " ".join(_one(draw) for _ in range(n_parts))


@cache
def sections() -> dict[str, list[str]]:
    """The words of each section of `words.txt`."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in WORDS.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            name = line.strip("[]")
            found[name] = []
        elif line and not line.startswith("#"):
            found[name] += [word.strip() for word in line.split(";")]
    return found


def in_words(number: int) -> str:
    """A number from 0 to 999 in words."""
    words = []
    if number >= 100:
        words.append(f"{sections()['digit'][number // 100]} hundred")
        number %= 100
        if not number:
            return words[0]
    if number >= 20:
        words.append(_TENS[number // 10 - 2])
        number %= 10
        if not number:
            return " ".join(words)
    words.append(_TEENS[number - 10] if number >= 10 else sections()["digit"][number])
    return " ".join(words)


def _one(draw: random.Random) -> str:
    template = draw.choice([line for line in TEMPLATES.splitlines() if line])
    text = re.sub(r"\{(\w+)\}", lambda field: _filled(draw, field[1]), template)
    text = re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", text)
    return text[0].upper() + text[1:]


def _filled(draw: random.Random, field: str) -> str:
    match field:
        case "number":
            return in_words(draw.choice((draw.randrange(1, 21), draw.randrange(100), draw.randrange(1000))))
        case "sum":
            left, right = draw.randrange(1, 21), draw.randrange(1, 21)
            return f"{in_words(left)} plus {in_words(right)} is {in_words(left + right)}."
        case "clock":
            minute = draw.choice(("", " fifteen", " thirty", " forty five", " o'clock"))
            return in_words(draw.randrange(1, 13)) + minute
        case "spelled":
            return ", ".join(draw.choices(sections()["letter"], k=draw.randrange(3, 7)))
        case "digits":
            return " ".join(draw.choices(sections()["digit"], k=draw.randrange(3, 8)))
    return draw.choice(sections()[field])
