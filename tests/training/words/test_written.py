"""Words in place of sound: which rows are written, and that the language model reads them in place of sound."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.batches import SIZES, tiny_model
from tests.worker.loop.engines import TINY
from training import run_mind
from training.mind.examples import Examples
from training.mind.forward import embed_rows
from training.mind.learner import CURRICULUM, Learner, LearnPlan
from training.mind.pool import Pool
from training.mind.records import Record
from training.mind.words.heard import HeardWords, heard_words
from training.mind.words.written import WRITTEN, draw_part, draw_written, written_rows
from training.timelines.layout import NOTHING

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def examples() -> Examples:
    return Examples(TINY, seconds=14.0, lesson_s=7.0)


@pytest.fixture(scope="module")
def record(examples: Examples) -> Record:
    return next(one for i in range(20) if len((one := examples.record("talk", i)).words) > 1)


def learner(work: Path, examples: Examples, written: float) -> Learner:
    plan = LearnPlan(work, CPU, plan_seconds=1000, rows=128, task="talk", written=written)
    return Learner(tiny_model(), examples.tokenizer.special, plan)


def test_words_have_bounds_by_their_letters(examples: Examples) -> None:
    said = heard_words(examples.tokenizer.encode, "a hippopotamus", np.arange(5, 30), 2, 22)
    before, after = said.bounds[0], said.bounds[-1]
    n_first = len(examples.tokenizer.encode(" a"))
    assert (before, after) == (2, 22) and (np.diff(said.bounds) >= 0).all() and len(said.bounds) == len(said.tokens) + 1
    assert said.bounds[n_first] == 2 + round(20 * 2 / 15)


def test_bounds_lie_where_the_sound_is(examples: Examples, record: Record) -> None:
    for one in record.words:
        places = one.rows[one.bounds[0] : one.bounds[-1]]
        sources = record.sources[places]
        assert set(record.kinds[places]) == {1}
        # Ten rows of a segment's unit are a second of the wave, which begins at the segment's context.
        segment, row = divmod(int(sources[len(sources) // 2]), 640)
        at = int(record.segments[segment][0]) * 16_000 + row * 1600
        assert np.abs(record.wave[at : at + 1600]).max() > 100, "expected speech in the middle of the rows"
    chat = next(one for i in range(20) if (one := examples.record("chat", i)).words)
    bounds = chat.words[0].bounds
    loud = np.flatnonzero(np.abs(chat.clip) > 100) / 1600
    assert abs(bounds[0] - loud[0]) <= 1.5 and abs(bounds[-1] - loud[-1]) <= 1.5


def test_a_part_of_an_utterance_is_written() -> None:
    said = HeardWords(
        np.arange(10, 20, dtype=np.int32), np.array([7, 8, 9], np.int16), np.array([1, 3, 4, 8], np.int16)
    )
    assert list(written_rows(said, range(3))) == [
        (11, NOTHING), (12, 7), (13, 8), (14, NOTHING), (15, NOTHING), (16, NOTHING), (17, 9),
    ]  # fmt: skip
    assert list(written_rows(said, range(1, 2))) == [(13, 8)]
    crowded = replace(said, bounds=np.array([1, 3, 3, 8], np.int16))
    assert [row for row, token in written_rows(crowded, range(3)) if token != NOTHING] == [12, 14, 17]
    assert not list(written_rows(crowded, range(1, 3))), "expected sound where a token of a part has no row"
    assert list(written_rows(crowded, range(1)))
    assert not list(written_rows(replace(said, bounds=np.array([1, 2, 2, 3], np.int16)), range(3)))
    rng = random.Random(0)
    parts = {draw_part(3, rng) for _ in range(200)}
    assert parts == {range(3), range(1), range(2), range(1, 3), range(2, 3)}
    assert {draw_part(1, rng) for _ in range(20)} == {range(1)}


def test_a_share_of_utterances_is_written(examples: Examples, record: Record) -> None:
    rng = random.Random(0)
    assert draw_written([record] * 5, 4000, 0.0, rng) is None
    found = draw_written([record] * 200, 4000, 0.25, rng)
    assert found is not None
    records, n_utterances = found.places // 4000, 200 * len(record.words)
    assert 0 < len(records.unique()) < 200 and len(found.places.unique()) == len(found.places)
    all_rows = draw_written([replace(record, is_silent=True)] * 2, 4000, 0.0, rng)
    assert all_rows is not None
    spoken = [token for one in record.words for token in one.tokens.tolist()]
    got = all_rows.tokens[(all_rows.places < 4000) & (all_rows.tokens != NOTHING)]
    assert got.tolist() == spoken
    n_written = len(found.places) / len(all_rows.places) * 2 * len(record.words)
    assert 0.1 < n_written / n_utterances < 0.3, "expected a quarter of the utterances, some of them in part"


def test_written_rows_are_read_in_place_of_sound(tmp_path: Path, examples: Examples, record: Record) -> None:
    mind, pool = learner(tmp_path, examples, 1.0), Pool(SIZES, CPU)
    stored = pool.add([record])
    with torch.no_grad():
        batch, spoken = mind.inputs(pool, stored, degrades=False)
        _, inputs = mind.inputs(pool, stored, degrades=False, written=1.0)
        written = inputs.written
        assert spoken.written is None and written is not None
        rows = [embed_rows(mind.model, batch, one)[0].flatten(0, 1) for one in (spoken, inputs)]
        changed = torch.zeros(len(rows[0]), dtype=torch.bool)
        changed[written.places] = True
        assert torch.equal(rows[0][~changed], rows[1][~changed])
        is_token = written.tokens != NOTHING
        words = mind.model.llm.model.embed_tokens(written.tokens[is_token])
        assert torch.equal(rows[1][written.places[is_token]], words)
        assert not rows[1][written.places[~is_token]].any()


def test_only_training_writes(tmp_path: Path, examples: Examples, record: Record) -> None:
    pool = Pool(SIZES, CPU)
    stored, losses = pool.add([record]), []
    for written in (0.0, 1.0):
        mind = learner(tmp_path, examples, written)
        for grad in (False, True):
            mind.generator.manual_seed(0)
            with torch.set_grad_enabled(grad):
                losses.append(float(mind.loss(pool, stored)[0].detach()))
    assert losses[0] == losses[1] == losses[2] != losses[3]


def test_conversations_of_words_alone(tmp_path: Path, examples: Examples) -> None:
    made = examples.record(WRITTEN, 1)
    assert made.task == WRITTEN and made.is_silent and made.words and not made.wave.any()
    held_out = replace(examples, split="held_out").record(WRITTEN, 1)
    assert not np.array_equal(made.ids, held_out.ids)
    assert WRITTEN in CURRICULUM[0][1]
    for written, is_task in ((0.0, False), (0.2, True)):
        plan = LearnPlan(tmp_path, CPU, plan_seconds=1, written=written)
        assert (WRITTEN in Learner(tiny_model(), examples.tokenizer.special, plan).tasks) == is_task
    with pytest.raises(SystemExit):
        run_mind.main(["--work", str(tmp_path), "--out", str(tmp_path), "--task", WRITTEN, "--written", "0"])
