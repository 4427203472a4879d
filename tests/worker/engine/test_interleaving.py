"""A session's ids, text, decisions and sound do not depend, to the last bit, on the sessions that share its engine.

True of engines with one size per axis (`engines.make_parts`), as here. Where a batch may run at several sizes, the
neighbours decide on which of them, and another one may add numbers up in another order.
"""

import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.stages.speech_steps import Readback, Speaker
from tests.worker.engine.session_scripts import Prompter, conversation, play_alone, play_together
from tests.worker.loop.engines import (
    ALOUD,
    N_SLOTS,
    SmallEngine,
    assert_same_events,
    make_config,
    make_prompt,
    short_speech,
)
from worker.loop.results import Event, Failure, PartialResult, UnitResult

N_CONVERSATIONS = 12
N_UNITS = 4


class Stage:
    """Two engines: one for single conversations, one for many at once, which draws speech tokens ahead."""

    def __init__(self) -> None:
        self.observers = Prompter(), Prompter()
        self.alone = SmallEngine(make_config(), self.observers[0])
        with mock.patch.object(Speaker, "is_beside", True):
            self.together = SmallEngine(make_config(), self.observers[1])
        self._expected: dict[int, tuple[list[Event], list[str]]] = {}

    def expected(self, seed: int) -> tuple[list[Event], list[str]]:
        """Events of a conversation alone, and digests of its logits."""
        if seed not in self._expected:
            observer, engine = self.observers[0], self.alone
            play_alone(engine, conversation(engine, observer, seed, N_UNITS, speaks=seed % 2 == 0))
            name = f"session {seed}"
            self._expected[seed] = engine.take(name), observer.logits.pop(name)
        return self._expected[seed]

    def play(self, seeds: list[int], rng: random.Random, patience: float) -> dict[int, tuple[list[Event], list[str]]]:
        """Events of conversations played together. patience: share of steps in which the loop runs instead of a script.

        Polls arrive at random times.
        """
        observer, engine = self.observers[1], self.together
        for memory in (observer.interrupts, observer.n_certain, observer.logits, engine.events):
            memory.clear()
        scripts = [
            lambda seed=seed: conversation(engine, observer, seed, N_UNITS, speaks=seed % 2 == 0) for seed in seeds
        ]
        with mock.patch.object(Readback, "is_here", property(lambda poll: rng.random() < 0.5)):
            play_together(engine, scripts, lambda n: 0 if rng.random() < patience else rng.randrange(n))
        names = {seed: f"session {seed}" for seed in seeds}
        return {seed: (engine.take(name), observer.logits[name]) for seed, name in names.items()}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with short_speech():
        yield Stage()


def test_conversations_cover_every_kind(stage: Stage) -> None:
    events = [event for seed in range(N_CONVERSATIONS) for event in stage.expected(seed)[0]]
    results = [event for event in events if isinstance(event, UnitResult)]
    seen = {
        "listens": any(result.is_listen for result in results),
        "speaks": any(result.text for result in results),
        "sounds": any(result.pcm is not None and result.pcm.any() for result in results),
        "ends a turn": any(result.end_of_turn for result in results),
        "sees": any(result.n_slices for result in results),
        "catches up": any(result.n_caught_up for result in results),
        "waits for more sound": any(not result.tokens for result in results),
        "drains": any(result.n_speech_tokens > 8 for result in results),
    }
    assert all(seen.values()), f"expected all of them, got {seen}"
    errors = [event.error for event in events if isinstance(event, Failure)]
    assert not errors, f"expected no failures, got {errors}"


@settings(max_examples=6)
@given(
    seeds=st.lists(st.integers(0, N_CONVERSATIONS - 1), min_size=2, max_size=6, unique=True),
    order=st.integers(0, 2**32),
    patience=st.sampled_from((0.0, 0.5, 0.9)),
)
def test_events_do_not_depend_on_other_sessions(stage: Stage, seeds: list[int], order: int, patience: float) -> None:
    runs = stage.play(seeds, random.Random(order), patience)
    for seed in seeds:
        n = stage.observers[1].n_certain.get(f"session {seed}")
        (events, logits), (expected, expected_logits) = runs[seed], stage.expected(seed)
        assert_same_events(f"conversation {seed}", events[:n], expected[:n])
        n = min(len(logits), len(expected_logits)) if n else None
        assert logits[:n] == expected_logits[:n], f"conversation {seed}: expected the same logits to the last bit"
    free = stage.together.unit_steps.n_free, stage.together.vocoder.n_free
    assert free == (N_SLOTS, N_SLOTS), f"slots free afterwards: expected all of both, got {free}"


def test_windows_do_not_depend_on_a_session_that_writes(stage: Stage) -> None:
    """Beside sessions that write, tokens are drawn in other portions than alone; windows must not depend on that."""
    runs = []
    for n_writers in (0, 1):
        observer, engine = stage.observers[1], stage.together
        speaker, *writers = (
            engine.open(name, ALOUD, make_prompt(speaker=0)) for name in ("speaker", "writer")[: 1 + n_writers]
        )
        with mock.patch.object(observer, "token_sampled", speak_or_write):
            for session in (speaker, *writers):
                engine.send(session, 1)
            engine.settle()
        runs.append(engine.take("speaker"))
        engine.close_all()
    assert sum(isinstance(event, PartialResult) and event.pcm is not None for event in runs[0]) == 1, runs[0]
    assert_same_events("speaker", runs[1], runs[0])


def speak_or_write(session: str, job: Any, token: int) -> int:
    """The speaking session has one word per unit, the writing one as many as allowed."""
    ids, n = job.language.special, len(job.decoder.all_ids)
    return ids.speak if n == 0 else ids.chunk_eos if session == "speaker" and n == 2 else ord("a") + n
