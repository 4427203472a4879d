"""Targets with the project's own kernels do not compile; failed kernels are off for their region table only."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from models.errors import SettingsError, ShapeError
from models.graphs.region_graphs import RegionTable
from models.layers.backend import TorchBackend
from models.token2wav.backends import Kernels
from models.token2wav.flow.flow import Flow
from models.token2wav.flow.flow_backend import PlainFlow
from models.token2wav.hift.hift import Hift
from models.token2wav.stream import vocoder as vocoders
from models.token2wav.stream.vocoder import Vocoder
from tests.models.graphs.fake_captures import Replayed
from tests.worker.compile.compile_stubs import StubModel, capture_without
from tests.worker.loop.engines import ALOUD, LLM_LEN, SmallEngine, loaded, make_config, make_prompt, short_speech
from worker.assembly import backend_flags
from worker.assembly import parts as building
from worker.assembly.sizes import shapes_of
from worker.compile import compile_engine as compile_module
from worker.compile import graph_compiler
from worker.compile.compile_engine import CompileResult, compile_engine, count
from worker.compile.state import TargetPhase
from worker.compile.targets import SERVING
from worker.config.compile import TARGETS, CompileConfig
from worker.loop.results import Failure

# One size per axis makes one graph either way; tracing for that size alone takes a quarter of the time.
STATIC = CompileConfig(enabled=True, dynamic=False)
OMNI = {"vpm", "resampler", "apm", "llm.model", "tts.model"}

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def by_kernels(engine: SmallEngine, model: StubModel, **options: Any) -> CompileResult:
    """Compile a stub model on a device that supports kernels."""
    parts, compile = replace(engine.parts, model=model), options.pop("compile", CompileConfig(enabled=True))
    config = engine.config.model_copy(update={"compile": compile})
    with mock.patch.object(backend_flags, "supports_kernels", lambda device: True):
        return compile_engine(parts, config, **{"backend": "eager", **options})


@pytest.fixture
def default_backend_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "apply_backend_flags", lambda *_: {})


@pytest.mark.usefixtures("default_backend_flags")
def test_kernels_leave_nothing_to_compile(made: list[Replayed], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with kernels are captured at every size, in one memory pool per stage; then the tables are sealed."""
    engine, model = SmallEngine(), StubModel()
    seen: list[tuple[int, int]] = []
    wrapped: list[str] = []
    moved: list[int] = []
    monkeypatch.setattr(RegionTable, "compile_parts", lambda self, parts, **_: wrapped.extend(parts))
    monkeypatch.setattr(RegionTable, "compile", lambda self, names, **_: wrapped.extend(names))
    monkeypatch.setattr(TorchBackend, "restore_keys", lambda self, cache, slot, *_: moved.append(slot))
    result = by_kernels(engine, model, progress=lambda what, done, total: seen.append((done, total)))
    assert model.switched == [True] and result.backend_flags["kernels"] is True and not result.notes
    phases = {name: state.phase for name, state in result.targets.items()}
    assert phases == {name: TargetPhase.KERNELS if name in OMNI else TargetPhase.COMPILED for name in TARGETS}
    assert sorted(wrapped) == ["flow", "hift"], "expected only the vocoder, which has no kernels here, to compile"
    assert seen == [(done, len(seen)) for done in range(len(seen))], "expected progress to count to its end"
    scratch = engine.unit_steps.state.scratch
    assert moved == [scratch], f"expected the kernel of held keys to run in slot {scratch}, got {moved}"
    pools: dict[str, set[int]] = {}
    for graph in made:
        assert graph.is_warm, f"expected {graph.name} to have run before it is captured"
        pools.setdefault(result.regions[graph.name].stage, set()).add(id(graph.pool))
    assert set(pools) == {"see", "hear", "text", "speech", "sound"}
    assert all(len(ids) == 1 for ids in pools.values()) and len(set().union(*pools.values())) == len(pools), pools
    for name, region in result.regions.items():
        assert (region.n_graphs > 0) == (name in SERVING) == (region.reason is None), region
    assert result.regions["unit_step"].sizes["batch"] == [3] and result.regions["reset"].reason == "no unit calls it"
    for table in (engine.unit_steps.regions, engine.vocoder.regions):
        assert table.is_sealed
    with pytest.raises(ShapeError, match="region unit_step: sizes: expected what was captured: batch 3; kv 384"):
        engine.unit_steps.regions("unit_step", torch.tensor([0]), torch.tensor([1]), kv_len=384)
    assert count(engine.parts).graph_skips == 1


