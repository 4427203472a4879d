"""The training pass over a conversation gives the logits that the unit engine computes, and has gradients."""

import copy
import json
import math
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from models.inputs.tokens import Tokenizer
from models.layers.audio_overlap import OVERLAP_UNITS
from tests.training.served import Served, serve
from tests.training.test_served_rows import REFERENCE, make_timeline
from tests.worker.loop.engines import TINY, loaded
from training.mind.examples import Examples, Task
from training.mind.forward import loss_of, predict
from training.mind.inputs import EncoderSegment, Example, make_example, sound_segments
from training.mind.train import WARMUP_STEPS, MindPlan, MindTrainer, rate_at
from training.timelines.layout import RowLayout
from training.timelines.timeline import FORCED_UNITS, Timeline
from training.timelines.windows import TimelinePart, TrainingWindow, split_parts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


@pytest.fixture(scope="module")
def timeline(tokenizer: Tokenizer) -> Timeline:
    return make_timeline(tokenizer)


@pytest.fixture(scope="module")
def served(timeline: Timeline) -> Served:
    return serve(timeline, REFERENCE)


@pytest.fixture(scope="module")
def example(timeline: Timeline, tokenizer: Tokenizer) -> Example:
    whole = TimelinePart(0, 0, len(timeline.units))
    return make_example(
        timeline, whole, RowLayout(tokenizer), loaded()[0].config, reference=torch.from_numpy(REFERENCE)
    )


def test_logits_equal_those_of_serving(timeline: Timeline, example: Example, served: Served) -> None:
    got = predict(loaded()[0], [example])
    decisions = got.logits[got.is_decision]
    expected = torch.stack(served.logits[FORCED_UNITS:])
    assert decisions.shape == expected.shape
    for unit, (one, other) in enumerate(zip(decisions, expected, strict=True), FORCED_UNITS):
        worst = float((one - other).abs().max())
        assert worst < 1e-3, f"unit {unit}: expected the logits of serving, got a difference of {worst:.5f}"
    assert got.targets[got.is_decision].tolist() == [unit.tokens[0] for unit in timeline.units[FORCED_UNITS:]]


def test_a_batch_gives_the_logits_of_its_members(timeline: Timeline, tokenizer: Tokenizer, example: Example) -> None:
    model = loaded()[0]
    short = make_example(timeline, TimelinePart(0, 0, 5), RowLayout(tokenizer), model.config)
    alone = [predict(model, [one]).logits for one in (short, example)]
    together = predict(model, [short, example]).logits
    assert torch.allclose(together, torch.cat(alone), atol=1e-3)


def test_every_part_learns_but_those_of_speech(example: Example, tokenizer: Tokenizer) -> None:
    model = copy.deepcopy(loaded()[0]).requires_grad_(True)
    loss = loss_of(predict(model, [example]), tokenizer.special.listen, quiet_weight=0.2)
    loss.backward()
    without = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert {name.split(".")[0] for name in without} == {"tts"}, f"expected no gradient in tts only, got {without}"
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters() if weight.grad is not None)


def test_a_few_steps_lower_the_loss(timeline: Timeline, tokenizer: Tokenizer) -> None:
    example = make_example(timeline, TimelinePart(0, 0, 12), RowLayout(tokenizer), loaded()[0].config)
    model = copy.deepcopy(loaded()[0]).requires_grad_(True)
    weights = [weight for name, weight in model.named_parameters() if not name.startswith("tts.")]
    losses = []
    for _ in range(4):
        loss = loss_of(predict(model, [example]), tokenizer.special.listen, quiet_weight=0.2)
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for weight, slope in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight -= 2e-3 * slope.sign()
    assert losses[-1] < 0.8 * losses[0], f"expected the loss to fall, got {losses}"


def test_the_encoder_restarts_as_in_serving() -> None:
    n = 60
    segments = sound_segments([2, *[0] * (n - 1)], [104] * n, 1500)
    assert segments == [EncoderSegment(0, 0, 29), EncoderSegment(19, 29, 48), EncoderSegment(38, 48, 60)]
    assert all(one.first - one.context in (0, OVERLAP_UNITS) for one in segments)


def test_later_parts_hear_what_came_before(timeline: Timeline, tokenizer: Tokenizer) -> None:
    layout, config = RowLayout(tokenizer), loaded()[0].config
    window = TrainingWindow(mode="context", max_units=4, slack=2)
    parts = list(split_parts(timeline.units, layout, window))
    assert len(parts) > 2
    last = make_example(timeline, parts[-1], layout, config)
    assert len(last.taken) == parts[-1].end - parts[-1].first
    assert last.taken[0] == (0, parts[-1].first), "expected the encoder to have heard the whole conversation"
    assert np.isfinite(predict(loaded()[0], [last]).logits.numpy()).all()


def test_a_stopped_run_continues_where_it_ended(tmp_path: Path) -> None:
    def plan(steps: int, seconds: float = math.inf) -> MindPlan:
        return MindPlan(
            start=TINY,
            work=tmp_path,
            device=torch.device("cpu"),
            steps=steps,
            seconds=seconds,
            batch=1,
            length_s=4.0,
            tasks=(("echo", 1.0),),
            keeps_weights=True,
            log_every=1,
        )

    first = MindTrainer(plan(3, seconds=0))
    with pytest.raises(ValueError, match="expected the"):
        first.run()  # the embedded checkpoint is not of the talker's size: nothing is exported
    again = MindTrainer(plan(3))
    assert again.step == first.step == 1
    assert all(torch.equal(weight, first.weights[name]) for name, weight in again.weights.items())
    log = [json.loads(line) for line in (tmp_path / "mind.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1] and log[0]["loss"] > 0


def test_sequences_are_the_same_in_every_run() -> None:
    def made(task: Task) -> Example:
        return Examples(TINY, {task: 1.0}, 8.0, TrainingWindow(mode="context"))[5]

    for task in get_args(Task):
        one, other = made(task), made(task)
        assert one.rows.ids.tolist() == other.rows.ids.tolist()
        assert torch.equal(one.mel, other.mel)
        assert (one.pictures is not None) >= (task == "captions")


def test_learning_rate_rises_and_falls() -> None:
    rates = [rate_at(step, 2000) for step in range(2000)]
    assert rates[0] < 0.01 and max(rates) == 1.0 and rates[-1] < 0.06
    assert rates.index(1.0) == WARMUP_STEPS - 1
