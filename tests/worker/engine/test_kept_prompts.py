"""Saved prompts: keys for windows that evict, snapshots for other sessions."""

import pytest
import torch

from tests.worker.loop.engines import QUIET, SmallEngine, make_config
from worker.config.session import WindowConfig

WINDOW = WindowConfig(mode="basic", high_tokens=80, low_tokens=50)


@pytest.mark.parametrize("mode", ["basic", "context"])
def test_unshared_prompt_is_saved_as_keys_of_its_held_rows(mode: str) -> None:
    engine = SmallEngine(make_config(snapshots=0))
    window = WINDOW if mode == "basic" else WindowConfig(mode="context", max_units=3, previous_max_tokens=20)
    session = engine.open("a", QUIET.model_copy(update={"window": window}))
    cache, context = engine.unit_steps.state.llm, engine.unit_steps.context
    keys, n = context._held[session.slot].keys, context.n_held(session.slot)
    n_rows = engine.unit_steps.context_len(session.slot)
    assert (n == n_rows) is (mode == "basic") and 0 < n <= n_rows
    n_bytes = keys.untyped_storage().nbytes()
    assert n_bytes == n * cache.k[0][0, :, 0].nbytes * len(cache.k), "expected keys without values"
    for kept, own in zip(keys, cache.k, strict=True):
        assert torch.equal(kept, own[session.slot, :, :n])


def test_snapshot_is_shared_with_the_held_keys() -> None:
    engine = SmallEngine(make_config(snapshots=1))
    config = QUIET.model_copy(update={"window": WINDOW})
    first, second = engine.open("a", config), engine.open("b", config)
    [saved] = engine.sessions._prompts.snapshots.values()
    for session in (first, second):
        keys = engine.unit_steps.context._held[session.slot].keys
        assert keys.data_ptr() == saved.keys.data_ptr(), "expected the snapshot's memory, got a copy"
