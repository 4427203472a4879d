"""Training of the speech model: replies get the target voice's speech tokens, and only `tts` changes."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.worker.loop.engines import TINY, loaded
from training.mind.examples import Examples
from training.mind.speak import SpeechTrainer, SpokenExamples, TargetSpeech, reply_units
from training.mind.train import MindPlan
from training.timelines.speech import noise_bursts
from training.timelines.windows import TrainingWindow


def tones(parts: Sequence[str]) -> list[int]:
    """A stand-in for speech tokens: one for each character."""
    return [ord(character) for part in parts for character in part]


@pytest.fixture(scope="module")
def examples() -> Examples:
    return Examples(TINY, {"talk": 1.0}, 60.0, TrainingWindow(mode="basic", high=100_000, low=100_000))


def test_each_reply_has_its_speech(examples: Examples) -> None:
    special, n_cut = examples.tokenizer.special, 0
    for index in range(6):
        drawn = examples.scene("talk", index, random.Random(index))
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
    example, spoken = SpokenExamples(examples, tones)[3]
    assert spoken
    for rows in spoken:
        text = [(value, place) for value, place in zip(rows.values, rows.places, strict=True) if place >= 0]
        assert [example.rows.ids[place] for _, place in text] == [value for value, _ in text]
        assert rows.targets[-1] == loaded()[0].config.tts_config.speech_eos_id


def test_parts_take_whole_seconds() -> None:
    speech = TargetSpeech(TINY / "assets" / "token2wav", noise_bursts)
    assert len(speech(["One,", "two,", "three."])) == 75
    text = "I like quiet piano music."
    assert len(speech([text])) == pytest.approx(25 * len(noise_bursts(text)) / 16_000, abs=1)


def test_only_the_speech_model_changes(tmp_path: Path) -> None:
    plan = MindPlan(
        start=TINY,
        work=tmp_path,
        device=torch.device("cpu"),
        steps=1,
        batch=1,
        length_s=8.0,
        tasks=(("echo", 1.0),),
        keeps_weights=True,
        rate=0.1,
    )
    trainer = SpeechTrainer(plan, tones)
    with pytest.raises(ValueError, match="expected the"):
        trainer.run()  # the embedded checkpoint is not of the talker's size: nothing is exported
    before, after = loaded()[0].state_dict(), trainer.model.state_dict()
    changed = {name.split(".")[0] for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed == {"tts"}
    assert (tmp_path / "speech.jsonl").exists() and (tmp_path / "speech.pt").exists()
