"""`encode` and `solve` as traced graphs: one graph each per bucket for every kind of chunk, and the same mel."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from models.graphs.region_graphs import compile_counters
from models.token2wav.flow.flow_state import REFERENCE_FLOW
from tests.models.compare import assert_same
from tests.models.token2wav.flow import flows
from tests.models.token2wav.flow.flows import LOOKAHEAD, Chunk, Rig, random_flow, random_tokens

FLOW = random_flow()
KINDS = [25, 25, 25, 7, 0, 25, 1, 28]  # tokens synthesized; the last chunk ends a turn
N_CHUNKS = 3 * len(KINDS)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def chunk(seed: int, number: int) -> Chunk:
    n, last = KINDS[number % len(KINDS)], number % len(KINDS) == len(KINDS) - 1
    return random_tokens(seed, n if last else n + LOOKAHEAD), last


def speak(rig: Rig, n_chunks: int) -> Iterator[dict[int, Tensor]]:
    """Two sessions at different positions of their turns; every fifth call has one of them and a row of padding."""
    for i in range(n_chunks):
        for slot, shift in ((0, 0), (3, 3)):
            if (i + shift) % len(KINDS) == 0:
                rig.begin({slot: (i // len(KINDS) + shift) % 2})
        chunks = {0: chunk(i, i), 3: chunk(100 + i, i + 3)}
        if i % 5 == 4:
            yield rig.step({0: chunks[0]}, n_scratch=1)
        else:
            yield rig.step(chunks)


def test_chunks_of_three_turns_are_one_graph_each(monkeypatch):
    """Traced and run operation by operation: bit-identical to eager, no graph break, nothing traced twice.

    With the reference's rules, which use all three trimming rules in one session.
    """
    plain, traced = (Rig(FLOW, REFERENCE_FLOW, prompts=(8, 55)) for _ in range(2))
    traced.begin({3: 1})
    plain.begin({3: 1})
    expected = list(speak(plain, N_CHUNKS))
    options = {"backend": "eager", "fullgraph": True, "dynamic": False}
    for name in ("encode", "solve"):
        monkeypatch.setattr(flows, name, torch.compile(getattr(flows, name), **options))
    before = compile_counters()
    for i, got in enumerate(speak(traced, N_CHUNKS)):
        if i == 0:
            warm = compile_counters()
        for slot, mel in got.items():
            assert_same(mel, expected[i][slot], f"chunk {i} of slot {slot}")
    after = compile_counters()
    assert after["graphs"] - before["graphs"] == 2, f"expected a graph of each, got {before} then {after}"
    assert after == warm, f"expected nothing compiled after the first chunk, got {warm} then {after}"
    assert after["graph_breaks"] == before["graph_breaks"], f"expected no graph breaks, got {before} then {after}"
