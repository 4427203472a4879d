"""Prefill and decode steps: results do not depend on pieces, batches or padding."""

import pytest
import torch
from torch import Tensor

from models.omni import OmniModel
from models.sampling.settings import TextSampling
from models.sampling.text import sample_text
from models.stages.region_table import Shapes
from models.stages.runner import Rows
from models.stages.unit_steps import UnitSteps
from tests.models.compare import assert_close
from tests.models.stages.hidden_states import record_hidden
from tests.models.stages.slot_copies import assert_same, copy_state
from tests.models.stages.text_helpers import assert_mirrored, feed, make_steps, mixed, text

TOLERANCE = 1e-5  # float32; batches of different sizes add up in different orders
WHOLE = Shapes(rows=(64,))


@pytest.fixture
def steps(tiny_model: OmniModel) -> UnitSteps:
    return make_steps(tiny_model)


def fed_whole(model: OmniModel, *spans: Rows) -> tuple[list[Tensor], list[Tensor]]:
    """Hidden states and last logits of spans fed one after another to an otherwise unused slot, each in one piece."""
    whole = make_steps(model, WHOLE, n_slots=1)
    with record_hidden(model) as hidden:
        logits = [feed(whole, [0], [span])[0].logits.clone() for span in spans]
    return [states[0, : len(span)] for states, span in zip(hidden, spans, strict=True)], logits


def test_batched_pieces_equal_one_slot_in_one_piece(steps: UnitSteps, tiny_model: OmniModel) -> None:
    order, spans = [4, 0, 2, 1], [mixed(37, 1), text(5, 2), mixed(16, 3), text(17, 4)]
    first = [one.logits.clone() for one in feed(steps, order, spans)]
    later = {2: text(33, 5), 4: mixed(2, 6)}
    second = dict(
        zip(later, [one.logits.clone() for one in feed(steps, list(later), list(later.values()))], strict=True)
    )
    assert_mirrored(steps.runner, range(6))
    assert [steps.context_len(slot) for slot in range(6)] == [5, 17, 49, 0, 39, 0]
    for row, slot in enumerate(order):
        whole = make_steps(tiny_model, WHOLE, n_slots=1)
        assert_close(first[row], feed(whole, [0], [spans[row]])[0].logits, TOLERANCE, f"logits of slot {slot}")
        if slot in later:
            expected = feed(whole, [0], [later[slot]])[0].logits
            assert_close(second[slot], expected, TOLERANCE, f"later logits of slot {slot}")
        for number, (got, own) in enumerate(zip(steps.save(slot), whole.save(0), strict=True)):
            assert_close(got, own, TOLERANCE, f"cache tensor {number} of slot {slot}")


def test_span_can_be_cut_anywhere(steps: UnitSteps) -> None:
    span = mixed(21, 7)
    (whole,) = feed(steps, [0], [span])
    expected = whole.logits.clone()
    for start, end in ((0, 1), (1, 18), (18, 21)):
        (last,) = feed(steps, [1], [span.cut(start, end)])
    assert_close(last.logits, expected, TOLERANCE, "logits")
    for number, (got, own) in enumerate(zip(steps.save(1), steps.save(0), strict=True)):
        assert_close(got, own, TOLERANCE, f"cache tensor {number}")


def test_media_rows_replace_token_embeddings(steps: UnitSteps, tiny_model: OmniModel) -> None:
    span = mixed(9, 8)
    embedded = tiny_model.llm.model.embed_tokens(span.ids)
    embedded[span.is_row] = span.media
    other_ids = Rows(torch.where(span.is_row, 3, span.ids), span.media, span.is_row)
    all_media = Rows(span.ids, embedded, torch.ones(9, dtype=torch.bool))
    (expected,), _ = fed_whole(tiny_model, span)
    for what, rows in (("other ids under media", other_ids), ("media rows only", all_media)):
        (got,), _ = fed_whole(tiny_model, rows)
        assert_close(got, expected, TOLERANCE, what)


