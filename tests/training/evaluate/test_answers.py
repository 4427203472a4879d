"""Right and wrong answers: by facts, in any of the grammar's words."""

import random

import pytest

from training.evaluate.answers import facts, is_right, numbers_in, spoken_words
from training.grammar import camera, turns
from training.grammar.phrases import intents
from training.grammar.turns import Exchange, ToldFacts
from training.scenes.labels import MOTIONS, Shown
from training.scenes.random_scenes import draw_shown

# Skill, what was said, a right answer, replies that are right, replies that are wrong.
CASES = [
    ("add", "what is four plus five", "That is nine.", ["Nine.", "Four plus five is nine.", "Five plus four is nine."],
     ["Ten.", "Four plus five.", "Four plus six is nine.", "Nine plus four is five.", "Nine. Or ten.", "", "Hello!",
      "It is fine."]),
    ("subtract", "take three away from ten", "Ten minus three is seven.", ["7.", "Seven."],
     ["Three minus ten is seven.", "Ten minus three is eight.", "Three."]),
    ("count_to", "count to four", "One, two, three, four.", ["one two three four", "Okay. One, two, three, four."],
     ["One, two, three.", "One, two, four, three.", "One, two, three, four, five.", "Four.",
      "One sheep, two sheep, three sheep and four sheep."]),
    ("count_down", "count down from three", "Three, two, one.", ["Three two one"], ["One, two, three.", "Three, one."]),
    ("count_freely", "count", "One, two, three, four, five.", ["One, two, three."], ["One, two.", "Two, three, four."]),
    ("repeat", "repeat the cat sees the door", "The cat sees the door.", ["You said the cat sees the door."],
     ["The cat sees the tree.", "The cat sees.", "The door sees the cat.", "The cat sees the the door."]),
    ("stop", "stop", "", ["", " "], ["Okay.", "I will stop."]),
    ("unknown", "the mayor rejected the budget", "I don't understand.",
     ["Sorry, I don't understand that.", "I do not understand."], ["The mayor rejected the budget.", "I understand."]),
    ("greet", "hello", "Hello! I am listening.", ["Hi there! What shall we do?", "Hello, I am listening"],
     ["Good night! Sleep well.", "Hello hello hello hello.", "Red."]),
    ("tell_name", "my name is Ben", "Hello Ben!",
     ["Nice to meet you, Ben."], ["Hello Paul!", "Hello!", "Hello Ben Paul."]),
    ("ask_name", "who am I", "You are Ben.", ["Your name is Ben."], ["You are Anna.", "You did not tell me."]),
    ("ask_name", "who am I", "You did not tell me.", ["I do not know. You did not say."], ["You are Ben."]),
    ("tell_place", "my key is in my bag", "Okay, your key is in your bag.", ["I will remember, key in your bag."],
     ["Okay, your hat is in your bag.", "Okay, your key is in the box."]),
    ("ask_place", "where is my key", "It is in your bag.", ["Your key is in your bag."],
     ["It is under the bed.", "It is in my bag.", "It is on the left."]),
    ("show_color", "what color is this", "It is red.",
     ["Red.", "I see red."], ["It is green.", "Red and blue.", "A dog."]),
    ("show_shape", "what shape is this", "It is a star.",
     ["That is a star.", "Star"], ["It is a cross.", "It is red."]),
    ("show_digit", "what number is this", "I see the number seven.", ["Seven.", "It is 7."], ["Eight.", "Seventeen."]),
    ("show_letter", "read the letter", "It is A.", ["I see the letter A.", "A."], ["It is B.", "I see a letter.", "a"]),
    ("show_letter", "read the letter", "I.", ["I see the letter I."], ["I see nothing I know.", "I see the letter L."]),
    ("show_count", "how many are there", "I count three.", ["Three."], ["Four.", "I see.", "Three or four."]),
    ("show_place", "where is it", "It is on the left.",
     ["I see it on the left."], ["It is on the right.", "On the table."]),
    ("show_motion", "how does it move", "It moves up.", ["It went up."], ["It moves down.", "It does not move."]),
    ("show_motion", "is it moving", "It does not move.", ["It stays where it is."], ["It moves up."]),
    ("show_thing", "what is this", "I see three dogs.", ["That looks like three dogs."],
     ["I see two dogs.", "I see a dog.", "I see three cats."]),
    ("show_thing", "what is this", "I see a red circle.", ["You show me a red circle."],
     ["I see a blue circle.", "I see a red star.", "I see a circle.", "I see red."]),
    ("show_thing", "what is this", "I see nothing I know.", ["There is nothing special to see."], ["I see a dog."]),
    ("watch_for", "tell me when you see a sun", "I will look out for the sun.",
     ["I will tell you when I see the sun."], ["I will look out for the moon.", "The sun the moon.", "Okay."]),
    ("watch_alert", "", "Now! I see something red.", ["There it is, something red!"], ["I see green now.", "Now!"]),
]  # fmt: skip


