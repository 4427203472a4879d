"""NaN in memory that no session reads: free slots and padding."""

from collections.abc import Iterator

import pytest
import torch

from models.token2wav.flow.block_table import FIRST_ROW, SPILL_ROW
from models.token2wav.stream.vocoder import Vocoder
from tests.models.stages.slot_copies import assert_same, copy_state
from tests.worker.loop.engines import (
    ALOUD,
    N_SLOTS,
    Director,
    SmallEngine,
    assert_same_events,
    make_config,
    make_prompt,
    short_speech,
)
from worker.config.session import WindowConfig
from worker.loop.results import Event, UnitResult

TIGHT = WindowConfig(mode="basic", high_tokens=40, low_tokens=20)
MEMORY = WindowConfig(mode="context", max_units=1, previous_max_tokens=6)


@pytest.fixture(autouse=True, scope="module")
def _short_speech() -> Iterator[None]:
    with short_speech():
        yield


def poison(engine: SmallEngine) -> int:
    """Fill free slots and padding with NaN. Returns: number of tensors filled."""
    state, free = engine.unit_steps.state, engine.unit_steps.free_slots
    owned = [(tensor, [*free, state.scratch]) for tensor in state.tensors()]
    vocoder, sizes = engine.vocoder, engine.vocoder.sizes
    slots = [*vocoder._free, *(number + sizes.n_sessions for number in vocoder._free)]
    owned += [(tensor, slots) for tensor in (*vocoder.state.slot_tensors(), *vocoder.vocode_state.tensors())]
    poisoned = [(tensor, rows) for tensor, rows in owned if tensor.is_floating_point()]
    for tensor, rows in poisoned:
        tensor[rows] = torch.nan
    return len(poisoned) + poison_rows(vocoder)


def poison_rows(vocoder: Vocoder) -> int:
    """The same for cached rows, which share one pool."""
    pools = [(vocoder.state.token_table, vocoder.state.token_rows), (vocoder.state.mel_table, vocoder.state.mel_rows)]
    pools += [(vocoder.state.dit_table, rows) for rows in vocoder.state.dit_rows]
    for table, rows in pools:
        for number in vocoder._free:
            first = FIRST_ROW + number * table.ring
            rows[..., first : first + table.ring, :, :] = torch.nan
        rows[..., SPILL_ROW, :, :] = torch.nan
    return len(pools)


def run_two_sessions(engine: SmallEngine, poisoned: bool) -> tuple[dict[str, list[Event]], dict[str, list[str]]]:
    """Run two sessions, the second one opened later. Returns: events and digests of logits."""
    fresh = copy_state(engine.unit_steps.state)
    windows = {"first": TIGHT, "second": MEMORY}
    sessions = []
    for name, window in windows.items():
        if poisoned:
            n = poison(engine)
            assert n > 20, f"expected many tensors, got {n}"
        config = ALOUD.model_copy(update={"window": window})
        sessions.append(engine.open(name, config, make_prompt(name, ref=1, speaker=0)))
        for number in range(3):
            for session in sessions:
                engine.send(session, number, pictures=[0] if number == 1 else [])
            engine.settle()
    slots = [session.slot for session in sessions]
    for session in sessions:
        engine.sessions.close(session)
    assert_same(engine.unit_steps.state, fresh, slots)
    return {name: engine.take(name) for name in windows}, dict(engine.loop.observer.logits)


def test_nan_in_free_slots_does_not_reach_sessions() -> None:
    (expected, logits), (got, got_logits) = (
        run_two_sessions(SmallEngine(make_config(), Director(listen=0.0, turn_end=0.2, unit_end=0.1)), poisoned)
        for poisoned in (False, True)
    )
    for name in expected:
        results = [event for event in expected[name] if isinstance(event, UnitResult)]
        assert any(result.n_speech_tokens for result in results), f"{name}: expected speech, got none"
        assert_same_events(name, got[name], expected[name])
    assert got_logits == logits, "expected the same logits to the last bit"


def test_released_slot_with_nan_is_clean() -> None:
    """NaN in a session's slot does not reach the next session of that slot."""
    engine = SmallEngine(make_config(), Director(listen=0.0))
    fresh = copy_state(engine.unit_steps.state)
    session = engine.open("bad", ALOUD, make_prompt(speaker=0))
    expected = engine.run_unit(session, 1)
    for tensor in engine.unit_steps.state.tensors():
        if tensor.is_floating_point():
            tensor[session.slot] = torch.nan
    engine.sessions.close(session)
    assert_same(engine.unit_steps.state, fresh, range(N_SLOTS))
    again = engine.open("bad", ALOUD, make_prompt(speaker=0))
    assert_same_events("bad", [engine.run_unit(again, 1)], [expected])
