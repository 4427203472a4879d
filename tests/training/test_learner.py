"""Steps of the mind's training: pools, batches, schedules, and states that continue where they ended."""

import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.batches import SIZES, tiny_model
from tests.worker.loop.engines import TINY
from training.mind.device_pictures import SHIFT, degrade_pictures
from training.mind.examples import Examples, Task
from training.mind.learner import (
    CURRICULUM,
    RE_WARMUP_STEPS,
    TASKS_OF_A_STEP,
    Learner,
    LearnPlan,
    rate_at,
    shares_at,
)
from training.mind.measure import measure
from training.mind.moments import average_weights, pack_moments, unpack_moments
from training.mind.pool import MAX_USES, MIN_BATCH, Pool, PoolSizes, Ring
from training.mind.produce import make_shard
from training.mind.records import Record, read_records, write_records

CPU = torch.device("cpu")
TASKS: tuple[Task, ...] = ("text", "echo", "captions", "talk", "written", "chat")


@pytest.fixture(scope="module")
def examples() -> Examples:
    return Examples(TINY, seconds=8.0, lesson_s=7.0)


@pytest.fixture(scope="module")
def records(examples: Examples) -> list[Record]:
    return make_shard(examples, [(task, 1) for task in TASKS], 0, 0)


def learner(work: Path, examples: Examples, task: Task | None = "text", dropout: float = 0.0) -> Learner:
    plan = LearnPlan(work, CPU, plan_seconds=1000, rows=128, rate=3e-3, task=task, dropout=dropout)
    return Learner(tiny_model(), examples.tokenizer.special, plan)


def pool_of(records: list[Record]) -> Pool:
    pool = Pool(SIZES, CPU)
    pool.add(records)
    return pool


def test_records_are_the_same_in_every_run(examples: Examples, records: list[Record], tmp_path: Path) -> None:
    write_records(tmp_path / "a.shard", records)
    again = make_shard(replace(examples), [(task, 1) for task in TASKS], 0, 0)
    for one, kept, made in zip(records, read_records(tmp_path / "a.shard"), again, strict=True):
        assert one.task == kept.task == made.task
        for other in (kept, made):
            assert np.array_equal(one.ids, other.ids) and np.array_equal(one.wave, other.wave)
            assert np.array_equal(one.pictures, other.pictures)
    held_out = replace(examples, split="held_out").record("captions", 0)
    assert not np.array_equal(held_out.ids, records[2].ids), "expected other scenes"


def test_preparation_changes_no_weight(examples: Examples, records: list[Record], tmp_path: Path) -> None:
    mind, pool = learner(tmp_path, examples, None), pool_of(records)
    before = {name: weight.detach().clone() for name, weight in mind.weights.items()}
    mind.prepare(pool)
    changed = [name for name, weight in mind.weights.items() if not torch.equal(weight, before[name])]
    assert not changed, f"expected weights as before, got changes of {changed[:3]}"
    assert not mind.step_number and not mind.seconds and not any(one.grad is not None for one in mind.weights.values())


def test_steps_of_all_tasks_train_all_parts(examples: Examples, records: list[Record], tmp_path: Path) -> None:
    mind, pool = learner(tmp_path, examples, None), pool_of(records)
    before = {name: weight.detach().clone() for name, weight in mind.weights.items()}
    steps = 0
    while not {f"{task}_loss" for task in TASKS} <= mind._sums.keys():
        mind.step(pool)
        steps += 1
        assert steps < 20, f"expected steps of all tasks, got those of {sorted(mind._sums)}"
    same = {name for name, weight in mind.weights.items() if torch.equal(weight, before[name])}
    # Noise in place of speech has no phonemes.
    assert same == {"phones.weight", "phones.bias"}, f"expected all others to change, got the same {sorted(same)[:5]}"
    log = mind.take_log()
    assert (
        all(np.isfinite(log[f"{task}_loss"]) for task in TASKS) and log["drawn"] == MIN_BATCH * TASKS_OF_A_STEP * steps
    )
    assert 0 < log["captions_sight_errors"] < 1