@pytest.mark.parametrize(("skill", "said", "reference", "right", "wrong"), CASES, ids=lambda value: str(value)[:24])
def test_facts_decide(skill: str, said: str, reference: str, right: list[str], wrong: list[str]) -> None:
    for reply in [reference, *right]:
        assert is_right(skill, said, reference, reply), f"{said!r}: expected {reply!r} to be right, as {reference!r} is"
    for reply in wrong:
        assert not is_right(skill, said, reference, reply), f"{said!r}: expected {reply!r} to be wrong"


def draw_all(rng: random.Random) -> list[Exchange]:
    """A turn of every kind."""
    memory, shown = ToldFacts(), draw_shown(rng)
    target = camera.draw_target(rng)
    drawn = [
        *(draw(rng, "held_out") for draw in (turns.draw_small_talk, turns.draw_counting, turns.draw_arithmetic)),
        *(draw(rng, "held_out") for draw in (turns.draw_repetition, turns.draw_unknown)),
        *(draw(rng, "held_out", memory) for draw in (turns.draw_told, turns.draw_recall)),
        *(camera.draw_question(rng, "held_out", one) for one in (shown, None)),
        camera.draw_motion(rng, "held_out", shown, rng.choice(MOTIONS)),
        camera.draw_shown_before(rng, "held_out", shown),
        camera.draw_watch(rng, "held_out", target),
        camera.draw_alert(rng, target),
        *(turns.draw_plain(skill, rng, "held_out") for skill in ("stop", "quiet", "speak_again", "watch_cancel")),
    ]
    return drawn


def test_every_turn_of_the_grammar_is_right_and_another_turns_reply_is_wrong() -> None:
    rng = random.Random(0)
    n_wrong: dict[str, int] = {}
    n_drawn: dict[str, int] = {}
    before, no_picture = draw_all(rng), intents()["no_picture"].answers
    for _ in range(150):
        drawn = draw_all(rng)
        for turn, other in zip(drawn, before, strict=True):
            assert is_right(turn.skill, turn.said, turn.text, turn.text), f"expected {turn} to be right"
            if turn.text:
                assert not is_right(turn.skill, turn.said, turn.text, ""), f"{turn}: expected silence to be wrong"
                babble = f"{turn.text} and a river of words that have nothing to do with what was said before this"
                assert not is_right(turn.skill, turn.said, turn.text, babble), f"{turn}: expected babble to be wrong"
            if turn.text in no_picture:  # all of them are equally right
                continue
            n_drawn[turn.skill] = n_drawn.get(turn.skill, 0) + 1
            n_wrong[turn.skill] = n_wrong.get(turn.skill, 0) + (
                not is_right(turn.skill, turn.said, turn.text, other.text)
            )
        before = drawn
    # Some skills have few answers, and two draws are often equally right.
    narrow = {"unknown", "quiet", "speak_again", "watch_cancel", "stop", "count_freely", "show_motion"}
    for skill, n in n_drawn.items():
        share = n_wrong[skill] / n
        if skill not in narrow and n >= 30:
            assert share > 0.5, f"{skill}: expected most replies to other turns to be wrong, got {share:.2f}"


def test_every_skill_has_a_rule() -> None:
    rng = random.Random(1)
    skills = {turn.skill for _ in range(400) for turn in draw_all(rng)}
    silent = {"unknown", "not_told", "still", "no_picture", "see_nothing"}
    missing = intents().keys() - skills - silent
    assert not missing, f"expected turns of all blocks, none of {missing}"
    with pytest.raises(ValueError, match="expected one with a rule"):
        is_right("dance", "dance", "I dance a waltz.", "I dance.")


def test_words_and_numbers() -> None:
    assert spoken_words("I don’t know, Ben!") == ("i", "do", "not", "know", "ben")
    assert numbers_in(spoken_words("Twenty one, nineteen and 30")) == [21, 19, 30]
    assert facts("number", "two sevens") == ("2", "7")
    assert facts("shape", Shown("shape", "cross", "red", 2).words) == ("cross",)
    assert facts("place", "It is in the middle.") == ("in the middle",)
