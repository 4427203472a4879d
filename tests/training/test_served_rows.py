"""Training rows are serving rows: the engine, given a timeline with its decisions, feeds the same context."""

import random

import numpy as np
import pytest

from models.inputs.tokens import Tokenizer
from tests.training.served import Served, serve
from tests.worker.loop.engines import TINY, make_sound
from training.grammar.turns import Exchange
from training.scenes.labels import Shown
from training.scenes.render import draw_look
from training.timelines.layout import TOKEN, RowLayout
from training.timelines.speech import noise_bursts
from training.timelines.stage import Stage, answer_unit
from training.timelines.timeline import Timeline, View

REFERENCE = make_sound(9, 32_000)


def make_timeline(tokenizer: Tokenizer) -> Timeline:
    """A question, its answer, a picture that comes and goes, counting that is interrupted, and silence."""
    rng = random.Random(0)
    stage = Stage(rng, tokenizer.encode, tokenizer.special, noise_bursts)
    star = Shown("shape", "star", "red")
    stage.show(View(star, draw_look(star, rng), 4), 4)
    stage.show(None, 7)
    turn = Exchange("name", "what is your name", ("My name is Duo. I listen and speak at once.",))
    _, end = stage.speak(turn.reply, answer_unit(stage.hear(turn.said, 2.0, pause=True)), turn.skill)
    count = Exchange("count_to", "count to five", ("One,", "two,", "three,", "four,", "five."))
    first = answer_unit(stage.hear(count.said, end + 0.5))
    stage.speak(count.reply, first, count.skill)
    assert stage.interrupt(first + 2.2)
    stage.hear("stop", first + 2.2)
    return stage.build(31.5)  # the audio encoder restarts in unit 29


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


@pytest.fixture(scope="module")
def timeline(tokenizer: Tokenizer) -> Timeline:
    return make_timeline(tokenizer)


@pytest.fixture(scope="module")
def served(timeline: Timeline) -> Served:
    return serve(timeline, REFERENCE)


def test_the_engine_feeds_the_rows_of_the_layout(timeline: Timeline, tokenizer: Tokenizer, served: Served) -> None:
    layout = RowLayout(tokenizer)
    rows = layout.rows(timeline.units, layout.prompt(n_reference=20))
    n = len(served.ids)
    closing = (timeline.units[-1].tokens[-1], tokenizer.special.unit_end)
    assert n == len(rows) - len(closing), "expected all rows but those that close the last unit"
    assert served.ids == rows.ids[:n].tolist()
    assert served.is_media == (rows.kinds[:n] != TOKEN).tolist()
    assert tuple(rows.ids[n:]) == closing


def test_the_engine_takes_the_decisions_of_the_timeline(
    timeline: Timeline, tokenizer: Tokenizer, served: Served
) -> None:
    special = tokenizer.special
    for number, (unit, got) in enumerate(zip(timeline.units, served.outcomes, strict=True)):
        assert got.tokens == unit.tokens, f"unit {number}: expected {unit.tokens}, got {got.tokens}"
        assert got.is_listen == (unit.tokens == (special.listen,)), f"unit {number}"
        assert got.end_of_turn == (special.turn_eos in unit.tokens), f"unit {number}"
        text = tokenizer.decode([token for token in unit.tokens if token not in tokenizer.special_ids])
        assert got.text == text, f"unit {number}: expected {text!r}, got {got.text!r}"
    assert any(unit.tokens == (special.turn_eos, special.listen) for unit in timeline.units)
    assert np.count_nonzero(timeline.sound) > 0