def test_over_many_steps_each_task_has_its_share(examples: Examples, records: list[Record], tmp_path: Path) -> None:
    mind, pool = learner(tmp_path, examples, None), pool_of(records)
    rows, n_steps = Counter[str](), 200
    for _ in range(n_steps):
        drawn = mind._next_tasks(pool)
        assert len(drawn) == TASKS_OF_A_STEP
        rows.update(drawn)
    for task, share in shares_at(0.0).items():
        expected = share * n_steps * mind.plan.rows
        assert abs(rows[task] - expected) < 20 * mind.plan.rows * share, (task, expected, rows[task])


def test_records_that_are_used_often_wait_for_new_ones(
    examples: Examples, records: list[Record], tmp_path: Path
) -> None:
    mind, pool = learner(tmp_path, examples, None), pool_of(records)
    assert not Pool(SIZES, CPU).has("echo") and set(pool.uses) == set(TASKS)
    assert not mind._shares(empty := Pool(SIZES, CPU)) and empty.uses == {}
    while pool.is_fresh("echo"):
        assert "echo" in mind._shares(pool)
        pool.draw("echo", 1, random.Random(0))
    assert pool.uses["echo"] == pytest.approx(MAX_USES["echo"], abs=MIN_BATCH)
    assert set(mind._shares(pool)) == set(TASKS) - {"echo"}
    pool.add([one for one in records if one.task == "echo"])
    assert set(mind._shares(pool)) == set(TASKS)
    pool.n_drawn["talk"] = MAX_USES["talk"]
    assert MAX_USES["talk"] < MAX_USES["echo"] and not pool.is_fresh("talk")
    while any(map(pool.is_fresh, TASKS)):
        pool.draw(next(filter(pool.is_fresh, TASKS)), 1, random.Random(0))
    assert set(mind._shares(pool)) == set(TASKS), "expected used records rather than no step"


def test_rows_are_dropped_with_gradients_only(examples: Examples, records: list[Record], tmp_path: Path) -> None:
    mind, usual = (learner(tmp_path, examples, None, dropout=dropout) for dropout in (0.3, 0.0))
    pool = pool_of(records)
    drawn = pool.draw("talk", 1, random.Random(0))

    def loss(one: Learner, seed: int) -> float:
        torch.manual_seed(seed)
        one.generator.manual_seed(0)  # of the sound's degradation
        return float(one.loss(pool, drawn)[0].detach())

    assert loss(mind, 1) == loss(mind, 1) != loss(mind, 2)
    with torch.no_grad():
        assert loss(mind, 1) == loss(mind, 2) == loss(usual, 1), "expected nothing to be dropped in an evaluation"
    assert loss(usual, 1) == loss(usual, 2)


def test_training_layers_missing_in_a_file_are_zero(examples: Examples, records: list[Record], tmp_path: Path) -> None:
    mind = learner(tmp_path / "a", examples)
    mind.plan.work.mkdir()
    mind.step(pool_of(records))
    mind.save(tmp_path)
    file = tmp_path / "mind_weights.pt"
    weights = torch.load(file, weights_only=True)
    torch.save({name: one for name, one in weights.items() if not name.startswith("sights.")}, file)
    again = learner(tmp_path / "b", examples)
    again.restore(tmp_path)
    assert again.step_number == 1 and not again.weights["sights.weight"].any()
    torch.save({name: one for name, one in weights.items() if not name.startswith("llm.model.norm")}, file)
    with pytest.raises(ValueError, match=r"llm\.model\.norm"):
        learner(tmp_path / "c", examples).restore(tmp_path)


