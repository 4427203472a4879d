"""The conversation grammar: its size, its held-out phrases, and answers that are right."""

import random
import re
from collections import Counter
from collections.abc import Callable

import pytest

from training.grammar import turns, words
from training.grammar.camera import Target, answers, draw_match, draw_motion, draw_question, draw_target, fits
from training.grammar.phrases import Split, intents, read_blocks, small_talk, variants
from training.scenes.labels import Shown
from training.scenes.random_scenes import draw_shown

N = 300


def number_of(word: str) -> int:
    return next(n for n in range(60) if words.number(n) == word)


def test_intents_and_paraphrases_are_enough() -> None:
    assert len(small_talk()) >= 60
    few = {
        name: len(one.train + one.held_out) for name, one in intents().items() if 0 < len(one.train + one.held_out) < 8
    }
    assert not few, f"expected at least 8 paraphrases of each intent, got {few}"
    silent = [name for name, one in small_talk().items() if not one.answers]
    assert not silent, f"expected answers, got none for {silent}"


def test_held_out_phrases_are_never_trained() -> None:
    trained = {phrase for one in intents().values() for phrase in one.train}
    held_out = {phrase for one in intents().values() for phrase in one.held_out}
    assert not trained & held_out
    without = [name for name, one in intents().items() if one.train and not one.held_out]
    assert not without, f"expected held-out phrases in each block, got none in {without}"
    meanings = Counter(phrase for one in intents().values() for phrase in one.train + one.held_out)
    assert max(meanings.values()) == 1, f"expected one meaning for each phrase, got {meanings.most_common(3)}"


@pytest.mark.parametrize("make", [words.sentence, words.far_sentence])
def test_made_sentences_belong_to_one_split(make: Callable[[random.Random, Split], str]) -> None:
    rng = random.Random(0)
    train, held_out = {make(rng, "train") for _ in range(N)}, {make(rng, "held_out") for _ in range(N)}
    assert not train & held_out
    assert len(train) > 0.7 * N


def test_templates_expand() -> None:
    assert variants("(a|b) c [d|e f]") == ["a c", "a c d", "a c e f", "b c", "b c d", "b c e f"]
    with pytest.raises(ValueError, match="line 1: expected a block's head"):
        read_blocks("hello")


def test_sums_are_right() -> None:
    rng = random.Random(1)
    for _ in range(N):
        turn = turns.draw_arithmetic(rng, "train")
        told = re.findall(rf"\b({'|'.join(words.number(n) for n in range(21))})\b", turn.said)
        a, b = map(number_of, told)
        if " from " in turn.said or " less than " in turn.said:
            a, b = b, a
        expected = words.number(a + b if turn.skill == "add" else a - b)
        assert turn.text.lower().rstrip(".").endswith(expected), f"{turn.said}: expected {expected}, got {turn.text}"


def test_counting_has_a_number_in_each_part() -> None:
    rng = random.Random(2)
    for _ in range(50):
        turn = turns.draw_counting(rng, "train")
        counted = [number_of(part.lower().rstrip(",.")) for part in turn.reply]
        step = -1 if turn.skill == "count_down" else 1
        assert counted == list(range(counted[0], counted[-1] + step, step)), turn


def test_memory_answers_what_was_told() -> None:
    rng, memory = random.Random(3), turns.ToldFacts()
    assert turns.draw_recall(rng, "train", memory).text in intents()["not_told"].answers
    for _ in range(N):
        turns.draw_told(rng, "train", memory)
        turn = turns.draw_recall(rng, "train", memory)
        fact = turn.skill.removeprefix("ask_")
        known = memory.facts.get(fact)
        if turn.text in intents()["not_told"].answers:
            assert known is None or (fact == "place" and known["object"] not in turn.said)
        else:
            assert known is not None
            assert words.second_person(known[fact]) in turn.text


def test_camera_answers_fit_the_picture() -> None:
    rng = random.Random(4)
    star, dogs, seven = Shown("shape", "star", "red"), Shown("thing", "dog", None, 3), Shown("digit", "seven", "blue")
    assert answers("show_thing", star) == {"thing": "a red star"}
    assert answers("show_count", dogs) == {"count": "three"}
    assert answers("show_digit", seven) == {"thing": "seven"}
    assert not fits("show_color", dogs) and not fits("show_count", seven)
    assert "dogs" in {word for _ in range(50) for word in draw_question(rng, "train", dogs).said.split()}
    assert draw_question(rng, "train", None).text in intents()["no_picture"].answers
    assert draw_motion(rng, "train", star, "to the left").text.endswith("to the left.")
    assert draw_motion(rng, "train", star, "not at all").text in intents()["still"].answers
    assert Target("something red", color="red").matches(star)
    assert not Target("a dog", name="dog").matches(star) and not Target("a dog", name="dog").matches(None)


def test_number_and_place_do_not_reveal_the_target() -> None:
    rng, drawn = random.Random(5), list[Shown]()
    for _ in range(N):
        target = draw_target(rng)
        drawn.append(draw_match(rng, target))
        assert target.matches(drawn[-1]), f"expected a match of {target}, got {drawn[-1]}"

    def in_the_middle(shown: list[Shown]) -> float:
        return sum(one.count == 1 and one.place == "in the middle" for one in shown) / len(shown)

    expected, got = in_the_middle([draw_shown(rng) for _ in range(N)]), in_the_middle(drawn)
    assert got == pytest.approx(expected, abs=0.06), f"one in the middle: expected {expected:.2f}, got {got:.2f}"
    assert {one.kind for one in drawn} == {"shape", "digit", "letter", "thing"}
