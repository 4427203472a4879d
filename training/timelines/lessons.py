"""What comes before conversations: repeating each sentence that is heard, and naming each picture that appears.

They teach the rows of sound and pictures to the language model. Each has a system text of its own, so that
conversations are not confused with them.
"""

import random
from collections.abc import Callable

from models.inputs.tokens import SpecialTokens
from training.grammar import turns, words
from training.grammar.camera import draw_question
from training.grammar.phrases import Split, fill
from training.scenes.labels import Shown
from training.scenes.random_scenes import draw_shown
from training.scenes.render import draw_look
from training.speech.sentences import sentence
from training.timelines.pacing import Encode
from training.timelines.recurring import Recurring
from training.timelines.speech import Synthesizer, noise_bursts
from training.timelines.stage import PAUSE_S, Stage, answer_unit
from training.timelines.timeline import FORCED_UNITS, Timeline, View

ECHO_SYSTEM = "Repeat what you hear."
CAPTION_SYSTEM = "Say what you see."
NOTHING_SEEN = "Nothing."
MIXED_SHARE = 0.65  # of sentences to repeat, in training
SPLICED_SHARE = 0.5  # of those: two sentences' halves; the others are words in any order
MAX_MIXED_WORDS = 12
READ_SHARE = 0.5  # of sentences for the speech model that are not of the grammar of conversations
READ_SEEDS: dict[Split, int] = {"train": 101, "held_out": 102}
ENDS = (".", "?", "!")  # of a sentence that is repeated as it is


def draw_echo(
    seed: int,
    seconds: float,
    encode: Encode,
    special: SpecialTokens,
    synthesize: Synthesizer,
    draw: Callable[[random.Random], str] | None = None,
    *,
    split: Split = "train",
    phrases: Recurring | None = None,
) -> Timeline:
    """Sentences, each of which the model repeats.

    Args:
        draw: a sentence; None: `draw_sentence` of the split.
        phrases: where sentences recur.
    """
    rng, phrases = random.Random(f"echo {split} {seed}"), phrases or Recurring()
    stage, now = Stage(rng, encode, special, synthesize, phrases), rng.uniform(0.3, 2.5)
    while now < seconds:
        source = phrases.source("echo", rng)
        text = draw_sentence(source, split) if draw is None else draw(source)
        end = stage.hear(text, now, "echo", pause=0.3)
        reply = text if text[-1] in ENDS else fill("{Text}.", text=text)
        _, until = stage.speak([reply], max(answer_unit(end), stage.next_free), "echo")
        now = max(until + rng.uniform(PAUSE_S[0], 2.0), float(stage.next_free))
    return stage.build(now)


def draw_captions(
    seed: int,
    seconds: float,
    encode: Encode,
    special: SpecialTokens,
    things: bool = True,
    views: Recurring | None = None,
) -> Timeline:
    """Pictures, each of which the model names in the unit in which it appears. There is no sound.

    views: where pictures recur.
    """
    rng, views = random.Random(f"captions {seed}"), views or Recurring()
    stage, unit = Stage(rng, encode, special, noise_bursts), 0
    while unit < seconds:
        source = views.source("caption", rng)
        shown: Shown | None = None if source.random() < 0.1 else draw_shown(source, things)
        stage.show(View(shown, draw_look(shown, source), unit), unit)
        unit = max(unit, FORCED_UNITS)
        text = NOTHING_SEEN if shown is None else caption(shown)
        _, until = stage.speak([fill("{Text}.", text=text.rstrip("."))], unit, "caption")
        unit = max(int(until), stage.next_free) + rng.randint(0, 2)
    return stage.build(float(unit))


def caption(shown: Shown) -> str:
    """All that a label says: `a red star on the left`, `three blue circles`."""
    if shown.count > 1:
        number, name = shown.words.split(" ", 1)
        return f"{number} {name}" if shown.color is None else f"{number} {shown.color} {name}"
    color = f" in {shown.color}" if shown.kind in ("digit", "letter") else ""
    return f"{shown.words}{color} {shown.place}"


def draw_sentence(rng: random.Random, split: Split) -> str:
    """What is said in a lesson to repeat."""
    return mixed(rng) if split == "train" and rng.random() < MIXED_SHARE else draw_said(rng, split)


def draw_read(rng: random.Random, split: Split) -> str:
    """A sentence for the speech model: one as people write it, of many words, or as in a lesson to repeat."""
    if rng.random() < READ_SHARE:
        return sentence(READ_SEEDS[split], rng.getrandbits(48))
    return draw_sentence(rng, split)


def mixed(rng: random.Random) -> str:
    """Words that no one says in this order, so that hearing does not rest on sentences that are known."""
    if rng.random() < SPLICED_SHARE:
        halves = [draw_said(rng, "train").split() for _ in range(2)]
        first, second = (rng.randint(1, len(half)) for half in halves)
        return " ".join([*halves[0][:first], *halves[1][-second:]][:MAX_MIXED_WORDS])
    return " ".join(rng.choices(words.spoken_words(), k=rng.randint(1, 7)))


def draw_said(rng: random.Random, split: Split) -> str:
    """Something that a person says in conversations."""
    draws: tuple[Callable[[], str], ...] = (
        lambda: turns.draw_small_talk(rng, split).said,
        lambda: turns.draw_small_talk(rng, split).said,
        lambda: turns.draw_counting(rng, split).said,
        lambda: turns.draw_arithmetic(rng, split).said,
        lambda: turns.draw_told(rng, split, turns.ToldFacts()).said,
        lambda: turns.draw_recall(rng, split, turns.ToldFacts()).said,
        lambda: draw_question(rng, split, draw_shown(rng)).said,
        lambda: words.sentence(rng, split),
        lambda: words.far_sentence(rng, split),
    )
    return rng.choice(draws)()
