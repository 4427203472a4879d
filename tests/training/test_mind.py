"""The training pass over a conversation gives the logits that the unit engine computes, and has gradients."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from models.inputs.audio import LogMel
from models.inputs.tokens import Tokenizer
from models.layers.audio_overlap import OVERLAP_UNITS
from tests.training.batches import Predicted, predict
from tests.training.served import Served, serve
from tests.training.test_served_rows import REFERENCE, make_timeline
from tests.worker.loop.engines import TINY, loaded
from training.mind import records
from training.mind.batches import collate
from training.mind.device_sound import degrade_all, unit_mels
from training.mind.forward import Passes
from training.mind.records import EncoderSegment, Record, make_record, sound_segments
from training.timelines.layout import RowLayout
from training.timelines.timeline import FORCED_UNITS, Timeline
from training.timelines.windows import TimelinePart, TrainingWindow, split_parts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


@pytest.fixture(scope="module")
def timeline(tokenizer: Tokenizer) -> Timeline:
    made = make_timeline(tokenizer)
    return replace(made, sound=in_16_bits(made.sound))


@pytest.fixture(scope="module")
def served(timeline: Timeline) -> Served:
    return serve(timeline, in_16_bits(REFERENCE))


@pytest.fixture(scope="module")
def record(timeline: Timeline, tokenizer: Tokenizer) -> Record:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "FRAMES_OF_A_VIEW", 1)  # serving sees each frame
        return made(timeline, tokenizer, TimelinePart(0, 0, len(timeline.units)), REFERENCE)


def in_16_bits(samples: np.ndarray) -> np.ndarray:
    """Samples as records keep them: in silence the log-mel shows the difference."""
    return (records.as_levels(samples) / 32_768).astype(np.float32)


def made(timeline: Timeline, tokenizer: Tokenizer, part: TimelinePart, clip: np.ndarray | None = None) -> Record:
    return make_record("talk", timeline, part, RowLayout(tokenizer), loaded()[0].config, clip=clip)


def test_logits_equal_those_of_serving(timeline: Timeline, record: Record, served: Served) -> None:
    got = predict(loaded()[0], [record])
    decisions = got.logits[got.batch.is_decision]
    expected = torch.stack(served.logits[FORCED_UNITS:])
    assert decisions.shape == expected.shape
    for unit, (one, other) in enumerate(zip(decisions, expected, strict=True), FORCED_UNITS):
        worst = float((one - other).abs().max())
        assert worst < 1e-3, f"unit {unit}: expected the logits of serving, got a difference of {worst:.5f}"
    targets = got.batch.targets[got.batch.is_decision].tolist()
    assert targets == [unit.tokens[0] for unit in timeline.units[FORCED_UNITS:]]


def test_decisions_about_a_new_picture_are_marked(timeline: Timeline, tokenizer: Tokenizer) -> None:
    record = made(timeline, tokenizer, TimelinePart(0, 0, len(timeline.units)))
    batch = collate([record])
    shown, expected = None, []
    for number, unit in enumerate(timeline.units):
        look = None if unit.picture is None else (unit.picture.shown, unit.picture.look, unit.picture.at)
        is_new, shown = look is not None and look != shown, look or shown
        if not unit.is_forced:
            expected.append((number, is_new))
    got = batch.is_new_picture[batch.is_decision].tolist()
    assert got == [is_new for _, is_new in expected], f"expected {expected}, got {got}"
    assert any(got) and not all(got) and not batch.is_new_picture[~batch.is_decision].any()


def test_a_batch_gives_the_logits_of_its_members(timeline: Timeline, tokenizer: Tokenizer, record: Record) -> None:
    model = loaded()[0]
    short = made(timeline, tokenizer, TimelinePart(0, 0, 5))
    alone = [predict(model, [one]).logits for one in (short, record)]
    together = predict(model, [short, record])
    assert torch.allclose(together.logits, torch.cat(alone), atol=1e-3)
    assert together.batch.owners.tolist() == [0] * len(alone[0]) + [1] * len(alone[1])


def test_every_part_learns_but_those_of_speech(record: Record) -> None:
    model = copy.deepcopy(loaded()[0]).requires_grad_(True)
    got: Predicted = predict(model, [record], grad=True)
    torch.nn.functional.cross_entropy(got.logits, got.batch.targets).backward()
    without = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert {name.split(".")[0] for name in without} == {"tts"}, f"expected no gradient in tts only, got {without}"
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters() if weight.grad is not None)


def test_the_encoder_restarts_as_in_serving() -> None:
    segments = sound_segments(60, 1500)
    assert segments == [EncoderSegment(0, 0, 29), EncoderSegment(19, 29, 48), EncoderSegment(38, 48, 60)]
    assert all(one.first - one.context in (0, OVERLAP_UNITS) for one in segments)


def test_later_parts_hear_what_came_before(timeline: Timeline, tokenizer: Tokenizer) -> None:
    layout, window = RowLayout(tokenizer), TrainingWindow(mode="context", max_units=4, slack=2)
    parts = list(split_parts(timeline.units, layout, window))
    assert len(parts) > 2
    last = made(timeline, tokenizer, parts[-1])
    assert last.segments.tolist() == [[0, 0, 29], [19, 29, 32]], "expected the encoder to hear what came before"
    silent = replace(last, wave=np.zeros_like(last.wave))
    heard, unheard = (predict(loaded()[0], [one]).logits for one in (last, silent))
    assert torch.isfinite(heard).all() and not torch.allclose(heard, unheard, atol=1e-2)


def test_degraded_sound_keeps_its_speech() -> None:
    generator = torch.Generator().manual_seed(0)
    seconds = torch.arange(48_000) / 16_000
    tone = 0.2 * torch.sin(2 * torch.pi * 1000 * seconds) * (seconds < 1.5)
    heard = degrade_all(tone.repeat(24, 1), generator)
    loud, quiet = heard[:, :20_000].std(1), heard[:, 30_000:].std(1)
    assert heard.abs().max() <= 1 and (loud > quiet).all() and (quiet > 0).all()
    assert float(loud.max() / loud.min()) > 3, "expected levels that differ"
    assert unit_mels(LogMel(), heard[:2]).shape == (2, 3, 80, 104)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_one_program_serves_all_numbers_of_rows(dropout: float) -> None:
    model = loaded()[0]
    counter = CompileCounter()
    passes = Passes.compiled(dropout, counter)
    width, bins = model.config.hidden_size, 80
    # Sizes that equal each other and those of the model, in the first call above all.
    for n, length in ((2, width), (width, 2), (3, 64)):
        passes.decoder(model.llm.model, torch.randn(n, length, width))
    assert counter.frame_count == 1, f"decoder: expected 1 program, got {counter.frame_count}"
    for n, units in ((bins, 4), (4, 4), (2, 8)):
        first = torch.zeros(n, units, dtype=torch.int64)
        passes.audio(model, torch.randn(n, units, bins, 104), first, first + 104)
    assert counter.frame_count == 2, f"audio encoder: expected 1 program, got {counter.frame_count - 1}"
