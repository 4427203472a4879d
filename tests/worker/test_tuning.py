"""What serves is captured, and sessions are told the same by graphs: their every call finds one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from models.graphs import compile_counters
from models.speaker import Speaker
from tests.models.replayed import Replayed, replay_on_cpu
from tests.worker.engines import ALOUD, Director, SmallEngine, assert_told, make_config, make_prompt, short_speech
from worker.compile_config import CompileConfig
from worker.tuning import Tuned, tune

N_UNITS = 5
SERVING = {
    *("vision", "mel_unit", "audio_unit", "audio_overlap", "unit_prefill", "unit_step", "llm_evict"),
    *("spoken_rows", "speech_begin", "speech_step", "begin", "flow", "hift"),
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    return replay_on_cpu(monkeypatch)


def captured(engine: SmallEngine) -> Tuned:
    """Tune an engine as if its model were on a GPU."""
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    config = engine.config.model_copy(update={"compile": CompileConfig(enabled=True, targets=(), cuda_graphs="on")})
    return tune(replace(engine.parts, model=on_gpu), config)


def converse(engine: SmallEngine) -> None:
    """Two sessions that hear, see and speak, side by side; one of them stays for less."""
    sessions = [engine.open(f"session {n}", ALOUD, make_prompt(speaker=n)) for n in range(2)]
    for number in range(N_UNITS):
        for n, session in enumerate(sessions):
            if n == 0 or number < 3:
                first = 480 if number == 0 else 0
                engine.send(session, 10 * n + number, 16_000 + first, pictures=[number] if number % 2 else [])
        engine.settle()


@contextmanager
def failing_together(speaker: Speaker) -> Iterator[list[int]]:
    """Conditions are made for one slot at a time only. Gives: how many calls failed, a list of one."""
    plain, n_failed = speaker.condition, [0]

    def condition(slots: Sequence[int], *given: Any) -> list[torch.Tensor]:
        if len(slots) > 1:
            n_failed[0] += 1
            raise RuntimeError("one at a time")
        return plain(slots, *given)

    with mock.patch.object(speaker, "condition", condition):
        yield n_failed


def test_every_call_of_a_conversation_finds_its_graph(made: list[Replayed]):
    """At the one size there is; what comes out is what comes out without."""
    with short_speech():
        plain, engine = (SmallEngine(make_config(), Director(listen=0.2)) for _ in range(2))
        tuned = captured(engine)
        tables = engine.duplex.runner.regions, engine.vocoder.regions
        assert all(table.n_captured for table in tables)
        assert tuned.n_graphs == sum(table.n_captured for table in tables) == len(made)
        assert {graph.name for graph in made} == SERVING == tuned.seconds.keys()
        for each in (plain, engine):
            converse(each)
    for name, expected in plain.events.items():
        assert_told(name, engine.events[name], expected)
    replayed = {graph.name for graph in made if graph.n_replays}
    assert replayed == SERVING - {"llm_evict"}, f"expected all but eviction, got {sorted(replayed)}"
    assert [table.n_skipped for table in tables] == [0, 0]


def test_conditions_of_a_failed_batch_stay_with_their_sessions(made: list[Replayed]):
    """Each session is run alone then, by one and the same graph."""
    with short_speech():
        plain, engine = (SmallEngine(make_config(), Director(listen=0.0)) for _ in range(2))
        captured(engine)
        for each in (plain, engine):
            with failing_together(each.duplex.speaker) as n_failed:
                converse(each)
            assert n_failed[0], "expected a batch to fail"
    for name, expected in plain.events.items():
        assert_told(name, engine.events[name], expected)


def test_without_compiling_and_graphs_nothing_is_done():
    engine = SmallEngine()
    before = compile_counters()
    assert tune(engine.parts, engine.config) == Tuned({}, 0)
    assert compile_counters() == before
