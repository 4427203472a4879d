"""Compiled and captured regions give the same results as eager ones; a failed target stays eager with a reason."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from models.graphs.region_graphs import RegionTable, compile_counters
from models.layers.vpm import VisionLayer
from models.stages.speech_steps import Speaker
from tests.models.graphs.fake_captures import Replayed
from tests.worker.compile.compile_stubs import StubModel, capture_without, failing
from tests.worker.loop.engines import (
    ALOUD,
    Director,
    SmallEngine,
    assert_same_events,
    make_config,
    make_prompt,
    short_speech,
)
from worker.assembly import backend_flags
from worker.compile import compile_engine as compile_module
from worker.compile import graph_compiler
from worker.compile.compile_engine import CompileResult, RecompileWatch, compile_engine, count, uncompile_engine
from worker.compile.state import CompileCounts, TargetPhase, TargetState
from worker.compile.targets import COMPILE_TARGETS, SERVING
from worker.config.compile import TARGETS, CompileConfig, Target

N_UNITS = 5
UNCOMPILED = CompileConfig(enabled=True, targets=(), cuda_graphs="on")
# One size per axis makes one graph either way; tracing for that size alone takes a fraction of the time.
STATIC = CompileConfig(enabled=True, dynamic=False)
ONE, FEW = ("vpm",), ("vpm", "llm.model")
# Of both tables, by layer and whole. tests/test_compile_equivalence.py compiles all targets, and test_warmup the LLM.
TRACED = ("resampler", "token2wav.hift")

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compile_with(engine: SmallEngine, compile: CompileConfig, *, gpu: bool = False, **options: Any) -> CompileResult:
    """Compile an engine, optionally as if its model were on a GPU; layers are traced and run eagerly."""
    parts = replace(engine.parts, model=StubModel()) if gpu else engine.parts
    config = engine.config.model_copy(update={"compile": compile})
    with mock.patch.object(compile_module, "apply_backend_flags", lambda *_: {}):
        return compile_engine(parts, config, **{"backend": "eager", **options})


def converse(engine: SmallEngine) -> None:
    """Two concurrent sessions with sound, frames and speech; one of them ends earlier."""
    sessions = [engine.open(f"session {n}", ALOUD, make_prompt(speaker=n)) for n in range(2)]
    for number in range(N_UNITS):
        for n, session in enumerate(sessions):
            if n == 0 or number < 3:
                first = 480 if number == 0 else 0
                engine.send(session, 10 * n + number, 16_000 + first, pictures=[number] if number % 2 else [])
        engine.settle()


@contextmanager
def failing_together(speaker: Speaker) -> Iterator[list[int]]:
    """Make `speaker.condition` raise for more than one slot. Yields: a list with the number of failed calls."""
    plain, n_failed = speaker.condition, [0]

    def condition(slots: Sequence[int], *given: Any) -> list[torch.Tensor]:
        if len(slots) > 1:
            n_failed[0] += 1
            raise RuntimeError("one at a time")
        return plain(slots, *given)

    with mock.patch.object(speaker, "condition", condition):
        yield n_failed


# --- captured graphs ------------------------------------------------------------------------------


def test_every_call_of_a_conversation_replays_a_graph(made: list[Replayed]) -> None:
    """With one bucket per region; events equal those of an engine without graphs."""
    with short_speech():
        plain, engine = (SmallEngine(make_config(), Director(listen=0.2)) for _ in range(2))
        result = compile_with(engine, UNCOMPILED, gpu=True)
        tables = engine.unit_steps.regions, engine.vocoder.regions
        assert all(table.n_captured for table in tables)
        assert result.n_graphs == sum(table.n_captured for table in tables) == len(made)
        assert {graph.name for graph in made} == set(SERVING) == result.seconds.keys()
        for each in (plain, engine):
            converse(each)
    for name, expected in plain.events.items():
        assert_same_events(name, engine.events[name], expected)
    replayed = {graph.name for graph in made if graph.n_replays}
    expected = set(SERVING) - {"llm_evict"}
    assert replayed == expected, f"expected all but eviction, got {sorted(replayed)}"
    assert [table.n_skipped for table in tables] == [0, 0]


def test_failed_batch_keeps_the_sessions_conditions(made: list[Replayed]) -> None:
    """After the batch fails, each session runs alone and replays the same graph."""
    with short_speech():
        plain, engine = (SmallEngine(make_config(), Director(listen=0.0)) for _ in range(2))
        compile_with(engine, UNCOMPILED, gpu=True)
        for each in (plain, engine):
            with failing_together(each.unit_steps.speaker) as n_failed:
                converse(each)
            assert n_failed[0], "expected a batch to fail"
    for name, expected in plain.events.items():
        assert_same_events(name, engine.events[name], expected)


@pytest.mark.parametrize(
    ("mode", "cuda_graphs", "captured"),
    [
        ("default", "auto", {"vision"}),
        ("default", "off", set()),
        ("reduce-overhead", "auto", set()),
        ("max-autotune", "auto", set()),
        ("reduce-overhead", "on", set(SERVING)),
    ],
)
def test_chooses_region_graphs_or_the_graphs_of_the_mode(
    made: list[Replayed], mode: str, cuda_graphs: str, captured: set[str]
) -> None:
    """The two are never nested; `auto` captures the regions of configured targets."""
    engine, given = SmallEngine(), []
    table = engine.unit_steps.regions
    with mock.patch.object(type(table), "compile_parts", lambda self, parts, **options: given.append(options)):
        result = compile_with(
            engine, CompileConfig(enabled=True, targets=("vpm",), mode=mode, cuda_graphs=cuda_graphs), gpu=True
        )
    assert {graph.name for graph in made} == captured
    assert [one["mode"] for one in given] == ["default" if captured else mode]
    assert table.marks_steps == (mode != "default" and not captured)
    assert result.targets["vpm"].n_captured == ("vision" in captured)


@pytest.mark.parametrize(
    ("mode", "cuda_graphs", "layers", "sampler"),
    [
        ("max-autotune", "auto", "max-autotune", "reduce-overhead"),
        ("max-autotune", "on", "max-autotune-no-cudagraphs", "default"),
        ("reduce-overhead", "auto", "reduce-overhead", "reduce-overhead"),
    ],
)
def test_does_not_autotune_samplers(
    made: list[Replayed], mode: str, cuda_graphs: str, layers: str, sampler: str
) -> None:
    engine, given = SmallEngine(), []
    with mock.patch.object(
        RegionTable, "compile_parts", lambda self, parts, **options: given.append((*parts, options["mode"]))
    ):
        config = CompileConfig(enabled=True, targets=("llm.model", "tts.model"), mode=mode, cuda_graphs=cuda_graphs)
        compile_with(engine, config, gpu=True)
    assert given == [
        ("llm.model", layers), ("choose", sampler), ("tts.model", layers), ("draw", sampler),
    ]  # fmt: skip


def test_notes_that_a_cpu_has_no_graphs() -> None:
    result = compile_with(SmallEngine(), CompileConfig(enabled=True, targets=(), cuda_graphs="on"))
    assert result.n_graphs == 0 and "expected a GPU, got cpu" in result.notes[0]


# --- targets --------------------------------------------------------------------------------------


def test_does_nothing_if_compile_is_off() -> None:
    engine = SmallEngine()
    before = compile_counters()
    result = compile_engine(engine.parts, engine.config)
    assert {state.phase for state in result.targets.values()} == {TargetPhase.OFF} and list(result.targets) == list(
        TARGETS
    )
    assert (result.seconds, result.n_graphs, result.backend_flags) == ({}, 0, {})
    assert compile_counters() == before


def test_compiles_targets_in_order_and_nothing_after_warm_up() -> None:
    """Traced on a CPU; a conversation with a late session adds no graph and equals the eager one."""
    seen: list[tuple[str, int, int, str]] = []
    targets: dict[str, TargetState] = {"stale": TargetState("stale")}
    with short_speech(convolutions=True):
        plain, engine = (SmallEngine(make_config(), Director(listen=0.2)) for _ in range(2))
        converse(plain)  # eagerly: the engines share the modules that are compiled next

        def progress(what: str, done: int, total: int) -> None:
            busy = [name for name, state in targets.items() if state.phase is TargetPhase.COMPILING]
            seen.append((what, done, total, ",".join(busy)))

        config = CompileConfig(enabled=True, targets=TRACED)
        result = compile_with(engine, config, targets=targets, progress=progress)
        assert result.targets is targets and list(targets) == list(TARGETS)
        compiled = [name for name, state in targets.items() if state.phase is TargetPhase.COMPILED]
        assert compiled == [name for name in TARGETS if name in TRACED], targets
        assert all(targets[name].n_graphs for name in TRACED), targets
        busy_ones = [busy for *_, busy in seen if busy]
        assert list(dict.fromkeys(busy_ones)) == compiled, f"expected one target at a time, in order, got {busy_ones}"
        assert [done for _, done, *_ in seen] == list(range(len(seen))) and {total for *_, total, _ in seen} == {
            len(seen)
        }
        watch = RecompileWatch(engine.parts)
        converse(engine)
    assert watch.check() == CompileCounts(), f"compiled while serving: {watch.check()}"
    for name, expected in plain.events.items():
        assert_same_events(name, engine.events[name], expected)
    before = compile_counters()
    uncompile_engine(engine.parts)
    torch._dynamo.reset()
    engine.settle()
    engine.unit_steps.regions.warm_up(["unit_step"])
    assert compile_counters() == before, "expected eager regions"


@pytest.mark.parametrize("dynamic", [True, False])
def test_dynamic_makes_fewer_graphs(dynamic: bool) -> None:
    engine = SmallEngine()
    config = CompileConfig(enabled=True, targets=("llm.model",), dynamic=dynamic)
    state = compile_with(engine, config).targets["llm.model"]
    rows = engine.unit_steps.shapes.rows
    expected = 2 if dynamic else 1 + len(rows)  # a graph for one row, and those for several rows
    assert state.n_graphs == expected, f"expected {expected} graphs, got {state.n_graphs}"


def test_functions_are_dynamic_in_varying_sizes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dynamic` true: dynamic layers, automatic samplers. `dynamic` false: both static."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda f, **options: given.setdefault(f.__name__, options["dynamic"]) or f)
    table = SmallEngine().unit_steps.regions
    table.compile_parts(["choose", "llm.model"], dynamic=True)
    assert given == {"choose": None, "forward": True}
    given.clear()
    table.compile_parts(["choose", "llm.model"], dynamic=False)
    assert given == {"choose": False, "forward": False}


def test_failed_target_alone_stays_eager(caplog: pytest.LogCaptureFixture) -> None:
    engine = SmallEngine()
    with caplog.at_level(logging.WARNING, "worker.compile.compile_engine"):
        result = compile_with(engine, STATIC.model_copy(update={"targets": ("resampler", *FEW)}), backend=failing(at=1))
    assert result.targets["vpm"].phase is TargetPhase.COMPILED
    for name in ("llm.model", "resampler"):
        state = result.targets[name]
        assert state.phase is TargetPhase.FELL_BACK and "no code for graph" in state.error, state
        assert "second line" not in state.error.splitlines()[0] and len(state.error.splitlines()) == 1
        assert f"compile target {name} stays eager" in caplog.text
    assert result.targets["apm"].phase is TargetPhase.OFF
    before = count(engine.parts)
    engine.unit_steps.regions.warm_up(["vision", "unit_step", "unit_prefill"])
    assert count(engine.parts).since(before) == CompileCounts(), "expected no compilation after the fallback"


def test_untraceable_part_falls_back() -> None:
    engine, plain = SmallEngine(), VisionLayer.forward

    def forward(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return plain(self, x, mask)

    with mock.patch.object(VisionLayer, "forward", forward):
        state = compile_with(engine, STATIC.model_copy(update={"targets": ONE})).targets["vpm"]
    assert state.phase is TargetPhase.FELL_BACK and state.error, state


def test_capture_out_of_memory_drops_its_targets_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_without(monkeypatch, "audio_unit")
    engine = SmallEngine()
    result = compile_with(engine, STATIC.model_copy(update={"targets": ("vpm", "apm"), "kernels": "off"}), gpu=True)
    state, table = result.targets["apm"], engine.unit_steps.regions
    assert state.phase is TargetPhase.FELL_BACK and state.n_captured == 0, state
    for advice in ("CUDA out of memory", "compile.targets", "cuda_graphs: off", "max_sessions"):
        assert advice in state.error, f"expected {advice!r} in {state.error!r}"
    assert result.targets["vpm"].phase is TargetPhase.COMPILED and result.targets["vpm"].n_captured == 1
    assert table.captured == {"vision"}, table.captured
    before = count(engine.parts)
    table.warm_up(["vision", *COMPILE_TARGETS["apm"].all_regions])
    assert count(engine.parts).since(before) == CompileCounts()


@pytest.mark.parametrize("kernels", [True, False])
def test_uncapturable_region_alone_has_no_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernels: bool
) -> None:
    """Other regions of its target are captured. The region itself has run at every size without graphs."""
    capture_without(monkeypatch, "audio_unit", RuntimeError("operation would make a stream wait\nsecond line"))
    monkeypatch.setattr(backend_flags, "supports_kernels", lambda device: kernels)
    engine, called = SmallEngine(), []
    table, targets = engine.unit_steps.regions, ("vpm", "apm")
    call_example = table.call_example
    monkeypatch.setattr(table, "call_example", lambda name, *given: called.append(name) or call_example(name, *given))
    with caplog.at_level(logging.WARNING, "worker.compile.graph_compiler"):
        result = compile_with(engine, STATIC.model_copy(update={"targets": targets}), gpu=True)
    state, phase = result.targets["apm"], TargetPhase.KERNELS if kernels else TargetPhase.COMPILED
    why = "capturing it failed: RuntimeError: operation would make a stream wait"
    assert (state.phase, state.error, state.has_failed) == (phase, f"audio_unit: {why}", True) and not result.is_whole
    assert result.regions["audio_unit"].reason == why and result.notes == [state.error] and state.error in caplog.text
    assert table.captured == {"vision", "audio_overlap", "mel_unit"} and state.n_captured == result.n_graphs - 1 > 0
    assert result.targets["vpm"].error is None and table.is_sealed
    assert called[-len(table.calls("audio_unit")) :] == ["audio_unit"] * len(table.calls("audio_unit"))
    before = count(engine.parts)
    table.warm_up(["vision", "audio_unit", "audio_overlap"])
    assert count(engine.parts).since(before) == CompileCounts()


def test_region_that_fails_without_graphs_falls_back_with_its_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capture_without(monkeypatch, "mel_unit", RuntimeError("capture failed"))
    engine = SmallEngine()
    table, plain = engine.unit_steps.regions, engine.unit_steps.regions.call_example

    def call_example(name: str, *given: Any) -> None:
        if name == "mel_unit" and "vision" in table.captured:
            raise RuntimeError("eager call failed")
        plain(name, *given)

    monkeypatch.setattr(table, "call_example", call_example)
    result = compile_with(engine, STATIC.model_copy(update={"targets": ("vpm", "apm"), "kernels": "off"}), gpu=True)
    assert result.targets["apm"].phase is TargetPhase.FELL_BACK and "eager call failed" in result.targets["apm"].error
    assert result.regions["mel_unit"].reason == "apm fell back" and table.captured == {"vision"}


@pytest.mark.parametrize("targets", [(), ("resampler",)])
def test_failed_capture_keeps_unconfigured_targets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, targets: tuple[Target, ...]
) -> None:
    """None or one of the region's two targets is configured. The region runs without graphs and reports the reason."""
    capture_without(monkeypatch, "vision")
    engine = SmallEngine()
    with caplog.at_level(logging.WARNING, "worker.compile.graph_compiler"):
        result = compile_with(engine, STATIC.model_copy(update={"targets": targets, "cuda_graphs": "on"}), gpu=True)
    for name, state in result.targets.items():
        expected = TargetPhase.FELL_BACK if name in targets else TargetPhase.OFF
        assert (state.phase, bool(state.error), state.seconds > 0, state.n_captured) == (
            (expected, name in targets, name in targets, 0)
        ), state
    reason = result.regions["vision"].reason
    assert ("resampler fell back" if targets else "capturing it failed: OutOfMemoryError") in reason, reason
    assert ("memory" in result.notes[0]) if not targets else not result.notes, result.notes
    assert "CUDA out of memory" in caplog.text
    table = engine.unit_steps.regions
    assert table.captured == {name for name in SERVING if name in table.table} - {"vision"}
    table.warm_up(["vision"])
    assert table.n_skipped == 0


