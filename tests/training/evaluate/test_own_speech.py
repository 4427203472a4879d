"""The model's own speech: replies for the ear, the words it may hear, and a voice that stays or changes."""

import re
import sys

import numpy as np
import pytest

from models.checkpoint.embedded import DEFAULT, TINY
from models.errors import ModelError
from training.evaluate.acts import Case, Happened, HeardUnit, Played, Say
from training.evaluate.reply_model import reply_model
from training.evaluate.speech import MINUTE, Ear, replies_of, speaker_encoder, voice_kept
from worker.protocol.wire import SOUND_RATE

SILENT = HeardUnit("", np.zeros(0, np.float32), speaks=False, listens=True, ends=False, ms=10.0, is_late=False)


def spoken(text: str, hz: float) -> HeardUnit:
    """A unit with a buzz of this pitch."""
    time = np.arange(SOUND_RATE) / SOUND_RATE
    sound = 0.1 * sum(np.sin(2 * np.pi * hz * k * time) / k for k in range(1, 12))
    return HeardUnit(text, sound.astype(np.float32), speaks=True, listens=False, ends=False, ms=10.0, is_late=False)


def conversation(first_hz: float, last_hz: float) -> Played:
    units = [*([spoken("a ", first_hz)] * 12), *([SILENT] * (2 * MINUTE - 24)), *([spoken("a ", last_hz)] * 12)]
    return Played(Case("long", "conversation", "", 0, ()), units)


def test_a_voice_that_changes_is_noticed() -> None:
    encoder = speaker_encoder(DEFAULT)
    same, other = voice_kept(conversation(120, 120), encoder), voice_kept(conversation(120, 260), encoder)
    assert same is not None and other is not None
    assert same.n == other.n == 12
    assert same.value == pytest.approx(1, abs=1e-3)
    assert other.value < 0.8, f"expected another voice, got a cosine of {other.value:.2f}"
    silent = Played(Case("long", "conversation", "", 0, ()), [SILENT] * (2 * MINUTE))
    short = Played(silent.case, silent.units[:MINUTE])
    checkpoint = voice_kept(conversation(120, 120), speaker_encoder(TINY))
    assert checkpoint is not None and checkpoint.value == pytest.approx(1, abs=1e-3)
    assert voice_kept(silent, encoder) is None and voice_kept(short, encoder) is None


def test_replies_of_three_words_are_heard_from_their_first_sound_on() -> None:
    say = Say("greet", "hello", np.zeros(16_000, np.float32), 0.5, "Hello!")
    short = Say("greet", "hi", np.zeros(16_000, np.float32), 0.5, "Hello!")
    units = [
        SILENT,
        SILENT,
        spoken("Hello there ", 120),
        spoken("friend.", 120),
        SILENT,
        SILENT,
        spoken("Hi.", 120),
        SILENT,
    ]
    happened = [Happened(say, 0.5, 1.5, 5), Happened(short, 5.5, 6.0, 8)]
    [(text, sound)] = replies_of([Played(Case("one", "requests", "", 0, (say, short)), units, happened)], 5)
    assert text == "Hello there friend."
    assert len(sound) == pytest.approx(2 * 16_000, abs=16), "expected the two units with sound"


def test_the_language_model_adds_up() -> None:
    sentences = [["it", "is", "red"], ["it", "is", "blue"], ["red", "unheard"]]
    model = reply_model(sentences, ["it", "is", "red", "blue", "far"])
    assert "ngram 1=7" in model and "ngram 2=7" in model and "unheard" not in model
    single = {
        word: (10 ** float(share), 10 ** float(backoff))
        for share, word, backoff in re.findall(r"^(-[\d.]+)\t(\S+)\t(-?[\d.]+)$", model, re.MULTILINE)
    }
    pairs = {
        (first, second): 10 ** float(share)
        for share, first, second in re.findall(r"^(-[\d.]+)\t(\S+) (\S+)$", model, re.MULTILINE)
    }
    assert sum(share for share, _ in single.values()) == pytest.approx(1, abs=1e-3)
    for first, (_, backoff) in single.items():
        if first != "</s>":
            follow = [pairs.get((first, word), backoff * share) for word, (share, _) in single.items() if word != "<s>"]
            assert sum(follow) == pytest.approx(1, abs=2e-3), f"after {first}: expected shares of 1, got {sum(follow)}"
    assert pairs["it", "is"] > pairs["is", "red"]


def test_without_the_recogniser_the_ear_fails_before_anything_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pocketsphinx", None)
    with pytest.raises(ModelError, match="expected the extra `training`, or --no-ear, got none"):
        Ear()
