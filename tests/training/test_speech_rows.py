"""Speech is learned from the rows that serving feeds to the speech model, and with its logits."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.training.batches import predict, tiny_model
from tests.worker.loop.engines import ALOUD, UNIT_TOKENS, loaded, make_sound, short_speech
from tests.worker.loop.scripted_engine import ScriptedEngine, results
from training.mind.records import as_levels, make_record
from training.mind.speech import (
    BEGIN,
    SPEECH,
    SPOKEN,
    STATELESS_SHARE,
    WRONG_SHARE,
    SpeechBatch,
    collate_replies,
    predict_speech,
    speech_head,
    speech_rows,
    spoken_places,
    with_noise,
)
from training.timelines.layout import NOTHING, RowLayout
from training.timelines.timeline import Timeline, TimelineUnit
from training.timelines.windows import TimelinePart, part_rows

# Speech tokens are the best ones, and the turn ends with its text.
GREEDY = {"tts_temperature": 1e-6, "tts_repetition_penalty": 1.0, "drain_s": 0.0, "max_new_speak_tokens_per_chunk": 20}
END = 999


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with short_speech():
        yield ScriptedEngine()


def test_best_tokens_equal_those_that_serving_draws(engine: ScriptedEngine) -> None:
    special = engine.special
    lines = [
        (special.speak, *engine.ids("Hello there"), special.chunk_eos),
        (special.speak, *engine.ids(" Hello"), special.turn_eos, special.chunk_eos),
    ]
    session = engine.start("a", ALOUD.model_copy(update=GREEDY), *map(list, lines))
    engine.end_with(session, None)
    results(engine.run(session, 2))
    calls = engine.record("a").spoke
    assert [len(call.speech_tokens) for call in calls] == [UNIT_TOKENS, UNIT_TOKENS]

    units = tuple(TimelineUnit(tokens) for tokens in lines)
    sound = (as_levels(np.concatenate([make_sound(0), make_sound(1)])) / 32_768).astype(np.float32)
    timeline, part = Timeline(sound, units, ()), TimelinePart(0, 0, 2)
    model, tokenizer, *_ = loaded()
    layout = RowLayout(tokenizer, system="You are kind.")
    context = part_rows(units, part, layout)
    text = [unit.tokens[1:-1] for unit in units]
    places = [spoken_places(context, number, unit) for number, unit in enumerate(units)]
    assert [context.ids[one].tolist() for one in places] == [list(one) for one in text]
    tokens = [token for call in calls for token in call.speech_tokens]
    rows = speech_rows(text, places, tokens, END, per_unit=UNIT_TOKENS)
    starts = np.flatnonzero(rows.kinds == BEGIN).tolist()
    assert [start - len(one) for start, one in zip(starts, text, strict=True)] == [call.start for call in calls]
    record = make_record("talk", timeline, part, layout, model.config, replies=(rows,))
    hidden = predict(model, [record]).hidden
    batch = collate_replies([record], hidden.shape[1])
    assert batch is not None
    with torch.no_grad():
        logits = predict_speech(model, hidden, batch)
    drawn = batch.targets != END
    assert batch.targets[drawn].tolist() == tokens
    assert logits[drawn].argmax(dim=-1).tolist() == tokens


def test_rows_of_a_reply() -> None:
    rows = speech_rows([[5, 6], [7]], [[20, 21], [40]], [1, 2, 3, 4, 8, 9, 3], END, per_unit=3)
    assert rows.kinds.tolist() == [
        SPOKEN,
        SPOKEN,
        BEGIN,
        SPEECH,
        SPEECH,
        SPEECH,
        SPOKEN,
        BEGIN,
        SPEECH,
        SPEECH,
        SPEECH,
        BEGIN,
        SPEECH,
    ]
    assert rows.values.tolist() == [5, 6, 0, 1, 2, 3, 7, 0, 4, 8, 9, 0, 3]
    assert rows.places.tolist() == [20, 21, *[NOTHING] * 4, 40, *[NOTHING] * 6]
    assert rows.targets.tolist() == [NOTHING, NOTHING, 1, 2, 3, NOTHING, NOTHING, 4, 8, 9, NOTHING, 3, END]


def test_speech_that_is_short_is_filled_and_an_interrupted_one_ends() -> None:
    short = speech_rows([[5], [6]], [[1], [2]], [1], END, per_unit=3, silence=0)
    assert short.values.tolist() == [5, 0, 1, 0, 0, 6, 0]
    assert short.targets.tolist() == [NOTHING, 1, 0, 0, NOTHING, NOTHING, END]
    cut = speech_rows([[5], []], [[1], []], [1, 2, 3], END, per_unit=3)
    assert cut.targets.tolist() == [NOTHING, 1, 2, 3, NOTHING, END]


def test_the_folded_head_is_that_of_serving() -> None:
    model = loaded()[0]
    assert torch.allclose(speech_head(model), model.tts.head_code[0].weight, atol=1e-6)


def test_some_speech_tokens_that_are_read_are_wrong_in_training() -> None:
    end, n = 99, 4000
    kinds = torch.tensor([SPOKEN, BEGIN, *[SPEECH] * n]).repeat(50, 1)
    values = torch.where(kinds == SPEECH, torch.arange(n + 2) % 50, 7)
    targets = torch.tensor([*range(50, 90), end])
    batch = SpeechBatch(kinds, values, torch.zeros_like(kinds), torch.zeros(41, dtype=torch.int64), targets)
    changed, has_states = with_noise(batch, torch.Generator().manual_seed(0), end)
    differs = changed.values != values
    assert not bool(differs[:, :2].any()), "expected text as it was"
    share = WRONG_SHARE * 40 / 41
    assert float(differs[:, 2:].float().mean()) == pytest.approx(share, abs=0.01)
    assert set(changed.values[differs].tolist()) == set(range(50, 90)), "expected targets other than the end"
    assert float(has_states.float().mean()) == pytest.approx(1 - STATELESS_SHARE, abs=0.2)


def test_replies_that_see_no_states_depend_on_their_text_alone() -> None:
    model = tiny_model()
    kinds = torch.tensor([[SPOKEN, BEGIN, SPEECH]] * 2)
    parts = (torch.full_like(kinds, 5), torch.zeros_like(kinds), torch.arange(6), torch.arange(6))
    batch = SpeechBatch(kinds, *parts)
    hidden = [torch.randn(1, 4, model.config.hidden_size) for _ in range(2)]
    with torch.no_grad():
        one, other = (predict_speech(model, states, batch, has_states=torch.tensor([True, False])) for states in hidden)
    assert torch.equal(one[3:], other[3:]) and not torch.equal(one[:3], other[:3])