@pytest.mark.usefixtures("default_backend_flags")
@pytest.mark.parametrize("where", ["switch", "warm-up"])
def test_failed_kernels_are_off_and_layers_compile(
    made: list[Replayed], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    engine, model = SmallEngine(), StubModel("no such instruction" if where == "switch" else None)
    table = engine.unit_steps.regions
    if where == "warm-up":
        call_example = table.call_example

        def fails_with_kernels(name: str, *given: Any) -> None:
            if name == "audio_unit" and model.kernels:
                raise RuntimeError("no such instruction")
            call_example(name, *given)

        monkeypatch.setattr(table, "call_example", fails_with_kernels)
    with caplog.at_level(logging.WARNING, "worker.compile.compile_engine"):
        result = by_kernels(engine, model, compile=STATIC.model_copy(update={"targets": ("vpm", "apm")}))
    assert {result.targets[name].phase for name in ("vpm", "apm")} == {TargetPhase.COMPILED}, result.targets
    assert not model.kernels and result.backend_flags["kernels"] is False
    [note] = result.notes
    assert "no such instruction" in note and "kernels" in note and note in caplog.text
    assert result.targets["vpm"].n_graphs > 0 and table.captured >= {"vision", "audio_unit"} and table.is_sealed


@pytest.mark.usefixtures("default_backend_flags")
def test_uncapturable_kernel_region_leaves_its_target_without_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capture_without(monkeypatch, "unit_step")
    model, compile = StubModel(), STATIC.model_copy(update={"targets": ("vpm", "llm.model")})
    engine = SmallEngine()
    result = by_kernels(engine, model, compile=compile)
    state = result.targets["llm.model"]
    assert model.kernels and state.phase is TargetPhase.FELL_BACK and "unit_step" in state.error
    assert result.regions["unit_step"].reason == "llm.model fell back"
    assert engine.unit_steps.regions.captured == {"vision"}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, True),
        ({"kernels": "off"}, False),
        ({"mode": "max-autotune"}, False),
        ({"attention": "sdpa"}, False),
        ({"cuda_graphs": "off"}, False),
        ({"enabled": False}, False),
    ],
)
def test_chooses_kernels_by_settings(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], wanted: bool) -> None:
    config = CompileConfig(**{"enabled": True, **options})
    assert not backend_flags.uses_kernels(config, torch.device("cpu"))
    monkeypatch.setattr(backend_flags, "supports_kernels", lambda device: device.type == "cuda")
    assert backend_flags.uses_kernels(config, torch.device("cuda")) == wanted


def test_kernels_need_one_context_size() -> None:
    model = SimpleNamespace(device=torch.device("cuda"), config=SmallEngine().parts.model.config)
    batch, config = (1, 2, 4), make_config(llm_len=300)
    shapes = shapes_of(model, batch, config, by_kernels=True)
    assert (shapes.batch, shapes.kv, len(shapes.speech_kv), shapes.rows) == (batch, (300,), 1, (16, 80, 96, 160, 512))
    assert len(shapes_of(model, batch, config).kv) > 1


