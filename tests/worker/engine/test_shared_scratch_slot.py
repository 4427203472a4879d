"""Engines whose layers share one scratch slot, as they do when kernels run them."""

from typing import Any
from unittest import mock

import pytest

from models.layers.kv_cache import KVCache
from models.stages.early_images import EARLY_SLICES
from models.stages.state import SlotState
from tests.worker.compile.compile_stubs import StubModel
from tests.worker.compile.test_compile_kernels import by_kernels
from tests.worker.loop.engines import (
    ALOUD,
    Director,
    SmallEngine,
    assert_mirrors,
    assert_same_events,
    loaded,
    make_config,
    make_prompt,
)
from worker.assembly import parts as building
from worker.assembly.sizes import tts_len
from worker.compile import compile_engine as compile_module
from worker.config.session import WindowConfig

WINDOW = WindowConfig(mode="basic", high_tokens=80, low_tokens=50)


def one_session(*, wanted: bool = True, **options: Any) -> SmallEngine:
    """wanted: build as if kernels were supported; the layers still run as plain modules."""
    with mock.patch.multiple(building, uses_kernels=lambda *_: wanted, _use_kernels=lambda *_: None):
        return SmallEngine(make_config(n_slots=1), **options)


def caches(engine: SmallEngine) -> list[KVCache]:
    state = engine.unit_steps.state
    return [state.llm, state.apm, state.speech.cache]


def share(engine: SmallEngine) -> set[bool]:
    return {not tensor.is_contiguous() for cache in caches(engine) for tensor in (cache.k[0], cache.v[0])}


def test_shared_scratch_slot_gives_the_same_events() -> None:
    """Images, sound beyond the encoder's positions, speech and evictions, in one session and in the next."""
    runs: list[list[Any]] = []
    for wanted in (True, False):
        watch = Director()
        engine = one_session(wanted=wanted, observer=watch)
        assert share(engine) == {wanted}
        for name, n_units in (("first", 5), ("second", 1)):
            session = engine.open(name, ALOUD.model_copy(update={"window": WINDOW}), make_prompt(speaker=0))
            events = [engine.run_unit(session, unit, pictures=[unit] if unit == 1 else ()) for unit in range(n_units)]
            assert_mirrors(engine.unit_steps, session.slot)
            assert session.window.events > 0 or n_units == 1, "expected evictions"
            engine.sessions.close(session)
            runs.append([events, watch.logits[name]])
    for (events, logits), (expected, expected_logits) in zip(runs[:2], runs[2:], strict=True):
        assert_same_events("one session", events, expected)
        assert logits == expected_logits, "expected the same logits after each prefill"


@pytest.mark.parametrize(("failed", "expected"), [(None, [True]), ("vocoder", [True, True]), ("omni", [True, False])])
def test_compiled_layers_have_separate_scratch_slots(
    monkeypatch: pytest.MonkeyPatch, failed: str | None, expected: list[bool]
) -> None:
    """If the model's kernels fail, its layers are compiled, and compiled layers need separate scratch slots."""
    engine, shared = one_session(), []

    class Fails:
        """Replaces the compiler: records the slots at each run and fails in the first one."""

        had_bad_graph = False

        def __init__(self, *_: Any):
            self.kernels_error = (failed, "no such instruction") if failed and not shared else None

        def run(self) -> None:
            shared.extend(share(engine))

    monkeypatch.setattr(compile_module, "GraphCompiler", Fails)
    monkeypatch.setattr(compile_module, "apply_backend_flags", lambda *_: {})
    done = by_kernels(engine, StubModel())
    assert shared == expected and done.backend_flags["kernels"] is expected[-1]
    state = engine.unit_steps.state
    apart = sum(tensor.nbytes for tensor in state.tensors())
    assert (state.nbytes() < apart) is expected[-1], f"expected {apart} bytes if nothing is shared"


def test_slot_bytes_equal_the_growth_by_one_slot() -> None:
    model, *_, vocoder = loaded()
    config = make_config(kv_layout="slots")
    lengths = {"llm_len": config.llm_len, "tts_len": tts_len(model)}
    few, more = (SlotState.allocate(model, n_slots=n, **lengths, early_slices=EARLY_SLICES).nbytes() for n in (2, 3))
    assert sum(building.slot_bytes(model, None, config).values()) == more - few
    assert sum(building.slot_bytes(model, vocoder, config).values()) > more - few