def test_counts_graphs_for_configured_targets(made: list[Replayed]) -> None:
    result = compile_with(SmallEngine(), STATIC.model_copy(update={"targets": ("resampler",)}), gpu=True)
    vpm, resampler = (result.targets[name] for name in ("vpm", "resampler"))
    assert (vpm.phase, vpm.n_captured, vpm.seconds) == (TargetPhase.OFF, 0, 0.0), vpm
    assert resampler.n_captured == result.n_graphs == len(made) > 0, resampler


def test_target_missing_in_the_checkpoint_is_off() -> None:
    engine = SmallEngine()
    parts = replace(engine.parts, vocoder=None)
    config = engine.config.model_copy(update={"compile": CompileConfig(enabled=True, targets=("token2wav.flow",))})
    state = compile_engine(parts, config, backend="eager").targets["token2wav.flow"]
    assert state.phase is TargetPhase.OFF and "does not have it" in state.error


def test_logs_each_compilation_after_warm_up_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = SmallEngine()
    watch = RecompileWatch(engine.parts)
    with caplog.at_level(logging.WARNING, "worker.compile.compile_engine"):
        assert watch.check() == CompileCounts() and not caplog.text
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
        assert [watch.check().graphs for _ in range(2)] == [1, 1]
        engine.unit_steps.regions.n_skipped += 1
        assert watch.check().graph_skips == 1
    assert caplog.text.count("compiled after warm-up") == 2, caplog.text


def test_empties_a_cache_of_bad_graphs_and_compiles_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph from the cache that cannot run means that the cache entry is wrong."""
    hits, cleared, fails = [0], [], [True]

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        if fails[0]:
            hits[0] += 1
            raise AssertionError("expected size 3==3, stride 524288==32768 at dim=0")
        return module.forward

    def clear() -> None:
        cleared.append(1)
        fails[0] = False

    monkeypatch.setattr(graph_compiler, "cache_counts", lambda: (hits[0], 0))
    monkeypatch.setattr(compile_module, "_empty_cache", clear)
    result = compile_with(SmallEngine(), STATIC.model_copy(update={"targets": ONE}), backend=backend)
    assert len(cleared) == 1 and {result.targets[name].phase for name in ONE} == {TargetPhase.COMPILED}, result.targets
    assert any("cache" in note for note in result.notes), result.notes


def test_every_configurable_target_is_defined() -> None:
    assert set(COMPILE_TARGETS) == set(TARGETS)
