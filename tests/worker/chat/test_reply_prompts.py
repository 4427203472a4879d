"""Prefill of a reply's prompt: in parts between other sessions' tokens, and in the smallest bucket."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from models.stages.runner import Rows, Runner
from tests.models.stages.conversations import picture
from tests.worker.chat.reply_engine import WRITTEN, AnsweringEngine, make_parts, partials, script, words
from worker.loop.results import Prefilled
from worker.loop.text_stages import PERIOD


def test_long_prompt_is_fed_in_parts_between_other_tokens() -> None:
    engine = AnsweringEngine(make_parts(2, rows=(16,)))
    greedy = WRITTEN.model_copy(update={"decode_mode": "greedy"})
    question = (picture(60, 60), "What is it? " * 8)
    engine.ask("short", "Hi", config=greedy)
    engine.run_until(lambda: bool(partials(engine.events["short"])))
    engine.ask("long", *question, config=greedy)
    n_pieces = -(-len(engine.content(*question)) // 16)
    assert n_pieces > 5
    for number in range(n_pieces + 1):  # the picture, then the rows
        assert engine.events["long"] == [], f"piece {number}: expected no event yet"
        n_before = len(partials(engine.events["short"]))
        engine.step()
        assert len(partials(engine.events["short"])) == n_before + 1, f"piece {number}: expected a token beside it"
    assert isinstance(engine.events["long"][0], Prefilled)
    got, whole = engine.outcome("long"), AnsweringEngine(make_parts(2, rows=(512,)))
    whole.ask("long", *question, config=greedy)
    assert got.tokens == whole.outcome("long").tokens


class Work:
    """What each iteration of a loop feeds and encodes. rows: rows fed by slot. slices: image slices encoded."""

    def __init__(self, engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch):
        self.rows: list[dict[int, int]] = []
        self.slices: list[int] = []
        self._engine, steps = engine, engine.unit_steps
        feed, encode = steps.feed, Runner.encode_images

        def count_rows(slots: Sequence[int], rows: Sequence[Rows], *rest: Any) -> Any:
            for slot, own in zip(slots, rows, strict=True):
                self.rows[-1][slot] = self.rows[-1].get(slot, 0) + len(own)
            return feed(slots, rows, *rest)

        def count_slices(runner: Runner, images: Sequence[Any]) -> Any:
            self.slices[-1] += len(images)
            return encode(runner, images)

        monkeypatch.setattr(steps, "feed", count_rows)
        monkeypatch.setattr(Runner, "encode_images", count_slices)

    def step(self) -> bool:
        self.rows.append({})
        self.slices.append(0)
        return self._engine.step()


def test_iterations_without_units_do_one_bounded_part_of_all_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AnsweringEngine(make_parts(3, rows=(16, 64)))
    pictures = [picture(60, 60)] * 5
    for name in ("one", "two"):
        engine.ask(name, *pictures, "word " * 40)
    engine.ask("short", "Hi")
    work = Work(engine, monkeypatch)
    names = ("short", "one", "two")
    begun = dict.fromkeys(names, 0)
    while not all(begun.values()):
        work.step()
        begun = {name: n or (len(work.rows) if engine.events[name] else 0) for name, n in begun.items()}
        assert len(work.rows) < 100, "expected all replies to begin within 100 iterations"
    parts = [(sum(rows.values()), n) for rows, n in zip(work.rows, work.slices, strict=True)]
    assert all(n_rows <= 64 and n_slices <= 2 and not (n_rows and n_slices) for n_rows, n_slices in parts), parts
    assert begun["short"] <= 3, f"expected the short reply not to wait for all pictures, got {begun}"


def test_reply_yields_to_units_and_does_not_change_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AnsweringEngine(make_parts(2, rows=(16, 64)))
    question, greedy = (picture(60, 60), "word " * 100), WRITTEN.model_copy(update={"decode_mode": "greedy"})
    engine.ask("alone", *question, config=greedy)
    expected = engine.outcome("alone").tokens
    session = engine.open("unit")
    work = Work(engine, monkeypatch)
    reply = engine.ask("reply", *question, config=greedy)
    began: list[int] = []  # iterations in which the reply had a part while a unit had text or speech
    number = 0
    while not engine.events["reply"]:
        if not session.is_busy:
            script(engine, unit=[engine.language.special.speak, *words(engine, 9)])
            engine.send(session, number)
            number += 1
        work.step()
        if (work.rows[-1].get(reply.slot) or work.slices[-1]) and session.is_busy:
            began.append(len(work.rows))
        assert work.rows[-1].get(reply.slot, 0) <= 64
        assert len(work.rows) < 400, "expected the reply to begin within 400 iterations"
    assert len(began) > 3, f"expected parts beside units, got them at iterations {began}"
    waits = [later - earlier for earlier, later in pairwise(began)]
    assert min(waits) >= PERIOD, f"expected {PERIOD} iterations between two parts beside units, got {waits}"
    assert engine.outcome("reply").tokens == expected
