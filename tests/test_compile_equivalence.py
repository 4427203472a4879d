"""Compilation on a CPU: outputs of compiled regions equal eager ones and repeat exactly, and nothing compiles after
warm-up.
"""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from models.graphs.captured import Bucket
from models.graphs.region_graphs import RegionTable
from models.layers.audio_overlap import needs_overlap
from models.load import load_model
from models.stages import region_table, unit_steps
from models.stages import speech_steps as speaker
from models.stages.region_table import Shapes
from models.token2wav.stream.region_table import VocoderShapes
from tests.models.token2wav.stream.vocoders import make_voice
from tests.worker.loop.engines import TINY, make_image, make_sound, with_history
from worker.assembly import parts as parts_module
from worker.assembly.parts import build
from worker.compile.compile_engine import CompileResult, RecompileWatch, compile_engine
from worker.compile.state import CompileCounts, TargetPhase
from worker.compile.targets import COMPILE_TARGETS
from worker.config.compile import TARGETS, CompileConfig
from worker.config.session import EngineConfig, SessionConfig, WindowConfig
from worker.engine import Engine
from worker.loop.observer import Observer
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.results import Failure, UnitResult
from worker.loop.session_handle import SessionHandle
from worker.start.voices import ReferenceSound
from worker.start.warmup import WarmUpMedia, warm_up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

N_SLOTS, N_UNITS = 3, 18  # units of each of two sessions; the sound encoder restarts and rows are evicted
POSITIONS = 700  # of the sound encoder, instead of 1500: it restarts after 14 seconds
SPEAKING, PERIOD, N_TEXT = 4, 10, 3  # speaking units per period, and their text tokens
MAX_ERROR, MEAN_ERROR = 1e-5, 1e-6
CONFIG = EngineConfig(
    model_path=TINY,
    device="cpu",
    max_sessions=N_SLOTS,
    llm_len=768,
    euler_steps=2,
    compile=CompileConfig(enabled=True),
    session=SessionConfig(
        force_listen_count=0, max_new_speak_tokens_per_chunk=6, window=WindowConfig(high_tokens=320, low_tokens=200)
    ),
)
SHAPES = Shapes(
    batch=(2, 3),
    slices=(2, 3),
    patches=(128, 1088),
    clip_frames=(200,),
    rows=(16, 96),
    kv=(256, 768),
    spoken=(24,),
    tokens=(24, 40),
    speech_kv=(512,),
)
# Steps of a speech call. Only the layers are compiled, so 5 steps run the same code as 9 or 16.
FEW_STEPS = (1, 5)
VOCODER_SHAPES = VocoderShapes(batch=(2, 3), speech_tokens=(10, 28), columns=(320,), prompt=(60,))
# Regions that sample: a rounding difference may change a token, so only floats are compared.
DRAWING = ("unit_step", "unit_prefill", "speech_step", "speech_begin")
# Each target and its regions with compiled layers on a CPU.
COMPARED = [(target, region) for target, spec in COMPILE_TARGETS.items() for region in spec.regions or spec.whole]


class Script(Observer):
    """Overrides the decision only: a turn of four units, then six units of listening."""

    def token_sampled(self, session: str, job: Any, token: int) -> int:
        ids, place, n = job.language.special, job.session.n_decided % PERIOD, len(job.decoder.all_ids)
        if place >= SPEAKING:
            return ids.listen
        if n <= N_TEXT:
            return token if n else ids.speak
        return ids.turn_eos if place == SPEAKING - 1 and n == N_TEXT + 1 else ids.chunk_eos


@dataclass
class Bench:
    """A compiled engine with a running thread and slots that two sessions have used."""

    engine: Engine
    compile_result: CompileResult
    watch: RecompileWatch

    def table(self, target: str) -> RegionTable:
        parts = self.engine.parts
        return parts.vocoder.regions if COMPILE_TARGETS[target].table == "vocoder" else parts.unit_steps.regions

    def state(self) -> list[Tensor]:
        parts = self.engine.parts
        parts.vocoder.state.grow_voices(parts.vocoder.sizes.voice_frames)
        vocoder = [*parts.vocoder.state.tensors(), *parts.vocoder.vocode_state.tensors()]
        return [*parts.unit_steps.state.tensors(), *vocoder]


