"""Beam search in a slot: the text is that of `generate` in `transformers` with the same weights."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from models.errors import SlotError
from models.graphs.region_graphs import compile_counters
from models.omni import OmniModel
from models.sampling.beams import BeamSettings, Found
from models.sampling.text import TokenSet, TokenSets
from models.stages.beam_steps import BeamSearch
from models.stages.region_table import Shapes
from models.stages.runner import Rows, Runner
from models.stages.unit_steps import UnitSteps
from tests.models.stages.slot_copies import assert_same, copy_state

LLM_LEN = 256
SHAPES = Shapes(batch=(2,), rows=(64,), kv=(LLM_LEN,))
FORBIDDEN = frozenset(range(0, 700, 3))
NEVER_STOP = frozenset({0})


pytestmark = pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`")


@pytest.fixture(scope="module")
def oracle(tiny_model: OmniModel) -> Any:
    """The language model's weights in the class of `transformers`, whose import takes seconds."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = tiny_model.config
    theirs = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=False,
        )
    )
    theirs.load_state_dict(tiny_model.llm.state_dict())
    return theirs.requires_grad_(False).eval()


def make_steps(model: OmniModel, n_slots: int = 2, llm_len: int = LLM_LEN) -> UnitSteps:
    sets = TokenSets.build([TokenSet(), TokenSet(forbidden=FORBIDDEN)], model.config.vocab_size)
    return UnitSteps(Runner(model, sets, n_slots=n_slots, llm_len=llm_len, tts_len=16, shapes=SHAPES), None)


