"""An engine of one session, whose layers share a scratch slot where kernels run them."""

from typing import Any
from unittest import mock

import pytest

from models.layers.kv_cache import KVCache
from models.stages.state import SlotState
from tests.worker.compile.compile_stubs import StubModel
from tests.worker.compile.test_compile_kernels import by_kernels
from tests.worker.loop.engines import (
    ALOUD,
    Director,
    SmallEngine,
    assert_mirrors,
    assert_told,
    loaded,
    make_config,
    make_prompt,
)
from worker.assembly import parts as building
from worker.compile import compile_engine as compile_module
from worker.config.session import WindowConfig

WINDOW = WindowConfig(mode="basic", high_tokens=80, low_tokens=50)


def one_session(*, wanted: bool = True, **options: Any) -> SmallEngine:
    """wanted: as it is built where kernels suit, only that its layers run as they are written."""
    with mock.patch.multiple(building, wants_kernels=lambda *_: wanted, _make_room=lambda *_: None):
        return SmallEngine(make_config(n_slots=1), **options)


def caches(engine: SmallEngine) -> list[KVCache]:
    state = engine.duplex.state
    return [state.llm, state.apm, state.speech.cache]


def share(engine: SmallEngine) -> set[bool]:
    return {not tensor.is_contiguous() for cache in caches(engine) for tensor in (cache.k[0], cache.v[0])}


def test_one_session_is_told_the_same_as_with_scratch_slots_of_their_own() -> None:
    """Seeing, hearing over the end of its positions, speaking, and dropping what is old; then for the next one."""
    told: list[list[Any]] = []
    for wanted in (True, False):
        watch = Director()
        engine = one_session(wanted=wanted, observer=watch)
        assert share(engine) == {wanted}
        for name, n_units in (("first", 5), ("second", 1)):
            session = engine.open(name, ALOUD.model_copy(update={"window": WINDOW}), make_prompt(speaker=0))
            events = [engine.say(session, unit, pictures=[unit] if unit == 1 else ()) for unit in range(n_units)]
            assert_mirrors(engine.duplex, session.slot)
            assert session.window.events > 0 or n_units == 1, "expected the window to have moved"
            engine.sessions.close(session)
            told.append([events, watch.logits[name]])
    for (events, logits), (expected, expected_logits) in zip(told[:2], told[2:], strict=True):
        assert_told("one session", events, expected)
        assert logits == expected_logits, "expected the same bits behind each prefill"


@pytest.mark.parametrize(("failed", "expected"), [(None, [True]), ("vocoder", [True, True]), ("omni", [True, False])])
def test_layers_that_compile_have_scratch_slots_of_their_own(
    monkeypatch: pytest.MonkeyPatch, failed: str | None, expected: list[bool]
) -> None:
    """What is compiled for one layer would not do for another: where the model's kernels fail, its layers compile."""
    engine, shared = one_session(), []

    class Fails:
        """In place of a tuner: notes how slots are at each run, and fails at the first."""

        had_bad_graph = False

        def __init__(self, *_: Any):
            self.kernels_error = (failed, "no such instruction") if failed and not shared else None

        def run(self) -> None:
            shared.extend(share(engine))

    monkeypatch.setattr(compile_module, "GraphCompiler", Fails)
    monkeypatch.setattr(compile_module, "apply_backend_flags", lambda *_: {})
    done = by_kernels(engine, StubModel())
    assert shared == expected and done.backend_flags["kernels"] is expected[-1]
    state = engine.duplex.state
    apart = sum(tensor.nbytes for tensor in state.tensors())
    assert (state.nbytes() < apart) is expected[-1], f"expected {apart} bytes where nothing is shared"


def test_a_slots_bytes_are_what_one_more_takes() -> None:
    model, *_, vocoder = loaded()
    config = make_config()
    few, more = (
        SlotState.allocate(model, n_slots=n, llm_len=config.llm_len, tts_len=building._tts_len(model)).nbytes()
        for n in (2, 3)
    )
    assert building.slot_bytes(model, None, config) == more - few
    assert building.slot_bytes(model, vocoder, config) > more - few
