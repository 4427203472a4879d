"""A precision is compared with another one in the same context; a precision is equal to itself."""

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.quality import __main__ as program
from benchmarks.quality import card as cards
from benchmarks.quality.__main__ import TOO_FEW, given, main, transcriber_of
from benchmarks.quality.card import MEL_NOTE, Spread, compare, divergence, edit_distance, word_errors, words
from benchmarks.quality.quality_run import SPEAKS_EVERY, QualityRun, VoicedTurn, record
from models.errors import SettingsError
from tests.worker.loop.engines import TINY, make_config, short_speech, voice
from worker.config.session import SessionConfig, WindowConfig
from worker.config.weights import PartWeights
from worker.start.warmup import extract

SESSION = SessionConfig(force_listen_count=0, seed=3, listen_prob_scale=0.01, window=WindowConfig(mode="off"))
N_UNITS = 3


def recorded(root: Path, forced: QualityRun | None = None, **settings: str | SessionConfig | PartWeights) -> QualityRun:
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


@pytest.mark.parametrize(
    "settings", [{"weights": "fp8"}, {"weights": "int8"}, {"weights": "int4"}, {"dtype": "bfloat16"}], ids=str
)
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


def test_quantised_layers_of_the_flow_change_the_mel_alone(root: Path, reference: QualityRun) -> None:
    card = compare(reference, recorded(root, reference, part_weights=PartWeights(flow="int8")))
    assert max(card.text_kl.max, card.speech_kl.max) < 1e-9 and card.decisions == 1, card
    assert 0 < card.mel < 0.05 and 0 < card.mel_relative < 0.05, card


def test_own_draws_of_the_tested_run_do_not_matter(root: Path) -> None:
    """Other speech tokens end the speech of a turn earlier or later, which takes another number of calls."""
    session = SESSION.model_copy(update={"length_penalty": 0.1})  # turns end
    reference = recorded(root, session=session)
    tested = recorded(root, reference, session=session.model_copy(update={"seed": 4, "drain_s": 0}))
    assert len(reference.calls) > len(tested.calls) > 1, f"got {len(reference.calls)} and {len(tested.calls)} calls"
    assert reference.calls[0].speech_tokens != tested.calls[0].speech_tokens, "expected other draws"
    assert compare(reference, tested) == compare(reference, reference)


def test_units_speak_whatever_the_model_decides(root: Path) -> None:
    """The decisions of the card are the model's own, also where it has to speak."""
    listens = SESSION.model_copy(update={"listen_prob_scale": 100.0, "force_listen_count": 1})
    made = recorded(root, session=listens)
    spoken = {unit for unit, step in made.tokens if step > 0}
    assert spoken >= set(range(0, N_UNITS, SPEAKS_EVERY)), f"expected speech in every second unit, got {spoken}"
    assert set(made.decisions) == set(range(N_UNITS)), made.decisions
    for unit, (listen, speak) in made.decisions.items():
        assert np.isfinite([listen, speak]).all(), f"unit {unit}: expected the model's logits, got {listen}, {speak}"


def test_the_talker_speaks_and_too_little_is_an_error(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "card.json"
    settings = ["--set", "model.weights=int8", "--units", "3", "--json", str(file)]
    status = main(["--model-path", str(root / "assets" / "talker"), "--device", "cpu", *settings])
    card, shown = json.loads(file.read_text()), capsys.readouterr()
    assert card["card"]["text_kl"]["n"] >= 4 and card["card"]["speech_kl"]["n"] >= 30, f"two units speak: {card}"
    assert card["card"]["mel"] == 0 and MEL_NOTE in shown.out, shown.out
    assert status == TOO_FEW, f"expected {TOO_FEW}, got {status}"
    assert "too little was compared: decisions: expected at least 6, got 2" in shown.err, shown.err
    assert [one.split(":")[0] for one in card["too_few"]] == ["decisions", "text tokens", "speech tokens"], card


def test_enough_is_a_success(reference: QualityRun, monkeypatch: pytest.MonkeyPatch) -> None:
    card = compare(reference, reference)
    counts = {"MIN_DECISIONS": card.n_units, "MIN_TEXT_TOKENS": card.text_kl.n, "MIN_SPEECH_TOKENS": card.speech_kl.n}
    monkeypatch.setattr(program, "record", lambda *_, **__: reference)
    for name, count in counts.items():
        monkeypatch.setattr(cards, name, count)
    assert card.too_few(has_speech=True) == [] and main(["--model-path", str(TINY), "--units", "1"]) == 0
    monkeypatch.setattr(cards, "MIN_SPEECH_TOKENS", card.speech_kl.n + 1)
    expected = f"speech tokens: expected at least {card.speech_kl.n + 1}, got {card.speech_kl.n}"
    assert card.too_few(has_speech=True) == [expected] and card.too_few(has_speech=False) == []


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
