"""Speech over a pool of pages: the same tokens as with rows for each slot, and a pool without free pages."""

import pytest
import torch

from models.errors import SlotError
from models.layers.kv_pages import PageSizes
from models.omni import OmniModel
from models.stages.unit_steps import UnitSteps
from tests.models.stages.slot_copies import copy_state
from tests.models.stages.speech_calls import BatchedStream, WholeCallSpeaker
from tests.models.stages.speech_helpers import DRAWN, KINDS, UNIT, make_speaker, rows

PAGE = 16
SPEAKING = [False, False]  # turns that may not end


def pooled(model: OmniModel, n_pages: int) -> WholeCallSpeaker:
    return make_speaker(model, speech_pages=PageSizes(PAGE, n_pages, "speech rows"))


def n_free(speaker: WholeCallSpeaker) -> int:
    return speaker.state.cache.pages.n_free_rows // PAGE


def converse(speaker: WholeCallSpeaker) -> list[object]:
    """What four slots say whose pages are taken in turns, NaN among their rows."""
    found: list[object] = []
    for turn, kind in enumerate(KINDS):
        for slot in range(4):
            speaker.start_turn(slot, DRAWN if slot == 3 else UNIT, seed=turn + slot)
        stream = BatchedStream(speaker, 3, kind, 20, max_speech_tokens=9, batch=1)
        for unit in range(3):
            found.append(speaker.unit([0, 1], [rows(4, unit), rows(2 + turn, unit)], may_end=SPEAKING))
            found.append(stream.push(rows(5, unit), final=False))
        found.append([call.bad for call in speaker.unit([2], [rows(9) * float("nan")], may_end=[False])])
        speaker.drop_rows(1, 0, 50, rotates=True)
        speaker.empty_cache(2)
        found.append(speaker.unit([1, 2], [rows(3), rows(20)], may_end=SPEAKING))
    return found


def test_pages_change_no_token(tiny_model: OmniModel) -> None:
    plain, paged = make_speaker(tiny_model), pooled(tiny_model, 25)
    expected, got = converse(plain), converse(paged)
    assert got == expected, f"expected {expected}, got {got}"
    for slot in range(4):
        paged.empty_cache(slot)
    assert n_free(paged) == 25, f"expected all pages back, got {n_free(paged)}"
    cache = paged.state.cache
    assert all(tensor[:-2].eq(0).all() for tensor in (*cache.k, *cache.v)), "expected free pages to be zero"


def test_pages_are_those_that_rows_and_call_need(tiny_model: OmniModel) -> None:
    speaker = pooled(tiny_model, 16)
    steps = UnitSteps(speaker.runner, speaker)
    speaker.start_turn(0, UNIT, seed=1)
    for n_units, n_pages in ((1, 2), (2, 4), (3, 6), (4, 8)):
        before = steps.counters(0)
        speaker.unit([0], [rows(5)], may_end=[False])
        assert speaker.rows(0) == 30 * n_units, f"expected 30 rows a unit, got {speaker.rows(0)}"
        assert n_free(speaker) == 16 - n_pages, f"{n_units} units: expected {n_pages} pages, got {16 - n_free(speaker)}"
    steps.rewind_speech(0, before)
    assert n_free(speaker) == 16 - 6, f"call undone: expected 6 pages for 90 rows, got {16 - n_free(speaker)}"
    speaker.drop_rows(0, 0, 45, rotates=True)
    assert n_free(speaker) == 16 - 3, f"older half dropped: expected 3 pages, got {16 - n_free(speaker)}"
    steps.empty(0)
    assert n_free(speaker) == 16, f"slot emptied: expected all pages back, got {n_free(speaker)}"


def test_a_call_without_free_pages_is_refused(tiny_model: OmniModel) -> None:
    speaker, alone = pooled(tiny_model, 6), make_speaker(tiny_model)
    for each in (speaker, alone):
        each.start_turn(0, UNIT, seed=1)
        each.start_turn(1, UNIT, seed=2)
        each.unit([0, 1], [rows(5), rows(5)], may_end=SPEAKING)
    before = copy_state(speaker.runner.state)
    what = "speech rows of slot 0: expected at most 32 more rows, which are free, got 48"
    stream = BatchedStream(speaker, 0, "full_attention", max_speech_tokens=26, compat="reference")
    with pytest.raises(SlotError, match=what):
        stream.push(rows(20), final=False)
    with pytest.raises(SlotError, match=what):
        speaker.unit([0], [rows(20)], may_end=[False])
    for got, expected in zip(copy_state(speaker.runner.state), before, strict=True):
        assert torch.equal(got, expected), "expected a refused call to change nothing"
    got, expected = (each.unit([1], [rows(4)], may_end=[False]) for each in (speaker, alone))
    assert got == expected, f"another slot: expected {expected}, got {got}"
    speaker.empty_cache(1)
    got, expected = (each.unit([0], [rows(20)], may_end=[False]) for each in (speaker, alone))
    assert got == expected, f"with free pages: expected {expected}, got {got}"


def test_a_stream_drops_its_older_half_for_want_of_pages(tiny_model: OmniModel) -> None:
    speaker = pooled(tiny_model, 5)
    speaker.start_turn(0, DRAWN, eos=7000)
    stream = BatchedStream(speaker, 0, "full_attention", max_speech_tokens=25)
    held = []
    for _ in range(4):
        stream.push(rows(6), final=False)
        held.append(speaker.rows(0))
    assert held == [30, 60, 60, 60], f"expected 30 rows to be dropped from the third chunk on, got {held}"