def talk(engine: Engine, n_units: int) -> list[UnitResult]:
    """Run two sessions at once; every third unit has a picture.

    The engine waits until both units of a round are there: with which windows of another session a window shares a run
    of the vocoder, and so the padding and the last bits of its sound, would depend on when they arrive.
    """
    events: queue.Queue[Any] = queue.Queue()
    handles: list[SessionHandle] = []
    for n in range(2):
        handle = engine.open(f"session {n}", CONFIG.session.model_copy(update={"seed": n}), events.put).result()
        handle.prepare(SystemPrompt.of("You are kind.", make_sound(n), make_voice(n))).result()
        handles.append(handle)
    results: list[UnitResult] = []
    for unit in range(n_units):
        are_there = threading.Event()
        engine.submit(are_there.wait, 60)
        for n, handle in enumerate(handles):
            handle.send(make_sound(100 * n + unit), [make_image(unit)] if unit % 3 == 0 else [])
        are_there.set()
        done = 0
        while done < len(handles):
            event = events.get(timeout=120)
            assert not isinstance(event, Failure), f"unit {unit}: {event}"
            if isinstance(event, UnitResult):
                results.append(event)
                done += 1
    for handle in handles:
        handle.close().result()
    return results


@pytest.fixture(scope="module")
def few_steps() -> Iterator[None]:
    with (
        mock.patch.multiple(region_table, SPEECH_STEPS=FEW_STEPS),
        mock.patch.multiple(speaker, SPEECH_STEPS=FEW_STEPS),
    ):
        yield


@pytest.fixture(scope="module")
def bench(few_steps: None) -> Iterator[Bench]:
    torch._dynamo.reset()
    with mock.patch.object(
        parts_module, "load_model", lambda *given, **options: with_history(load_model(*given, **options), POSITIONS)
    ):
        parts = build(CONFIG, shapes=SHAPES, vocoder_shapes=VOCODER_SHAPES)
    engine = Engine(parts, CONFIG, observer=Script())
    with engine:
        compile_result = engine.submit(compile_engine, engine.parts, CONFIG).result()
        yield Bench(engine, compile_result, RecompileWatch(engine.parts))
    torch._dynamo.reset()


def floats(value: object) -> list[Tensor]:
    return [tensor for tensor in flat(value) if tensor.is_floating_point()]


def flat(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in flat(part)] if isinstance(value, tuple | list) else []


def inputs(table: RegionTable, name: str, bucket: Bucket) -> tuple[list[Tensor], dict[str, Any]]:
    """Example inputs with one slot per row; the vocoder writes its state to the session's second row."""
    torch.manual_seed(hash(tuple(bucket.values())) % 1000)
    tensors, static = table.table[name].example(bucket)
    given, is_vocoder = list(tensors), "columns" in vars(table.shapes)
    for at in (0, 1) if is_vocoder else (0,):
        if given[at].ndim == 1 and given[at].dtype == torch.int64:
            given[at] = torch.arange(len(given[at])) + at * N_SLOTS
    return given, static


def compare(bench: Bench, target: str, region: str) -> dict[str, tuple[float, float]]:
    """Maximum and mean difference by bucket, over all outputs and all slot state after the call."""
    table, state, found = bench.table(target), bench.state(), {}
    before = [tensor.clone() for tensor in state]
    for bucket, variant in table.calls(region):
        tensors, static = inputs(table, region, bucket)
        results: list[list[Tensor]] = []
        for stance in ("force_eager", "default", "default"):
            for tensor, kept in zip(state, before, strict=True):
                tensor.copy_(kept)
            with torch.compiler.set_stance(stance):
                out = table(region, *tensors, **{**static, **variant})
            shown = [*flat(out), *state] if region not in DRAWING else [*floats(out), *floats(state)]
            results.append([tensor.clone() for tensor in shown])
        eager, compiled, again = results
        assert all(map(same, compiled, again)), f"{region} {bucket}: expected the same bits at every run"
        worst = mean = 0.0
        for one, other in zip(eager, compiled, strict=True):
            if not one.numel():
                continue
            delta = (one.double() - other.double()).abs().nan_to_num(0.0)
            assert torch.equal(one.isfinite(), other.isfinite()), f"{region} {bucket}: expected finite where eager is"
            worst, mean = max(worst, float(delta.max())), max(mean, float(delta.mean()))
        found[f"{bucket} {variant or ''}"] = (worst, mean)
    for tensor, kept in zip(state, before, strict=True):
        tensor.copy_(kept)
    return found


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def test_every_target_compiles(bench: Bench) -> None:
    states = bench.compile_result.targets
    assert {name: state.phase for name, state in states.items()} == dict.fromkeys(TARGETS, TargetPhase.COMPILED)
    assert all(state.n_graphs and state.hits + state.misses for state in states.values()), states
    assert bench.compile_result.counts.graph_breaks == 0


