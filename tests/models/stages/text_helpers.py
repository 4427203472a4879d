"""`UnitSteps` on a small table of shapes, spans of random rows, and checks of the host's counters."""

from collections.abc import Sequence

import torch

from models.omni import OmniModel
from models.sampling.text import TokenSet, TokenSets
from models.stages.region_table import Shapes
from models.stages.runner import Rows, Runner
from models.stages.step_types import Chosen
from models.stages.unit_steps import UnitSteps

LLM_LEN = 64
SMALL = Shapes(batch=(1, 2, 4), rows=(4, 16), kv=(16, 32, 64))


def make_steps(model: OmniModel, shapes: Shapes = SMALL, n_slots: int = 6, llm_len: int = LLM_LEN) -> UnitSteps:
    sets = TokenSets.build([TokenSet(pad_id=5)], model.config.vocab_size)
    return UnitSteps(Runner(model, sets, n_slots=n_slots, llm_len=llm_len, tts_len=16, shapes=shapes), None)


def text(n: int, seed: int) -> Rows:
    return Rows(torch.randint(0, 700, (n,), generator=torch.Generator().manual_seed(seed)))


def mixed(n: int, seed: int) -> Rows:
    """Tokens with media rows between them."""
    generator = torch.Generator().manual_seed(seed)
    is_row = torch.rand(n, generator=generator) < 0.5
    return Rows(text(n, seed).ids, torch.randn(n, 128, generator=generator)[is_row], is_row)


def feed(steps: UnitSteps, slots: Sequence[int], spans: Sequence[Rows]) -> list[Chosen]:
    """Feed without choosing a token."""
    return steps.feed(slots, spans, [False] * len(slots))


def assert_mirrored(runner: Runner, slots: Sequence[int]) -> None:
    """Assert that the host's number of rows equals the cache's."""
    got = [runner.context_len(slot) for slot in slots]
    expected = runner.state.llm.lengths[list(slots)].tolist()
    assert got == expected, f"expected {expected} rows, got {got}"