def test_step_equals_feeding_one_more_row(steps: UnitSteps) -> None:
    long, short = text(30, 1), text(4, 2)
    with record_hidden(steps.runner.model) as hidden:
        expected = [one.logits.clone() for one in feed(steps, [0, 1], [long, short])]
        expected_hidden = [hidden[-1][0, 13], hidden[0][1, 3]]  # the last piece of the long span, the first of both
        feed(steps, [2, 3], [long.cut(0, 29), short.cut(0, 3)])
        of_short, of_long = steps.step([3, 2], [int(short.ids[3]), int(long.ids[29])], [7, None], [False, False])
        assert_close(hidden[-1][1], expected_hidden[0], TOLERANCE, "hidden state of the long span")
        assert_close(hidden[-1][0], expected_hidden[1], TOLERANCE, "hidden state of the short span")
    assert_mirrored(steps.runner, range(6))
    assert_close(of_long.logits, expected[0], TOLERANCE, "logits of the long span")
    assert_close(of_short.logits, expected[1], TOLERANCE, "logits of the short span")
    assert_close(steps.state.hidden[3, 7], expected_hidden[1], TOLERANCE, "state kept for speech")
    assert not steps.state.hidden[2].any(), "expected no state kept without a place"


def test_padding_changes_no_slot(steps: UnitSteps) -> None:
    """Three slots run in a batch of four."""
    feed(steps, [0, 1, 2], [text(6, seed) for seed in range(3)])
    before = copy_state(steps.state)
    chosen = steps.step([0, 1, 2], [9, 8, 7], [None] * 3, [True] * 3)
    assert len(chosen) == 3 and all(one.token is not None for one in chosen)
    assert_same(steps.state, before, [3, 4, 5])
    assert int(steps.state.llm.lengths[steps.state.scratch]) == 0, "expected padding to append no row"


def test_more_slots_than_the_largest_batch_run_in_parts(steps: UnitSteps, tiny_model: OmniModel) -> None:
    spans = [text(3 + n, n) for n in range(6)]
    got = [one.logits.clone() for one in feed(steps, list(range(6)), spans)]
    stepped = [one.logits.clone() for one in steps.step(list(range(6)), [9] * 6, [None] * 6, [False] * 6)]
    for n, span in enumerate(spans):
        _, (fed, after) = fed_whole(tiny_model, span, Rows(torch.tensor([9])))
        assert_close(got[n], fed, TOLERANCE, f"logits of slot {n}")
        assert_close(stepped[n], after, TOLERANCE, f"logits of slot {n} after a step")


def test_each_slot_uses_its_own_settings(steps: UnitSteps) -> None:
    drawn, greedy, slots = TextSampling(temperature=2.0, top_k=40), TextSampling(greedy=True), [5, 0, 3]
    for slot, settings in zip(slots, (drawn, greedy, drawn), strict=True):
        steps.configure_text(slot, settings, seed=11)
    chosen = [steps.feed(slots, [text(9, 1)] * 3, [True] * 3)]
    for _ in range(7):
        # Equal inputs for all slots: only settings and draws may differ.
        chosen.append(steps.step(slots, [7] * 3, [None] * 3, [True] * 3))
        assert_close(chosen[-1][2].logits, chosen[-1][0].logits, TOLERANCE, "logits of equal contexts")
        assert chosen[-1][1].token == int(chosen[-1][1].logits.argmax())
    assert all(ones[0].token == ones[2].token for ones in chosen), "expected equal draws for equal seeds"
    assert len({ones[0].token for ones in chosen}) > 1
    assert steps.state.text.draws[slots].tolist() == [8, 8, 8]
    assert [steps.counters(slot).draws for slot in slots] == [8, 8, 8]


def test_step_chooses_as_the_sampler_does(steps: UnitSteps) -> None:
    """The token equals that of `sample_text` on the step's logits, from the same sampler state."""
    for slot in (0, 1):
        steps.configure_text(slot, TextSampling(temperature=1.5), seed=slot)
    feed(steps, [0, 1], [text(6, 1), text(4, 2)])
    twin = make_steps(steps.runner.model)
    for slot in (0, 1):
        twin.configure_text(slot, TextSampling(temperature=1.5), seed=slot)
    chosen = steps.step([0, 1], [3, 4], [None] * 2, [True] * 2)
    logits, slots = torch.stack([one.logits for one in chosen]), torch.tensor([0, 1])
    sets = twin.runner.regions.table["unit_step"].bound[2]
    expected = sample_text(logits, slots, torch.tensor([True, True]), twin.state.text, sets).ids.tolist()
    assert [one.token for one in chosen] == expected


def test_nan_in_one_slot_does_not_affect_another(steps: UnitSteps) -> None:
    bad = mixed(9, 8)
    bad = Rows(bad.ids, bad.media * float("nan"), bad.is_row)
    for slot in (0, 1):
        steps.configure_text(slot, TextSampling(greedy=True), seed=0)
    broken, good = steps.feed([0, 1], [bad, text(5, 1)], [True, True])
    assert broken.bad and broken.token is None
    assert not good.bad and good.token == int(good.logits.argmax())