def prompt(n: int, seed: int) -> list[int]:
    return torch.randint(0, 700, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def begin(steps: UnitSteps, slot: int, ids: Sequence[int], settings: BeamSettings) -> BeamSearch:
    (chosen,) = steps.feed([slot], [Rows(torch.tensor(ids))], [False])
    search = steps.beams.begin(slot, settings, chosen.logits)
    assert search is not None
    return search


def run(steps: UnitSteps, *searches: BeamSearch) -> list[Found]:
    """Step all searches together until each is over."""
    while going := [one for one in searches if not one.is_over]:
        assert all(steps.beams.step(going))
    return [one.found for one in searches]


def found(steps: UnitSteps, ids: Sequence[int], settings: BeamSettings) -> Found:
    """The result of one search in an empty slot."""
    with steps.lease() as slot:
        return run(steps, begin(steps, slot, ids, settings))[0]


def expected(oracle: Any, ids: Sequence[int], settings: BeamSettings) -> list[int]:
    """Tokens of `generate`. The prompt enters as embeddings, so that the repetition penalty skips it."""
    embeds = oracle.get_input_embeddings()(torch.tensor([list(ids)]))
    (tokens,) = oracle.generate(
        inputs_embeds=embeds,
        num_beams=settings.n_beams,
        do_sample=False,
        early_stopping=False,
        max_new_tokens=settings.max_new_tokens,
        length_penalty=settings.length_penalty,
        repetition_penalty=settings.repetition_penalty,
        eos_token_id=sorted(settings.stop_ids),
        pad_token_id=0,
        suppress_tokens=sorted(FORBIDDEN) if settings.set_index else None,
    ).tolist()
    return tokens


def assert_equal(got: Found, tokens: Sequence[int], settings: BeamSettings) -> None:
    is_stopped = tokens[-1] in settings.stop_ids
    assert (list(got.ids), got.stopped) == (
        list(tokens[:-1] if is_stopped else tokens),
        "stop" if is_stopped else "length",
    )


@pytest.mark.parametrize("n_beams", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_text_equals_that_of_transformers(tiny_model: OmniModel, oracle: Any, n_beams: int, seed: int) -> None:
    ids = prompt(9 + seed, seed)
    settings = BeamSettings(n_beams, 24, NEVER_STOP, repetition_penalty=1.2, length_penalty=1.1)
    assert_equal(found(make_steps(tiny_model), ids, settings), expected(oracle, ids, settings), settings)


def test_stop_tokens_complete_hypotheses_as_in_transformers(tiny_model: OmniModel, oracle: Any) -> None:
    """Many ids stop, so that some hypotheses end early and the penalty decides between lengths."""
    steps, lengths = make_steps(tiny_model), set()
    for seed, length_penalty in product(range(4), (0.3, 1.0, 3.0)):
        ids, stops = prompt(7, seed), frozenset(range(seed, tiny_model.config.vocab_size, 12))
        settings = BeamSettings(3, 16, stops, length_penalty=length_penalty, repetition_penalty=1.2)
        tokens = expected(oracle, ids, settings)
        assert_equal(found(steps, ids, settings), tokens, settings)
        lengths.add(len(tokens))
    assert len(lengths) > 2, f"expected texts of several lengths, got {lengths}"


def test_forbidden_ids_are_not_chosen(tiny_model: OmniModel, oracle: Any) -> None:
    ids, settings = prompt(8, 1), BeamSettings(3, 20, NEVER_STOP, set_index=1, repetition_penalty=1.2)
    got = found(make_steps(tiny_model), ids, settings)
    assert not FORBIDDEN & set(got.ids)
    assert_equal(got, expected(oracle, ids, settings), settings)


def test_searches_that_share_steps_find_what_they_find_alone(tiny_model: OmniModel) -> None:
    steps = make_steps(tiny_model)
    short, long = prompt(5, 1), prompt(40, 2)
    settings = (
        BeamSettings(4, 6, NEVER_STOP, repetition_penalty=1.2),
        BeamSettings(2, 15, frozenset({0, 1, 2}), repetition_penalty=1.1, set_index=1),
    )
    alone = [found(steps, ids, own) for ids, own in zip((short, long), settings, strict=True)]
    with steps.lease() as first, steps.lease() as second:
        searches = begin(steps, first, short, settings[0]), begin(steps, second, long, settings[1])
        assert run(steps, *searches) == alone


def test_search_changes_no_other_slot_and_no_row_of_the_prompt(tiny_model: OmniModel) -> None:
    steps = make_steps(tiny_model)
    with steps.lease() as slot, steps.lease() as other:
        steps.feed([other], [Rows(torch.tensor(prompt(30, 3)))], [False])
        search = begin(steps, slot, prompt(10, 4), BeamSettings(3, 12, NEVER_STOP))
        own, before = steps.save(slot), copy_state(steps.state)
        run(steps, search)
        assert steps.context_len(slot) == 10
        assert all(torch.equal(*pair) for pair in zip(steps.save(slot), own, strict=True))
        assert_same(steps.state, before, [other])


def test_slot_decodes_after_a_search_as_without_one(tiny_model: OmniModel) -> None:
    steps, ids = make_steps(tiny_model), prompt(10, 4)
    logits = []
    for has_search in (True, False):
        with steps.lease() as slot:
            search = begin(steps, slot, ids, BeamSettings(3, 12, NEVER_STOP))
            if has_search:
                run(steps, search)
            (chosen,) = steps.step([slot], [7], [None], [False])
            logits.append(chosen.logits.clone())
    assert torch.equal(*logits)


def test_rows_that_no_hypothesis_sees_are_written_again(tiny_model: OmniModel, oracle: Any) -> None:
    """20 tokens of 4 hypotheses are 80 rows; a slot with room for 40 holds them, because most share their past."""
    ids, settings = prompt(8, 2), BeamSettings(4, 20, NEVER_STOP, repetition_penalty=1.2)
    got = found(make_steps(tiny_model, n_slots=1, llm_len=48), ids, settings)
    assert_equal(got, expected(oracle, ids, settings), settings)


@pytest.mark.parametrize("room", [0, 1, 5, 11])
def test_search_ends_where_the_slot_is_full(tiny_model: OmniModel, room: int) -> None:
    settings = BeamSettings(4, 60, NEVER_STOP)
    got = found(make_steps(tiny_model, llm_len=10 + room), prompt(10, 5), settings)
    assert got.stopped == "length"
    assert 1 + room // 4 <= len(got.ids) <= 1 + room


def test_one_token(tiny_model: OmniModel, oracle: Any) -> None:
    ids, settings = prompt(6, 8), BeamSettings(3, 1, NEVER_STOP)
    assert_equal(found(make_steps(tiny_model), ids, settings), expected(oracle, ids, settings), settings)


def test_logits_that_are_not_usable_are_reported(tiny_model: OmniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, settings = make_steps(tiny_model), BeamSettings(3, 12, NEVER_STOP)
    size = tiny_model.config.vocab_size
    with steps.lease() as slot, steps.lease() as other:
        for bad in (float("nan"), float("inf")):
            assert steps.beams.begin(slot, settings, torch.full((size,), bad)) is None
        search, healthy = (begin(steps, one, prompt(6, 9), settings) for one in (slot, other))
        real = tiny_model.llm.logits

        def broken(*given: torch.Tensor) -> torch.Tensor:
            logits = real(*given)
            logits[1] = float("nan")  # the second hypothesis of the first search
            return logits

        with monkeypatch.context() as patch:
            patch.setattr(tiny_model.llm, "logits", broken)
            assert steps.beams.step([search, healthy]) == [False, True]
        assert (search.n_tokens, healthy.n_tokens) == (1, 2)


def test_one_slot_for_two_searches_is_refused(tiny_model: OmniModel) -> None:
    steps = make_steps(tiny_model)
    with steps.lease() as slot:
        search = begin(steps, slot, prompt(6, 9), BeamSettings(3, 12, NEVER_STOP))
        with pytest.raises(SlotError, match="different numbers"):
            steps.beams.step([search, search])


def test_search_beside_compiled_layers_compiles_nothing(tiny_model: OmniModel) -> None:
    steps, ids, settings = make_steps(tiny_model), prompt(8, 2), BeamSettings(3, 10, NEVER_STOP)
    expected = found(steps, ids, settings)
    steps.regions.compile(["unit_prefill", "unit_step"], by_layer=True, backend="eager")
    try:
        steps.regions.warm_up(["unit_prefill", "unit_step"])
        before = compile_counters()
        assert found(steps, ids, settings) == expected
        assert compile_counters() == before
    finally:
        steps.regions.uncompile()
