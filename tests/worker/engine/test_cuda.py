"""The engine on a GPU: captured graphs give the results of eager regions, and nothing compiles while serving."""

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from PIL import Image

from models.graphs.region_graphs import compile_counters
from models.stages.region_table import Shapes
from models.token2wav.stream.region_table import VocoderShapes
from tests.models.token2wav.stream.vocoders import make_voice
from worker.assembly.backend_flags import apply_backend_flags
from worker.assembly.parts import build, max_sessions
from worker.chat.config import ReplyConfig
from worker.compile.compile_engine import compile_engine
from worker.compile.state import TargetPhase
from worker.config.compile import CompileConfig
from worker.config.session import EngineConfig, SessionConfig, WindowConfig
from worker.config.weights import KVLayout
from worker.engine import Engine
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.results import ReplyResult, UnitResult

pytestmark = pytest.mark.gpu

N_SESSIONS, N_UNITS = 2, 10
PLAIN = CompileConfig(enabled=False)
SESSION = SessionConfig(
    decode_mode="greedy",
    force_listen_count=0,
    window=WindowConfig(high_tokens=300, low_tokens=200),
    seed=3,
)


def make_engine(tiny: Path, compile: CompileConfig = PLAIN, kv_layout: KVLayout = "slots") -> Engine:
    config = EngineConfig(
        model_path=tiny,
        device="cuda",
        dtype="float32",
        max_sessions=N_SESSIONS,
        llm_len=512,
        euler_steps=2,
        session=SESSION,
        compile=compile,
        kv_layout=kv_layout,
    )
    shapes = Shapes(
        batch=(N_SESSIONS,),
        slices=(1, 2),
        patches=(1088,),
        rows=(16, 80),
        kv=(512,),
        spoken=(24,),
        tokens=(24,),
        speech_kv=(512,),
    )
    vocoder_shapes = VocoderShapes(batch=(N_SESSIONS,), speech_tokens=(10, 25, 28), columns=(256,))
    parts = build(config, shapes=shapes, vocoder_shapes=vocoder_shapes)
    engine = Engine(parts, config)
    engine.start()
    compile_result = engine.submit(compile_engine, parts, config).result()
    failed = {
        name: state.error for name, state in compile_result.targets.items() if state.phase is TargetPhase.FELL_BACK
    }
    assert not failed, f"expected every target to compile, got {failed}"
    return engine


def converse(engine: Engine) -> list[UnitResult]:
    events: queue.Queue = queue.Queue()
    generator = np.random.default_rng(0)
    picture = generator.integers(0, 256, (96, 128, 3), dtype=np.uint8)
    results: list[UnitResult] = []
    with engine:
        handles = [engine.open(str(n), None, events.put).result() for n in range(N_SESSIONS)]
        for handle in handles:
            handle.prepare(SystemPrompt.of("Hello.", None, make_voice())).result()
        for unit in range(N_UNITS):
            for handle in handles:
                sound = 0.1 * generator.standard_normal(16000)
                frames = [Image.fromarray(picture)] if unit % 3 == 0 else []
                handle.send(sound.astype(np.float32), frames, force_listen=unit == 6)
            done: list[UnitResult] = []
            while len(done) < N_SESSIONS:
                event = events.get(timeout=120)
                assert not hasattr(event, "error"), f"unit {unit}: {getattr(event, 'error', None)}"
                done += [event] if isinstance(event, UnitResult) else []
            results += sorted(done, key=lambda one: one.session)
    return results


def assert_equal_units(got: list[UnitResult], expected: list[UnitResult]) -> None:
    """Equal tokens. Sound differs in its last bits: which windows share a run of the vocoder depends on the time."""
    for one, other in zip(got, expected, strict=True):
        at = f"session {other.session} unit {other.index}"
        assert one.tokens == other.tokens, f"{at}: expected {other.tokens}, got {one.tokens}"
        drawn, expected_drawn = one.n_speech_tokens, other.n_speech_tokens
        assert drawn == expected_drawn, f"{at}: expected {expected_drawn} speech tokens, got {drawn}"
        assert (one.pcm is None) == (other.pcm is None), at
        if one.pcm is not None and other.pcm is not None:
            assert len(one.pcm) == len(other.pcm), f"{at}: expected {len(other.pcm)} samples, got {len(one.pcm)}"
            worst = float(np.abs(one.pcm - other.pcm).max())
            assert worst < 1e-3, f"{at}: sound is {worst:.2g} apart"


