"""Sentences, the training loop and the export: repeatable, continued from a checkpoint, loaded by the strict loader."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.token2wav.load.parts import load_token2wav
from models.token2wav.settings import (
    CampPlusConfig,
    DiTConfig,
    EncoderConfig,
    FlowConfig,
    HiftConfig,
    S3TokenizerConfig,
)
from training.edits import edit_distance
from training.export import write_vocoder
from training.loop import OutOfTimeError, RunPlan, Trainer, WeightGroup, read_weights, weights_file
from training.run import ATTEMPTS, StageProcess
from training.speech.corpus import NO_PHONE, PHONES, frame_phones
from training.speech.generate import plan, texts_of
from training.speech.sentences import in_words, sentence
from training.tokenizer import silence_digits, tokens_of
from training.utterances import batches
from training.weights import derive, new_flow, new_hift, new_speaker_encoder, new_tokenizer


def test_sentences_repeat_and_differ() -> None:
    texts = [sentence(1, number) for number in range(200)]
    assert texts == [sentence(1, number) for number in range(200)]
    assert len(set(texts)) > 150
    assert not any("{" in text or "_" in text for text in texts)
    assert in_words(740) == "seven hundred forty"
    assert in_words(13) == "thirteen"


def test_held_out_sentences_are_the_same_for_all_voices_and_first_in_the_plan() -> None:
    shards = plan(2.0)
    voices = {voice for voice, _ in shards}
    assert [number for _, number in shards[: len(voices)]] == [0] * len(voices)
    held_out, trained = ({tuple(texts_of(voice, number)) for voice in voices} for number in (0, 1))
    assert (len(held_out), len(trained)) == (1, len(voices))


def test_phones_of_frames() -> None:
    got = frame_phones(np.array(["pau", "aa"]), np.array([0.045, 0.1], np.float32), 6)
    assert [PHONES[phone] for phone in got] == ["pau", "pau", "aa", "aa", "aa", "aa"]
    assert (frame_phones(np.array([]), np.array([]), 3) == NO_PHONE).all()


def test_edit_distance_and_silence() -> None:
    assert edit_distance([1, 2, 3], [1, 3, 4]) == 2
    digits = silence_digits(torch.device("cpu"))
    assert int(((digits + 1) * 3 ** torch.arange(8)).sum()) == 4218


def trained(folder: Path, steps: int) -> Trainer:
    """A line fitted to noise-free points, `steps` steps further than the checkpoint in the folder."""
    torch.manual_seed(0)
    line = nn.Linear(1, 1)
    run = RunPlan(folder, torch.device("cpu"), until=time.time() + 60, weights=folder, max_steps=steps, log_every=10)
    trainer = Trainer(run, {"line": line}, {"all": WeightGroup(list(line.parameters()), 0.05)}, averaged=("line",))
    x = torch.linspace(-1, 1, 16)[:, None]

    def step(phase: str) -> dict[str, Tensor]:
        loss = (line(x) - (3 * x + 1)).square().mean()
        trainer.descend("all", loss)
        return {"loss": loss.detach()}

    trainer.run(step, lambda progress: "all")
    return trainer


def test_training_continues_from_its_checkpoint(tmp_path: Path) -> None:
    first = trained(tmp_path, 100)
    again = trained(tmp_path, 100)
    assert (first.step_number, again.step_number) == (100, 200)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["setup"] for row in log if "setup" in row] == ["first weights"] * 2
    rows = [row for row in log if "step" in row]
    assert [row["step"] for row in rows] == list(range(10, 201, 10))
    assert rows[-1]["loss"] < rows[9]["loss"] < rows[0]["loss"]
    stored = read_weights(weights_file(tmp_path, "line"))
    assert torch.equal(stored["weight"], again.averaged_weights("line")["weight"].half().float())


def test_a_run_whose_setup_took_all_its_time_fails(tmp_path: Path) -> None:
    line = nn.Linear(1, 1)
    run = RunPlan(tmp_path, torch.device("cpu"), until=time.time() - 1)
    trainer = Trainer(run, {"line": line}, {"all": WeightGroup(list(line.parameters()), 0.05)}, averaged=("line",))
    with pytest.raises(OutOfTimeError):
        trainer.run(lambda phase: {}, lambda progress: "all")
    assert not trainer.checkpoint.exists()


def test_output_of_a_failed_stage_is_in_its_log(tmp_path: Path) -> None:
    stage = StageProcess("flow", ["--corpus", str(tmp_path), "--work", str(tmp_path)], tmp_path, time.monotonic() + 60)
    stage.attempts = ATTEMPTS - 1
    stage.start()
    assert stage.process is not None
    stage.process.wait(50)
    stage.poll()
    assert stage.state == "failed"
    row = json.loads((tmp_path / "flow" / "log.jsonl").read_text().splitlines()[-1])
    assert row["failure"] == "exit status 1"
    assert "expected shards of training.speech.generate, got none" in row["output"][-1], row


def test_speech_tokens_of_a_batch_are_those_of_each_utterance() -> None:
    tokenizer = new_tokenizer(S3TokenizerConfig(width=64, n_layers=1)).eval()
    derive(tokenizer)
    lengths = torch.tensor([30, 7, 26, 50, 25])
    log_mels = torch.randn(4 * int(lengths.sum()), 128, generator=torch.Generator().manual_seed(2))
    shapes = [(batch.length, len(batch.index)) for batch in batches(lengths, torch.device("cpu"))]
    assert shapes == [(25, 2), (50, 3)]
    got = tokens_of(tokenizer, log_mels, lengths).split(lengths.tolist())
    for one, frames in zip(got, log_mels.split((4 * lengths).tolist()), strict=True):
        with torch.no_grad():
            expected, _ = tokenizer(frames.T[None], torch.tensor([len(frames)]))
        assert torch.equal(one, expected[0])


@pytest.mark.parametrize("int8", [False, True])
def test_exported_folder_passes_the_strict_loader(tmp_path: Path, int8: bool) -> None:
    flow = new_flow(
        FlowConfig(
            speaker_dim=8,
            encoder=EncoderConfig(width=16, heads=2, inner=32, n_layers=1, n_up_layers=1),
            estimator=DiTConfig(width=16, heads=1, head_dim=16, depth=1, mlp_ratio=2.0),
        )
    )
    hift = new_hift(HiftConfig(base_channels=16, f0_channels=8))
    speaker = new_speaker_encoder(CampPlusConfig(embedding=8, growth=4, bottleneck=2, channels=8, front_channels=4))
    tokenizer = new_tokenizer(S3TokenizerConfig(width=64, n_layers=1))
    write_vocoder(tmp_path, flow, hift, speaker, tokenizer, int8=int8)
    parts = load_token2wav(tmp_path)
    pairs = (
        (flow, parts.flow, 2e-3),
        (hift, parts.hift, 2e-3),
        (speaker, parts.speaker_encoder, 1e-6),
        (tokenizer, parts.speech_tokenizer, 2e-3),
    )
    for trained_module, loaded, tolerance in pairs:
        expected = trained_module.state_dict()
        n_rounded = 0
        for name, got in loaded.state_dict().items():
            is_close = torch.allclose(got, expected[name], rtol=1e-3, atol=tolerance)
            n_rounded += not is_close
            # Half of 1/127 of a row's largest value.
            most = 0.005 * expected[name].abs().max() if int8 else 0.0
            assert is_close or (got - expected[name]).abs().max() < most, name
        assert not n_rounded or (int8 and loaded is not parts.speech_tokenizer)