@pytest.mark.usefixtures("default_backend_flags")
def test_failed_kernels_restore_sizes_for_compiled_layers(made: list[Replayed]) -> None:
    """A short conversation then replays graphs of the small context sizes only."""
    engine, model = SmallEngine(), StubModel("no such instruction")
    unit_steps = engine.unit_steps
    few = replace(unit_steps.shapes, kv=(64, 128, LLM_LEN))
    engine.parts = replace(engine.parts, compiled_shapes=few)
    result = by_kernels(engine, model, compile=STATIC.model_copy(update={"targets": ("vpm",), "cuda_graphs": "on"}))
    table = unit_steps.regions
    assert result.failed_kernels == ["omni"] and unit_steps.shapes == table.shapes == few and table.is_sealed
    assert result.targets["vpm"].phase is TargetPhase.COMPILED and result.targets["vpm"].n_graphs > 0
    assert result.regions["unit_step"].sizes["kv"] == [64, 128, LLM_LEN]
    with short_speech():
        session = engine.open("s", ALOUD, make_prompt(speaker=0))
        outcome = [engine.run_unit(session, n) for n in range(2)]
    assert not [one for one in outcome if isinstance(one, Failure)], outcome
    used = {graph.bucket["kv"] for graph in made if graph.name == "unit_prefill" and graph.n_replays}
    assert used and max(used) < LLM_LEN and table.n_skipped == 0, used


def test_engine_has_sizes_for_kernels_and_compiled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vocoder kernels, the vocoder is built with the sizes for compiled layers."""
    monkeypatch.setattr(building, "_use_kernels", lambda model: None)
    monkeypatch.setattr(building, "apply_backend_flags", lambda *_: {})
    config = make_config(compile=CompileConfig(enabled=True))
    for wanted in (True, False):
        monkeypatch.setattr(building, "uses_kernels", lambda *_, wanted=wanted: wanted)
        parts = building.assemble(*loaded(), config)
        assert (parts.compiled_shapes is not None) == (parts.compiled_vocoder_shapes is not None) == wanted
        assert parts.vocoder.shapes.speech_tokens[:2] == (10, 25) and len(parts.vocoder.shapes.columns) > 1
    monkeypatch.setattr(building, "uses_kernels", lambda *_: True)
    assert SmallEngine().parts.compiled_shapes is None, "expected the given sizes to stay"


# --- vocoder kernels ------------------------------------------------------------------------------

SOUND = {"flow": "token2wav.flow", "hift": "token2wav.hift"}


def engine_with_vocoder_kernels(
    monkeypatch: pytest.MonkeyPatch, regions: Sequence[str], fails: Callable[[], bool]
) -> SmallEngine:
    """An engine built for kernels. The kernels of these vocoder regions are stubs that raise while `fails()`."""

    def run(plain: Callable[..., Any], *given: Any, **more: Any) -> Any:
        if fails():
            raise RuntimeError("no such instruction")
        return plain(*given, **more)

    def flow_backend(flow: Flow, kernels: Kernels) -> Any:
        plain = PlainFlow(flow)
        if "flow" not in regions or kernels != "auto":
            return plain
        return SimpleNamespace(is_fused=True, flow=flow, encode=plain.encode, solve=partial(run, plain.solve))

    def hift_backend(hift: Hift, kernels: Kernels) -> Any:
        if "hift" not in regions or kernels != "auto":
            return hift
        return SimpleNamespace(is_fused=True, f0=hift.f0, m_source=hift.m_source, decode=partial(run, hift.decode))

    monkeypatch.setattr(vocoders, "flow_backend", flow_backend)
    monkeypatch.setattr(vocoders, "hift_backend", hift_backend)
    with mock.patch.multiple(building, uses_kernels=lambda *_: True, _use_kernels=lambda *_: None):
        engine = SmallEngine()
    assert engine.vocoder.regions.kernels == set(regions)
    return engine


def without_cached_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU without cached kernels: all calls run once ahead, and their errors are ignored."""

    def build_kernels(device: torch.device, calls: dict[str, list[Callable[[], None]]]) -> None:
        assert set(calls) == {"vpm", "token2wav.flow", "token2wav.hift"}

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 0)
    monkeypatch.setattr(graph_compiler, "set_triton_folder", lambda device: True)
    monkeypatch.setattr(graph_compiler, "wait_for_compiler", lambda: None)
    monkeypatch.setattr(graph_compiler, "build_kernels", build_kernels)


