"""Prefill of a reply's prompt: in parts between other sessions' tokens, and in the smallest bucket."""

import pytest

from tests.models.stages.conversations import picture
from tests.worker.chat.reply_engine import WRITTEN, AnsweringEngine, make_parts, partials
from worker.loop.results import Prefilled


def test_long_prompt_is_fed_in_parts_between_other_tokens() -> None:
    engine = AnsweringEngine(make_parts(2, rows=(16,)))
    greedy = WRITTEN.model_copy(update={"decode_mode": "greedy"})
    question = (picture(60, 60), "What is it? " * 8)
    engine.ask("short", "Hi", config=greedy)
    engine.run_until(lambda: bool(partials(engine.events["short"])))
    engine.ask("long", *question, config=greedy)
    n_pieces = -(-len(engine.content(*question)) // 16)
    assert n_pieces > 5
    for number in range(n_pieces):
        assert engine.events["long"] == [], f"piece {number}: expected no event yet"
        n_before = len(partials(engine.events["short"]))
        engine.step()
        assert len(partials(engine.events["short"])) == n_before + 1, f"piece {number}: expected a token beside it"
    assert isinstance(engine.events["long"][0], Prefilled)
    got, whole = engine.outcome("long"), AnsweringEngine(make_parts(2, rows=(512,)))
    whole.ask("long", *question, config=greedy)
    assert got.tokens == whole.outcome("long").tokens


def test_short_prompt_is_not_padded_to_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AnsweringEngine(make_parts(2, rows=(16, 64)))
    fed: list[list[int]] = []
    feed = engine.unit_steps.feed
    monkeypatch.setattr(
        engine.unit_steps,
        "feed",
        lambda slots, rows, *rest: fed.append([len(r) for r in rows]) or feed(slots, rows, *rest),
    )
    engine.ask("long", "word " * 40)
    session = engine.open("unit")
    fed.clear()
    engine.send(session, 1)
    engine.step()
    assert fed == [[11], [64]], f"expected the unit's rows by themselves, got {fed}"