@pytest.fixture(scope="module")
def conversation(bench: Bench) -> tuple[list[UnitResult], list[bool]]:
    """Results of two sessions, and of each unit whether the sound encoder restarts."""
    restarts: list[bool] = []
    with mock.patch.object(
        unit_steps, "needs_overlap", lambda *given: restarts.append(needs_overlap(*given)) or restarts[-1]
    ):
        return talk(bench.engine, N_UNITS), restarts


def test_units_after_warm_up_compile_nothing(bench: Bench, conversation: tuple[list[UnitResult], list[bool]]) -> None:
    results, restarts = conversation
    assert len(results) == 2 * N_UNITS
    context = [result.context_len for result in results if result.session == "session 0"]
    assert any(restarts), "expected the sound encoder to restart"
    assert any(later < earlier for earlier, later in pairwise(context)), f"expected evictions, got {context} rows"
    n_listen, n_voiced = (
        sum(result.is_listen for result in results),
        sum(result.n_speech_tokens > 0 for result in results),
    )
    assert 2 < n_listen < 2 * N_UNITS - 10, f"expected units of both kinds, got {n_listen} that listen"
    assert n_voiced > 10, f"expected units with sound, got {n_voiced}"
    assert bench.watch.check() == CompileCounts(), f"after warm-up: {bench.watch.check()}"


def test_warm_up_compiles_nothing_more(bench: Bench) -> None:
    """Its units, alone and in batches of every size, use existing graphs only."""
    media = WarmUpMedia(TINY.parent / "warmup.mp4", TINY.parent / "ref_audio" / "default.wav")
    audio_16k = ReferenceSound.audio_16k
    with mock.patch.object(ReferenceSound, "audio_16k", lambda sound: audio_16k(sound)[:16_000]):
        report = warm_up(bench.engine, media, voice=lambda _: make_voice(0), log=lambda _: None, max_units=2)
    assert report.compiled_graphs == 0, f"expected no graph left to compile, got {report.compiled_graphs}"
    sizes = [burst.n for burst in report.bursts]
    assert report.tts_triggered and set(sizes) == set(SHAPES.batch), f"expected batches of {SHAPES.batch}, got {sizes}"
    assert bench.watch.check() == CompileCounts(), f"after warm-up: {bench.watch.check()}"


def test_repeated_conversation_is_bit_identical(
    bench: Bench, conversation: tuple[list[UnitResult], list[bool]]
) -> None:
    """Two runs of one engine."""
    again = talk(bench.engine, 4)
    for one, other in zip(conversation[0][: len(again)], again, strict=True):
        assert (one.session, one.tokens, one.n_speech_tokens) == (other.session, other.tokens, other.n_speech_tokens)
        assert (one.pcm is None and other.pcm is None) or np.array_equal(one.pcm, other.pcm)


@pytest.mark.parametrize(("target", "region"), COMPARED)
def test_compiled_equals_eager_within_rounding(bench: Bench, target: str, region: str) -> None:
    """At every bucket, on slots with the state of two sessions."""
    found = bench.engine.submit(compare, bench, target, region).result()
    assert len(found) > 1, f"expected several sizes, got {list(found)}"
    for bucket, (worst, mean) in found.items():
        assert worst < MAX_ERROR and mean < MEAN_ERROR, (
            f"{region} {bucket}: expected below {MAX_ERROR}, {MEAN_ERROR} on average, got {worst}, {mean}"
        )
    assert bench.watch.check() == CompileCounts(), f"after warm-up: {bench.watch.check()}"