def test_a_step_that_is_not_finite_is_left_out(examples: Examples, records: list[Record], tmp_path: Path) -> None:
    mind = learner(tmp_path, examples)
    head = mind.weights["llm.lm_head.weight"]
    with torch.no_grad():
        kept, head[0, 0] = head[0, 0].clone(), float("nan")
    before = mind.weights["llm.model.norm.weight"].detach().clone()
    mind.step(pool_of(records))
    assert torch.equal(mind.weights["llm.model.norm.weight"], before)
    with pytest.raises(FloatingPointError, match="expected finite"):
        mind.save()
    with torch.no_grad():
        head[0, 0] = kept
    mind.save()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_run_continues_exactly(examples: Examples, records: list[Record], tmp_path: Path, dropout: float) -> None:
    pool = pool_of(records)
    straight, begun = (learner(tmp_path / name, examples, dropout=dropout) for name in ("straight", "begun"))
    for one in (straight, begun):
        one.plan.work.mkdir()
        one.step(pool)
        one.seconds = 7.0
    begun.save()
    again = learner(begun.plan.work, examples, dropout=dropout)
    assert again.restore(None).endswith("mind.pt")
    assert (again.step_number, again.seconds, again.n_drawn) == (1, 7.0, straight.n_drawn)
    again.first_step = 0  # no second rise of the rate, to compare
    for one in (straight, again):
        one.step(pool)
    differ = [name for name, one in again.weights.items() if not torch.equal(one, straight.weights[name])]
    assert not differ, f"expected the weights of a run without a stop, got others in {differ[:5]}"


def test_small_files_keep_weights_and_moments(examples: Examples, records: list[Record], tmp_path: Path) -> None:
    pool, mind = pool_of(records), learner(tmp_path / "a", examples)
    mind.plan.work.mkdir()
    for _ in range(3):
        mind.step(pool)
    mind.save(tmp_path)
    again = learner(tmp_path / "b", examples)
    assert again.restore(tmp_path) == str(tmp_path) and again.step_number == 3
    for name, weight in mind.weights.items():
        assert torch.allclose(again.weights[name], weight, rtol=2e-3, atol=1e-6), name
        states = [one.optimizer.state.get(one.weights[name]) for one in (mind, again)]
        if None in states:  # chats without sound and pictures do not train their encoders
            assert states == [None, None]
            continue
        second, kept = (state["exp_avg_sq"] for state in states if state)
        large = second > second.max() * 1e-9
        assert ((kept / second)[large] - 1).abs().max() < 0.06, name
    again.step(pool)
    assert np.isfinite(again.take_log()["text_loss"])
    (tmp_path / "mind_moments.pt").unlink()
    bare = learner(tmp_path / "c", examples)
    assert bare.restore(tmp_path) == str(tmp_path) and bare.step_number == 0
    assert torch.allclose(bare.weights["llm.lm_head.weight"], mind.weights["llm.lm_head.weight"], rtol=2e-3, atol=1e-6)


def test_the_rate_may_begin_anew(examples: Examples, tmp_path: Path) -> None:
    begun = learner(tmp_path, examples)
    begun.seconds = 600.0
    begun.save()
    rates = {}
    for restarts in (False, True):
        again = learner(tmp_path, examples)
        again.plan = replace(again.plan, restarts=restarts)
        again.restore(None)
        again.step_number += RE_WARMUP_STEPS
        first = again.rate
        again.seconds = 800.0
        rates[restarts] = (first, again.rate)
    assert rates[False] == tuple(3e-3 * rate_at(along, RE_WARMUP_STEPS) for along in (0.6, 0.8))
    assert rates[True] == pytest.approx([3e-3 * rate_at(along, RE_WARMUP_STEPS) for along in (0.0, 0.5)])
    again.schedule(1000.0)  # after 800 s, until another end
    again.seconds = 900.0
    assert again.rate == pytest.approx(3e-3 * rate_at(0.5, RE_WARMUP_STEPS))


def test_moments_of_eight_bits() -> None:
    second = 10 ** torch.linspace(-14, -2, 1000)
    kept = unpack_moments(*pack_moments(second))
    assert ((kept / second) - 1).abs()[second > 1e-13].max() < 0.06
    assert torch.equal(unpack_moments(*pack_moments(torch.zeros(3))) < 1e-30, torch.ones(3, dtype=torch.bool))


