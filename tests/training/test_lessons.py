"""Lessons: what is heard is repeated, what appears is named."""

import random
from pathlib import Path

import pytest

from models.inputs.tokens import Tokenizer
from training.scenes.labels import Shown
from training.timelines.lessons import ENDS, caption, draw_captions, draw_echo, draw_read
from training.timelines.speech import noise_bursts

TINY = Path(__file__).parents[2] / "assets" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


def test_each_sentence_is_repeated(tokenizer: Tokenizer) -> None:
    timeline = draw_echo(2, 60, tokenizer.encode, tokenizer.special, noise_bursts)
    said = [one.text.lower() for one in timeline.script if one.by == "person"]
    repeated = [one.text.lower() for one in timeline.script if one.by == "model"]
    assert len(said) > 5
    assert repeated == [f"{text}." for text in said]
    spoken = [token for unit in timeline.units for token in unit.tokens if token not in tokenizer.special_ids]
    assert tokenizer.decode(spoken).lower() == "".join(repeated)


def test_each_picture_is_named_when_it_appears(tokenizer: Tokenizer) -> None:
    timeline = draw_captions(3, 60, tokenizer.encode, tokenizer.special, things=False)
    named = {int(one.start) - 1: one.text for one in timeline.script}
    assert len(named) > 8
    for unit, text in named.items():
        picture = timeline.units[unit].picture
        assert picture is not None
        assert text.lower() == ("nothing." if picture.shown is None else f"{caption(picture.shown)}.".lower())
    assert not timeline.sound.any()


def test_captions_tell_the_whole_label() -> None:
    assert caption(Shown("shape", "star", "red", 1, "on the left")) == "a red star on the left"
    assert caption(Shown("shape", "circle", "blue", 3)) == "three blue circles"
    assert caption(Shown("digit", "eight", "black")) == "an eight in black in the middle"
    assert caption(Shown("thing", "dog", None, 2)) == "two dogs"


def test_sentences_for_the_speech_model_are_of_many_kinds(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    drawn = [draw_read(rng, "train") for _ in range(400)]
    assert len(set(drawn)) > 350 and 0.3 < sum(text[-1] in ENDS for text in drawn) / 400 < 0.7
    held_out = {draw_read(rng, "held_out") for _ in range(400)}
    assert len({text for text in drawn if text[-1] in ENDS} & held_out) < 40, "expected few short ones in both"
    text = "What is it? It is blue."
    timeline = draw_echo(0, 9, tokenizer.encode, tokenizer.special, noise_bursts, lambda _: text)
    assert {one.text for one in timeline.script if one.by == "model"} == {text}