@pytest.mark.usefixtures("default_backend_flags")
@pytest.mark.parametrize(
    ("is_warm", "is_empty", "expected", "n_calls"), [(False, False, 1, 0), (True, False, 0, 1), (True, True, 1, 0)]
)
def test_builds_kernels_ahead_unless_the_cache_has_them(
    made: list[Replayed],
    monkeypatch: pytest.MonkeyPatch,
    is_warm: bool,
    is_empty: bool,
    expected: int,
    n_calls: int,
) -> None:
    """Existing kernels may be incomplete: a killed start, or a start with other sizes, may have built them.

    n_calls: of the region before it is captured, after kernels were built.
    """
    calls: list[list[str]] = []
    without_cached_kernels(monkeypatch)
    monkeypatch.setattr(graph_compiler, "set_triton_folder", lambda device: is_empty)
    monkeypatch.setattr(graph_compiler, "build_kernels", lambda device, by_target: calls.append(list(by_target)))
    compile, examples = CompileConfig(enabled=True, targets=("vpm",)), mock.Mock()
    engine = SmallEngine()
    with mock.patch.object(engine.unit_steps.regions, "call_example", examples):
        result = by_kernels(engine, StubModel(), compile=compile, is_warm=is_warm)
    seen = [call.args[0] for call in examples.call_args_list]
    assert seen.count("vision") == n_calls, f"expected {n_calls} calls before the capture, got {seen}"
    assert calls == [["vpm"]] * expected and ("kernels" in result.seconds) == bool(expected)


@pytest.mark.usefixtures("default_backend_flags")
@pytest.mark.parametrize("benchmark", [True, False])
def test_cudnn_benchmark_runs_regions_before_capture(
    made: list[Replayed], monkeypatch: pytest.MonkeyPatch, benchmark: bool
) -> None:
    """With the benchmark, each region runs on the capturing thread at each size; without it, any thread may run it."""
    without_cached_kernels(monkeypatch)
    monkeypatch.setattr(graph_compiler, "build_kernels", lambda *_: None)
    by_kernels(
        SmallEngine(), StubModel(), compile=CompileConfig(enabled=True, targets=("vpm",), cudnn_benchmark=benchmark)
    )
    assert made and {graph.is_warm for graph in made} == {not benchmark}


