"""Answers and a duplex session on one engine: each by itself, and all at once as chance has it."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.models.stages.conversations import picture, sound
from tests.worker.chat.reply_engine import ASKED, SPOKEN, WRITTEN, AnsweringEngine
from tests.worker.loop.engines import ALOUD, Director
from worker.loop.results import Event


class Mixed(Director):
    """Directs duplex sessions only."""

    def token(self, session: str, job: Any, token: int) -> int:
        return super().token(session, job, token) if session.startswith("duplex") else token


# Knobs and questions, by session.
ANSWERS = {
    "spoken": (SPOKEN.model_copy(update={"max_new_tokens": 24, "seed": 7}), (ASKED,)),
    "warm": (SPOKEN.model_copy(update={"max_new_tokens": 13, "seed": 8, "temperature": 1.2}), ("Tell me.",)),
    "written": (WRITTEN, (sound(16_000), "What do you hear?")),
    "seen": (WRITTEN.model_copy(update={"max_new_tokens": 9}), (picture(60, 60), "What do you see?")),
    "reference": (SPOKEN.model_copy(update={"compat": "reference", "seed": 9}), (ASKED,)),
}


def talk(engine: AnsweringEngine, n_units: int) -> Iterator[None]:
    """A duplex session, unit by unit; goes on when it is asked to."""
    session = engine.open("duplex", ALOUD, 0)
    for number in range(n_units):
        engine.send(session, number)
        yield
        while session.is_busy or session.waiting:
            yield
    engine.sessions.close(session)


def one_by_one(engine: AnsweringEngine, names: Sequence[str], n_units: int = 3) -> dict[str, list[Event]]:
    """Answers one behind the other, then the duplex session. Returns: what each is told."""
    for name in names:
        engine.ask(name, *ANSWERS[name][1], config=ANSWERS[name][0])
        engine.settle()
    for _ in talk(engine, n_units):
        engine.settle()
    return {name: engine.heard(name) for name in (*names, "duplex")}


def all_at_once(
    engine: AnsweringEngine, names: Sequence[str], luck: np.random.Generator, n_units: int = 3
) -> dict[str, list[Event]]:
    """Answers begin and units come whenever chance has it. Returns: what each is told."""
    waiting, units = list(luck.permutation(list(names))), talk(engine, n_units)
    is_talking = True
    while waiting or is_talking or not engine.loop.is_idle:
        what = luck.integers(4)
        if what == 0 and waiting and engine.n_free[0] > 1:
            name = str(waiting.pop())
            engine.ask(name, *ANSWERS[name][1], config=ANSWERS[name][0])
        elif what == 1 and is_talking:
            is_talking = next(units, "over") is None
        else:
            engine.step()
    return {name: engine.heard(name) for name in (*names, "duplex")}
