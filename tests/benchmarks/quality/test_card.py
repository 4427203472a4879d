"""A precision is compared with another one in the same context; a precision is equal to itself."""

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.quality.__main__ import given, main, transcriber_of
from benchmarks.quality.card import Spread, compare, divergence, edit_distance, word_errors, words
from benchmarks.quality.quality_run import QualityRun, VoicedTurn, record
from models.errors import SettingsError
from tests.worker.loop.engines import TINY, make_config, short_speech, voice
from worker.config.session import SessionConfig, WindowConfig
from worker.start.warmup import extract

SESSION = SessionConfig(force_listen_count=0, seed=3, listen_prob_scale=0.01, window=WindowConfig(mode="off"))
N_UNITS = 3


def recorded(root: Path, forced: QualityRun | None = None, **settings: str) -> QualityRun:
    config = make_config(1, 512, session=SESSION).model_copy(update=settings)
    assert config.model_path == TINY
    with short_speech():
        return record(config, extract(root / "assets" / "warmup.mp4", N_UNITS), voice(0), forced=forced)


@pytest.fixture(scope="module")
def reference(root: Path) -> QualityRun:
    made = recorded(root)
    assert made.calls and made.turns, "expected a conversation in which the model speaks"
    return made


def test_a_precision_is_equal_to_itself(reference: QualityRun) -> None:
    card = compare(reference, reference)
    assert (card.n_units, card.decisions, card.text_ids, card.speech_ids) == (N_UNITS, 1, 1, 1), card
    assert (card.text_kl.max, card.speech_kl.max, card.mel, card.mel_relative, card.wer) == (0, 0, 0, 0, None), card
    assert card.text_kl.n > 0 and card.speech_kl.n == sum(len(call.speech_tokens) for call in reference.calls)


# fp8 has layers of int8 too.
@pytest.mark.parametrize("settings", [{"weights": "fp8"}, {"weights": "int4"}, {"dtype": "bfloat16"}], ids=str)
def test_a_lower_precision_is_close_in_the_same_context(
    root: Path, reference: QualityRun, settings: dict[str, str]
) -> None:
    tested = recorded(root, reference, **settings)
    card = compare(reference, tested)
    assert tested.tokens == reference.tokens, "the reference's tokens are fed"
    most = 0.1 if settings.get("weights") == "int4" else 0.05
    assert 0 < card.text_kl.mean < most and 0 < card.speech_kl.mean < 0.05, card
    assert min(card.decisions, card.text_ids, card.speech_ids) > 0.5, card
    assert (card.mel > 0) is ("dtype" in settings) and card.mel < 0.1, f"weights leave the flow as it is: {card}"
    text = "\n".join(card.lines())
    assert f"decisions agree ({N_UNITS} units)" in text and "KL of speech tokens" in text, text
    assert json.loads(json.dumps(card.to_json()))["n_units"] == N_UNITS


def test_the_speech_models_own_tokens_are_likely_under_its_logits(reference: QualityRun) -> None:
    """Each call's logits belong to its tokens: a shift by one would make them as unlikely as any others."""
    taken, others = [], []
    for call, logits in zip(reference.calls, reference.speech_logits, strict=True):
        chosen = logits.log_softmax(-1)
        taken += [float(row[token]) for row, token in zip(chosen, call.speech_tokens, strict=True)]
        others += [float(row.mean()) for row in chosen]
    assert sum(taken) / len(taken) > sum(others) / len(others), (taken, others)


def test_divergence_and_spread() -> None:
    one = torch.tensor([0.0, 0.0])
    assert divergence(one, one) == 0
    assert divergence(one, torch.tensor([0.0, 1.0])) == pytest.approx(0.1201, abs=1e-4)
    assert Spread.of([]) == Spread(None, None, None, 0)
    assert Spread.of([float(n) for n in range(1, 101)]) == Spread(50.5, 95.0, 100.0, 100)


def test_word_errors_of_what_a_command_hears() -> None:
    assert words("Hello, World! 你好 it's") == ["hello", "world", "你", "好", "it", "s"]
    assert edit_distance(["a", "b", "c"], ["a", "c", "d"]) == 2 and edit_distance([], ["a"]) == 1
    turns = [VoicedTurn(np.zeros(2400, np.float32), "one two three four")]
    says = "import sys, wave; print('one', wave.open(sys.argv[1]).getnframes() // 2400, 'three four five')"
    assert word_errors(turns, transcriber_of(shlex.join([sys.executable, "-c", says]))) == 0.5
    assert word_errors([], transcriber_of("false")) is None
    with pytest.raises(SettingsError, match="--asr: expected exit status 0, got 1"):
        transcriber_of("false")(turns[0])


def test_settings_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert given(["model.weights=int8", "duplex.euler_steps=2"]) == {"model.weights": "int8", "duplex.euler_steps": 2}
    assert main(["--set", "model.weights=int9"]) == 2 and "model.weights" in capsys.readouterr().err
    assert main(["--set", "weights"]) == 2 and "expected KEY=VALUE, got weights" in capsys.readouterr().err
