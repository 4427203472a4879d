"""Replies and a duplex session on one engine: one after the other, and all at once in random order."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.models.stages.conversations import picture, sound
from tests.worker.chat.reply_engine import ASKED, SPOKEN, WRITTEN, AnsweringEngine
from tests.worker.loop.engines import ALOUD, Director
from worker.loop.results import Event


class Mixed(Director):
    """Replaces tokens of duplex sessions only."""

    def token_sampled(self, session: str, job: Any, token: int) -> int:
        return super().token_sampled(session, job, token) if session.startswith("duplex") else token


# Settings and questions by session.
ANSWERS = {
    "spoken": (SPOKEN.model_copy(update={"max_new_tokens": 24, "seed": 7}), (ASKED,)),
    "warm": (SPOKEN.model_copy(update={"max_new_tokens": 13, "seed": 8, "temperature": 1.2}), ("Tell me.",)),
    "written": (WRITTEN, (sound(16_000), "What do you hear?")),
    "seen": (WRITTEN.model_copy(update={"max_new_tokens": 9}), (picture(60, 60), "What do you see?")),
    "reference": (SPOKEN.model_copy(update={"compat": "reference", "seed": 9}), (ASKED,)),
}


def duplex_units(engine: AnsweringEngine, n_units: int) -> Iterator[None]:
    """A duplex session that sends one unit per step of the generator."""
    session = engine.open("duplex", ALOUD, 0)
    for number in range(n_units):
        engine.send(session, number)
        yield
        while session.is_busy or session.waiting:
            yield
    engine.sessions.close(session)


def one_by_one(engine: AnsweringEngine, names: Sequence[str], n_units: int = 3) -> dict[str, list[Event]]:
    """Run replies one by one, then the duplex session. Returns: events by session."""
    for name in names:
        engine.ask(name, *ANSWERS[name][1], config=ANSWERS[name][0])
        engine.settle()
    for _ in duplex_units(engine, n_units):
        engine.settle()
    return {name: engine.received(name) for name in (*names, "duplex")}


def all_at_once(
    engine: AnsweringEngine, names: Sequence[str], rng: np.random.Generator, n_units: int = 3
) -> dict[str, list[Event]]:
    """Start replies and units at random times. Returns: events by session."""
    waiting, units = list(rng.permutation(list(names))), duplex_units(engine, n_units)
    has_units_left = True
    while waiting or has_units_left or not engine.loop.is_idle:
        choice = rng.integers(4)
        if choice == 0 and waiting and engine.n_free[0] > 1:
            name = str(waiting.pop())
            engine.ask(name, *ANSWERS[name][1], config=ANSWERS[name][0])
        elif choice == 1 and has_units_left:
            has_units_left = next(units, "over") is None
        else:
            engine.step()
    return {name: engine.received(name) for name in (*names, "duplex")}