@pytest.fixture(autouse=True)
def switches_stay() -> Iterator[None]:
    """Restore the backend flags, which are process-wide."""
    precision, allowed = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = allowed


def test_captured_units_equal_eager_ones_and_use_graphs_only(tiny: Path) -> None:
    # TF32 changes a sampled speech token now and then, and with it all later sound.
    apply_backend_flags(CompileConfig(tf32=False), torch.device("cuda"))
    eager = converse(make_engine(tiny))
    engine = make_engine(tiny, CompileConfig(enabled=True, targets=(), cuda_graphs="on", tf32=False))
    tables = [engine.parts.unit_steps.regions, engine.parts.vocoder.regions]
    assert all(table.n_captured > 0 for table in tables)
    counted = compile_counters()
    captured = converse(engine)
    assert compile_counters() == counted, "something compiled while serving"
    assert [table.n_skipped for table in tables] == [0, 0], "calls at shapes that have no graph"
    assert any(result.pcm is not None for result in eager), "expected sound in some unit, got none"
    assert_equal_units(captured, eager)


@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_units_compile_nothing_while_serving(tiny: Path, dynamic: bool) -> None:
    engine = make_engine(tiny, CompileConfig(enabled=True, dynamic=dynamic))
    counted = compile_counters()
    results = converse(engine)
    assert compile_counters() == counted, "something compiled while serving"
    assert len(results) == N_SESSIONS * N_UNITS


def test_pages_change_no_token_of_compiled_units(tiny: Path) -> None:
    """The window evicts, so that pages are read, written, moved and returned by captured graphs."""
    compile = CompileConfig(enabled=True, tf32=False)
    expected = converse(make_engine(tiny, compile))
    engine = make_engine(tiny, compile, "pages")
    assert engine.parts.unit_steps.state.llm.pages.is_pool
    counted = compile_counters()
    got = converse(engine)
    assert compile_counters() == counted, "something compiled while serving"
    assert_equal_units(got, expected)


def beam_answer(engine: Engine) -> ReplyResult:
    events: queue.Queue = queue.Queue()
    config = ReplyConfig(max_new_tokens=24, decode_mode="greedy", num_beams=3, repetition_penalty=1.2)
    with engine:
        engine.chat("a", [{"role": "user", "content": "Hello"}], config, events.put)
        while not isinstance(event := events.get(timeout=120), ReplyResult):
            assert not hasattr(event, "error"), f"expected an answer, got {event}"
    return event


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_beam_search_beside_compiled_units_compiles_nothing(tiny: Path, kernels: Literal["auto", "off"]) -> None:
    apply_backend_flags(CompileConfig(tf32=False), torch.device("cuda"))
    expected = beam_answer(make_engine(tiny))
    engine = make_engine(tiny, CompileConfig(enabled=True, kernels=kernels, tf32=False))
    counted = compile_counters()
    got = beam_answer(engine)
    assert compile_counters() == counted, "something compiled while serving"
    assert (got.tokens, got.stopped) == (expected.tokens, expected.stopped)


def test_free_memory_limits_the_sessions(tiny: Path) -> None:
    engine = make_engine(tiny)
    few = max_sessions(engine.parts.model, None, engine.config)
    longer = engine.config.model_copy(update={"llm_len": 40_000})
    assert 1 <= max_sessions(engine.parts.model, None, longer) <= few <= 64


def test_bfloat16_is_deterministic(tiny: Path) -> None:
    said = []
    for _ in range(2):
        config = EngineConfig(
            model_path=tiny, device="cuda", max_sessions=1, llm_len=512, euler_steps=2, session=SESSION, compile=PLAIN
        )
        engine = Engine.build(config)
        events: queue.Queue = queue.Queue()
        with engine:
            handle = engine.open("a", None, events.put).result()
            handle.prepare(SystemPrompt.of("Hello.", None, make_voice())).result()
            for unit in range(4):
                handle.send((0.1 * np.random.default_rng(unit).standard_normal(16000)).astype(np.float32))
            results = []
            while len(results) < 4:
                event = events.get(timeout=120)
                results += [event] if isinstance(event, UnitResult) else []
        said.append(results)
    for first, second in zip(*said, strict=True):
        assert first.tokens == second.tokens
        assert (first.pcm is None and second.pcm is None) or np.array_equal(first.pcm, second.pcm)