@pytest.mark.usefixtures("default_backend_flags")
@pytest.mark.parametrize("where", ["warm-up", "capture", "not a target"])
def test_failed_vocoder_kernels_keep_the_models(
    made: list[Replayed], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """Wherever the failure occurs first. The vocoder keeps its sessions and voices."""
    engine, model = engine_with_vocoder_kernels(monkeypatch, SOUND, lambda: True), StubModel()
    if where == "capture":
        without_cached_kernels(monkeypatch)
    state, targets = engine.vocoder.state, ("vpm",) if where == "not a target" else ("vpm", *SOUND.values())
    wrapped: list[str] = []
    monkeypatch.setattr(RegionTable, "compile_parts", lambda self, parts, **_: wrapped.extend(parts))
    with caplog.at_level(logging.WARNING, "worker.compile.compile_engine"):
        result = by_kernels(engine, model, compile=CompileConfig(enabled=True, targets=targets))
    expected = {"vpm": TargetPhase.KERNELS} | dict.fromkeys(targets[1:], TargetPhase.COMPILED)
    assert {name: result.targets[name].phase for name in targets} == expected, result.targets
    assert wrapped == ([] if where == "not a target" else ["flow", "hift"])
    assert model.kernels and result.failed_kernels == ["vocoder"]
    assert (result.backend_flags["kernels"], result.backend_flags["vocoder_kernels"]) == (True, False)
    [note] = result.notes
    assert "no such instruction" in note and "those of the vocoder are off" in note and note in caplog.text
    assert engine.vocoder.state is state and not engine.vocoder.regions.kernels
    assert engine.vocoder.regions.is_sealed == (where != "not a target")
    engine.vocoder.regions.warm_up(["flow", "hift"])


@pytest.mark.usefixtures("default_backend_flags")
def test_failed_vocoder_kernels_restore_its_sizes(made: list[Replayed], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with_vocoder_kernels(monkeypatch, SOUND, lambda: True)
    more = replace(engine.vocoder.shapes, speech_tokens=(5, *engine.vocoder.shapes.speech_tokens))
    engine.parts = replace(engine.parts, compiled_vocoder_shapes=more)
    result = by_kernels(engine, StubModel(), compile=STATIC.model_copy(update={"targets": ("token2wav.hift",)}))
    assert result.failed_kernels == ["vocoder"] and engine.vocoder.shapes == engine.vocoder.regions.shapes == more
    assert result.regions["hift"].sizes["speech_tokens"] == list(more.speech_tokens)


@pytest.mark.usefixtures("default_backend_flags")
def test_failed_model_kernels_keep_the_vocoders(made: list[Replayed], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = engine_with_vocoder_kernels(monkeypatch, SOUND, lambda: False), StubModel("no such instruction")
    result = by_kernels(engine, model, compile=STATIC.model_copy(update={"targets": ("vpm", *SOUND.values())}))
    phases = [result.targets[name].phase for name in ("vpm", *SOUND.values())]
    assert phases == [TargetPhase.COMPILED, TargetPhase.KERNELS, TargetPhase.KERNELS], result.targets
    assert result.failed_kernels == ["omni"] and "those of the model are off" in result.notes[0]
    assert (result.backend_flags["kernels"], result.backend_flags["vocoder_kernels"]) == (False, True)


@pytest.mark.usefixtures("default_backend_flags")
@pytest.mark.parametrize("region", SOUND)
def test_vocoder_targets_use_kernels_independently(
    made: list[Replayed], monkeypatch: pytest.MonkeyPatch, region: str
) -> None:
    engine = engine_with_vocoder_kernels(monkeypatch, [region], lambda: False)
    wrapped: list[str] = []
    monkeypatch.setattr(RegionTable, "compile_parts", lambda self, parts, **_: wrapped.extend(parts))
    result = by_kernels(engine, StubModel(), compile=CompileConfig(enabled=True, targets=(*SOUND.values(),)))
    [other] = SOUND.keys() - {region}
    assert wrapped == [other]
    assert result.targets[SOUND[region]].phase is TargetPhase.KERNELS
    assert result.targets[SOUND[other]].phase is TargetPhase.COMPILED


@pytest.mark.usefixtures("default_backend_flags")
def test_skips_regions_without_sizes(made: list[Replayed], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SmallEngine()
    table = engine.unit_steps.regions.table
    monkeypatch.setitem(table, "vision", replace(table["vision"], has=lambda bucket: False))
    result = by_kernels(engine, StubModel(), compile=CompileConfig(enabled=True, targets=("vpm", "resampler")))
    assert result.targets["vpm"].phase is TargetPhase.KERNELS and result.regions["vision"].n_graphs == 0


@pytest.mark.parametrize(
    ("compiles", "wanted", "requested", "expected"),
    [
        (True, True, None, "auto"),
        (True, False, None, "plain"),
        (False, False, None, "plain"),
        (True, True, "plain", "plain"),
    ],
)
def test_vocoder_uses_kernels_as_the_model_does(
    monkeypatch: pytest.MonkeyPatch, compiles: bool, wanted: bool, requested: Kernels | None, expected: str
) -> None:
    """The backend flags are set before the vocoder is built, since exact float32 excludes kernels."""
    happened: list[str] = []

    def make(*given: Any, **more: Any) -> Vocoder:
        happened.append(more["kernels"])
        return Vocoder(*given, **more)

    monkeypatch.setattr(building, "uses_kernels", lambda *_: wanted)
    monkeypatch.setattr(building, "_use_kernels", lambda model: None)
    monkeypatch.setattr(building, "apply_backend_flags", lambda *_: happened.append("backend_flags"))
    monkeypatch.setattr(building, "Vocoder", make)
    config = make_config(compile=CompileConfig(enabled=compiles), kv_layout="slots")
    building.assemble(*loaded(), config, vocoder_kernels=requested)
    assert happened == ["backend_flags", expected]
    building.slot_bytes(loaded()[0], loaded()[3], config)
    assert happened[-2:] == ["plain", "plain"], "expected no packed weights for counting bytes"


def test_refuses_requested_kernels_that_are_missing() -> None:
    with pytest.raises(SettingsError, match="fused kernels"):
        building.assemble(*loaded(), make_config(), vocoder_kernels="fused")
