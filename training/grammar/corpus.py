"""Text that the model says, for its tokenizer: replies drawn from the whole grammar, and every word it may need."""

import random

from training.grammar import turns, words
from training.grammar.camera import draw_alert, draw_motion, draw_question, draw_target, draw_watch
from training.grammar.phrases import intents
from training.scenes.labels import COLORS, DIGITS, LETTERS, MOTIONS, PLACES, SHAPES, THINGS
from training.scenes.random_scenes import draw_shown

N_DRAWS = 1500  # of each kind of turn


def replies(seed: int = 0, n: int = N_DRAWS) -> list[str]:
    """Replies of `n` turns of each kind."""
    rng = random.Random(seed)
    memory = turns.ToldFacts()
    texts: list[str] = []
    for _ in range(n):
        drawn = [
            *(draw(rng, "train") for draw in (turns.draw_small_talk, turns.draw_counting, turns.draw_arithmetic)),
            *(draw(rng, "train") for draw in (turns.draw_repetition, turns.draw_unknown)),
            *(draw(rng, "train", memory) for draw in (turns.draw_told, turns.draw_recall)),
        ]
        shown, target = draw_shown(rng), draw_target(rng)
        drawn += [
            draw_question(rng, "train", shown),
            draw_motion(rng, "train", shown, rng.choice(MOTIONS)),
            draw_watch(rng, "train", target),
            draw_alert(rng, target),
        ]
        texts += [turn.text for turn in drawn]
    return texts


def corpus() -> str:
    """The tokenizer's training text, one reply or word a line."""
    named = [*COLORS, *SHAPES, *THINGS, *DIGITS, *LETTERS, *MOTIONS, *PLACES, *words.vocabulary()]
    answers = [answer for intent in intents().values() for answer in intent.answers]
    # A word is one token with a space before it, as it stands inside of a reply.
    return "\n".join([*replies(), *answers, *(f"I see {one} and {one}" for one in named)])
