"""Training of the speech model: replies get the target voice's speech tokens, and only `tts` changes."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.batches import SIZES, tiny_model
from tests.worker.loop.engines import TINY, loaded
from training import run_mind
from training.mind.examples import Examples, Source
from training.mind.learner import Learner, LearnPlan, fresh_shares
from training.mind.measure import measure_loss
from training.mind.moments import save_small
from training.mind.pool import MAX_USES, Pool
from training.mind.speak import SHARES, VOCODER, SpeechLearner, TargetSpeech, reply_units
from training.mind.stock import sentences
from training.timelines.lessons import ENDS
from training.timelines.speech import Samples, noise_bursts
from training.timelines.windows import TrainingWindow


def bursts(texts: list[str]) -> list[Samples]:
    return [noise_bursts(text) for text in texts]


class Tones(TargetSpeech):
    """A stand-in for the speech tokenizer: a token for each 40 ms."""

    def _heard(self, waves: list[Samples]) -> list[int]:
        return [i % 50 for wave in waves for i in range(len(wave) // 640)]


@pytest.fixture(scope="module")
def examples() -> Examples:
    end = loaded()[0].config.tts_config.speech_eos_id
    window = TrainingWindow(mode="basic", high=100_000, low=100_000)
    return Examples(TINY, seconds=60.0, window=window, speaker=Tones(VOCODER, end, bursts))


def test_each_reply_has_its_speech(examples: Examples) -> None:
    special, n_cut = examples.tokenizer.special, 0
    for index in range(6):
        drawn = examples.scene("talk", index, random.Random(index), Source(noise_bursts))
        script = [said for said in drawn.timeline.script if said.by == "model"]
        for said in script:
            units = reply_units(drawn.timeline, said, special.turn_eos)
            tokens = [drawn.timeline.units[unit].tokens for unit in units]
            assert tokens[0][0] == special.speak
            assert all(special.turn_eos not in one for one in tokens[:-1])
            assert (tokens[-1] == (special.turn_eos, special.listen)) == said.is_cut
            n_cut += said.is_cut
    assert n_cut > 0


def test_speech_lies_in_the_context_of_its_reply(examples: Examples) -> None:
    record = examples.record("talk", 3)
    assert record.replies
    for reply in record.replies:
        is_text = reply.places >= 0
        assert record.ids[reply.places[is_text]].tolist() == reply.values[is_text].tolist()
        assert reply.targets[-1] == loaded()[0].config.tts_config.speech_eos_id


def test_parts_take_whole_seconds() -> None:
    speech = TargetSpeech(VOCODER, end=0, speak=bursts)
    text = "I like quiet piano music."
    counted, said, again = speech.tokens([("One,", "two,", "three."), (text,), (text,)])
    assert len(counted) == 75 and said is again
    assert len(said) == pytest.approx(25 * len(noise_bursts(text)) / 16_000, abs=1)


def test_only_the_speech_model_changes(tmp_path: Path, examples: Examples) -> None:
    model = tiny_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    plan = LearnPlan(tmp_path, torch.device("cpu"), plan_seconds=60, rows=64, rate=0.1)
    learner = SpeechLearner(model, examples.tokenizer.special, plan)
    pool = Pool(SIZES, plan.device)
    stored = pool.add([replace(examples, lesson_s=8.0).record("echo", 0)])
    learner.step(pool)
    assert np.isfinite(learner.take_log()["echo_loss"])
    assert measure_loss(learner, pool, stored).keys() == {"loss", "tokens", "ends"}
    changed = {
        name.split(".")[0] for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])
    }
    assert changed == {"tts"}


def test_records_that_were_used_too_often_are_left_out() -> None:
    pool = Pool(SIZES, torch.device("cpu"))
    assert fresh_shares(SHARES, pool) == {}
    pool.n_added["talk"] = pool.n_added["echo"] = 2
    assert fresh_shares(SHARES, pool) == SHARES
    pool.n_drawn["talk"] = 2 * MAX_USES["talk"]
    assert fresh_shares(SHARES, pool) == {"echo": SHARES["echo"]}
    pool.n_drawn["echo"] = 2 * MAX_USES["echo"]
    assert fresh_shares(SHARES, pool) == SHARES, "expected all: none is fresh"


def test_speech_follows_a_mind_that_is_trained_at_the_same_time(tmp_path: Path, examples: Examples) -> None:
    plan = LearnPlan(tmp_path, torch.device("cpu"), plan_seconds=60)
    special = examples.tokenizer.special
    mind, speech = (kind(tiny_model(), special, plan) for kind in (Learner, SpeechLearner))
    with torch.no_grad():
        mind.model.llm.model.norm.weight.fill_(0.5)
        mind.model.tts.model.norm.weight.fill_(0.25)
    save_small(tmp_path, "mind", mind.weights, mind.optimizer, {"step": 7})
    assert speech.follow(tmp_path) == 7
    assert bool((speech.model.llm.model.norm.weight == 0.5).all()), "expected the mind's weights"
    assert not bool((speech.model.tts.model.norm.weight == 0.25).any()), "expected the speech model as it was"
    with pytest.raises(ValueError, match="expected a training of speech"):
        mind.follow(tmp_path)


def test_sentences_are_spoken_before_a_training(tmp_path: Path, examples: Examples) -> None:
    file, end = tmp_path / "spoken.npz", loaded()[0].config.tts_config.speech_eos_id
    speech = Tones(VOCODER, end, bursts)
    sentences.extend(speech, 0, file, 0)
    assert len(speech.kept) == sentences.AT_ONCE and all(text[-1] in ENDS for (text,) in speech.kept)
    more = Tones(VOCODER, end, bursts, kept=sentences.load_spoken([file]))
    assert more.kept == speech.kept
    sentences.extend(more, 0, file, 0)
    kept = sentences.load_spoken([file])
    assert len(kept) > 1.5 * sentences.AT_ONCE, "expected other sentences in the next call"

    def refuse(texts: list[str]) -> list[Samples]:
        raise AssertionError(f"expected no call of an engine, got {texts}")

    quiet = replace(
        examples, lesson_s=14.0, speaker=Tones(VOCODER, end, refuse, kept), sentences=tuple(text for (text,) in kept)
    )
    records = [quiet.record("echo", i) for i in range(8)]
    assert sum(len(one.replies) for one in records) > 5 and all(one.is_silent for one in records)


def test_only_a_training_of_speech_takes_its_files(tmp_path: Path) -> None:
    for option in ("--mind", "--spoken"):
        with pytest.raises(SystemExit):
            run_mind.main(["--work", str(tmp_path), "--out", str(tmp_path), option, str(tmp_path)])