def test_figures_of_a_model_that_knows_the_answer(examples: Examples, records: list[Record], tmp_path: Path) -> None:
    chats = [one for one in records if one.task == "text"]
    pool, mind = pool_of(chats), learner(tmp_path, examples)
    for _ in range(40):
        mind.step(pool)
    stored = Pool(SIZES, CPU).add(chats)
    figures = measure(mind, pool_of(chats), stored, examples.tokenizer)
    assert figures["text_text"] == 1.0 and figures["text_answers"] == 1.0, figures
    assert measure(mind, pool_of(chats), stored, examples.tokenizer, until=time.monotonic() - 1) == {}


def test_a_ring_keeps_the_newest(records: list[Record]) -> None:
    ring = Ring(10, (), torch.int16, CPU)
    starts = [ring.add(torch.full((4,), i)) for i in range(4)]
    assert [ring.holds(start) for start in starts] == [False, False, True, True]
    assert ring.rows[starts[3] % 10 : starts[3] % 10 + 4].tolist() == [3] * 4
    with pytest.raises(ValueError, match="expected at most 10"):
        ring.add(torch.zeros(11))
    small = Pool(PoolSizes(samples=16_000 * 20, pictures=8, clip_samples=200_000), CPU)
    for _ in range(4):
        small.add([one for one in records if one.task in ("echo", "talk")])
    for _ in range(8):
        drawn = small.draw("talk", 1, random.Random(0))[0]
        sound = small.waves_of([drawn])[0]
        expected = torch.from_numpy(drawn.record.wave) / 32_768
        assert torch.equal(sound, expected), "expected the sound of the record, not of a newer one"


def test_pictures_are_moved_and_tinted() -> None:
    picture = torch.zeros(6, 448, 448, 3, dtype=torch.uint8)
    picture[:, 200:240, 100:180] = 200
    changed = degrade_pictures(picture, torch.Generator().manual_seed(0))
    assert changed.dtype == torch.uint8 and changed.shape == picture.shape
    for one in changed:
        rows, columns, _ = torch.nonzero(one > 120, as_tuple=True)
        assert abs(int(rows.min()) - 200) <= SHIFT and abs(int(columns.min()) - 100) <= SHIFT
    assert len({int(one.max()) for one in changed}) > 1


def test_schedules() -> None:
    steps = 10 * RE_WARMUP_STEPS
    rates = [rate_at(step / 5000, step) for step in range(steps)]
    assert rates[0] < 0.02 and rates.index(max(rates)) == RE_WARMUP_STEPS - 1
    assert rate_at(1.0, steps) < 0.04 and rate_at(0.5, 0) < 0.01 < 0.4 < rate_at(0.5, steps)
    for progress in (0.0, 0.1, 0.5, 1.0, 1.5):
        assert sum(shares_at(progress).values()) == pytest.approx(1)
    assert shares_at(2.0) == CURRICULUM[-1][1]


def test_averaged_weights_are_the_mean_of_those_that_are_there(tmp_path: Path) -> None:
    added = {"phones.c": torch.ones(1)}, {"watching.b": torch.full((2,), 5.0)}
    for number, (weight, more) in enumerate(zip((1.0, 3.0), added, strict=True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        torch.save({"llm.a": torch.full((3,), weight), **more}, folder / "mind_weights.pt")
        torch.save({"counters": {"step": number}}, folder / "mind_moments.pt")
    states, out = [tmp_path / "0", tmp_path / "1"], tmp_path / "out"
    average_weights(states, (0.25, 0.75), out)
    got = {name: one.tolist() for name, one in torch.load(out / "mind_weights.pt", weights_only=True).items()}
    assert got == {"llm.a": [2.5] * 3, "phones.c": [1.0], "watching.b": [5.0] * 2}
    assert torch.load(out / "mind_moments.pt", weights_only=True)["counters"]["step"] == 1
    for shares in ((0.5, 0.6), (1.0,), (0.0, 1.0)):
        with pytest.raises(ValueError, match="expected 2 above zero with a sum of one"):
            average_weights(states, shares, out)
    with pytest.raises(ValueError, match="expected another folder"):
        average_weights(states, (0.5, 0.5), states[0])
    torch.save({"llm.a": torch.zeros(4)}, states[0] / "mind_weights.pt")
    with pytest.raises(ValueError, match=r"llm\.a: expected weights of one model"):
        average_weights(states, (0.5, 0.5), out)
