"""Words that fill slots: numbers, names, objects, and sentences of simple and of foreign words."""

import random
from functools import cache

from training.grammar.phrases import CLOSERS, OPENERS, SPLITS, Split, intents

_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty")

NAMES = (
    *("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo", "Maria"),
    *("Nick", "Olivia", "Paul", "Rosa", "Sam", "Tina", "Victor", "Wendy", "Max", "Lucy", "Peter", "Sophie", "Tom"),
)
ANIMALS = ("cat", "dog", "fish", "bird", "horse", "rabbit", "mouse", "turtle", "hamster", "snake")
OBJECTS = ("key", "phone", "book", "hat", "cup", "bag", "wallet", "pen", "coat", "umbrella", "ball", "lamp")
PLACES = (
    *("on the table", "under the bed", "in the kitchen", "in my bag", "on the chair", "behind the door", "in the car"),
    *("in the garden", "on the shelf", "in the box", "by the window", "in the drawer"),
)

_SUBJECTS = (
    *("the cat", "the dog", "my sister", "the old man", "a small bird", "the teacher", "our neighbor", "the child"),
    *("my friend", "the red car", "the moon", "a little girl", "the gardener", "the train", "the river", "the baker"),
)
_VERBS = (
    *("sees", "likes", "finds", "wants", "carries", "paints", "hears", "follows", "brings", "loses", "watches"),
    *("draws", "buys", "opens", "remembers", "hides"),
)
_OBJECTS = (
    *("the house", "a green apple", "the long road", "a white horse", "the blue sky", "fresh bread", "the garden"),
    *("a warm coat", "the old clock", "two birds", "a letter", "the quiet street", "a yellow flower", "the door"),
    *("some water", "the tall tree"),
)
_TAILS = ("", "in the morning", "every day", "by the sea", "after lunch", "at night", "near the station", "again")

_FAR_SUBJECTS = (
    *("the committee", "my lawyer", "the quarterly report", "the parliament", "an engineer", "the central bank"),
    *("this algorithm", "the plumber", "the insurance company", "a distant cousin", "the mayor", "the chemist"),
    *("the orchestra", "a journalist", "the supplier", "the landlord", "the museum", "the airline"),
)
_FAR_VERBS = (
    *("postponed", "questioned", "translated", "calculated", "rejected", "published", "negotiated", "inherited"),
    *("repaired", "approved", "summarized", "confiscated", "financed", "discovered", "invoiced", "criticized"),
)
_FAR_OBJECTS = (
    *("the budget", "a contract", "the tax return", "the theory of relativity", "a mortgage", "the pipeline"),
    *("three applications", "the treaty", "a vaccine", "the software update", "the invoice", "the manuscript"),
    *("an enzyme", "the carburetor", "a symphony", "the election result", "the railway strike", "the warranty"),
)
_FAR_FRAMES = (
    *("{s} {v} {o}", "did you know that {s} {v} {o}", "please explain why {s} {v} {o}", "I heard {s} {v} {o}"),
    *("can you book a flight because {s} {v} {o}", "what if {s} never {v} {o}", "yesterday {s} {v} {o}"),
    *("write an essay about how {s} {v} {o}", "who {v} {o} before {s}", "compare {o} with {s}"),
    *("find me a restaurant near {s}", "how do I install {o}", "order {o} for {s}", "translate {o} into Latin"),
)


def number(n: int) -> str:
    """A number from 0 to 59 in words."""
    if not 0 <= n < 60:
        raise ValueError(f"number: expected 0 to 59, got {n}")
    if n < 20:
        return _ONES[n]
    tens, ones = divmod(n, 10)
    return _TENS[tens - 2] + (f" {_ONES[ones]}" if ones else "")


@cache
def spoken_words() -> tuple[str, ...]:
    """Every word of the phrases of both splits and of their slots, and of sentences to repeat, sorted."""
    texts = [one for intent in intents().values() for split in SPLITS for one in intent.phrases(split)]
    texts += [*vocabulary(), *OPENERS, *CLOSERS]
    return tuple(sorted({word for text in texts for word in text.split() if "{" not in word}))


def sentence(rng: random.Random, split: Split) -> str:
    """A sentence of simple words to repeat; each sentence belongs to one split."""
    while True:
        parts = (rng.choice(_SUBJECTS), rng.choice(_VERBS), rng.choice(_OBJECTS), rng.choice(_TAILS))
        text = " ".join(filter(None, parts))
        if _split_of(text) == split:
            return text


def far_sentence(rng: random.Random, split: Split) -> str:
    """A sentence outside the model's world; each sentence belongs to one split."""
    while True:
        slots = {"s": rng.choice(_FAR_SUBJECTS), "v": rng.choice(_FAR_VERBS), "o": rng.choice(_FAR_OBJECTS)}
        text = rng.choice(_FAR_FRAMES).format(**slots)
        if _split_of(text) == split:
            return text


def second_person(place: str) -> str:
    """A place as the listener says it back: `in my bag` becomes `in your bag`."""
    return place.replace(" my ", " your ")


def vocabulary() -> list[str]:
    """All words that answers may contain beyond those of the phrases, for the tokenizer."""
    numbers = [number(n) for n in range(60)]
    return [*numbers, *NAMES, *ANIMALS, *OBJECTS, *PLACES, *_SUBJECTS, *_VERBS, *_OBJECTS, *_TAILS]


def _split_of(text: str) -> Split:
    """A fifth of all sentences is held out."""
    return "held_out" if random.Random(text).random() < 0.2 else "train"
