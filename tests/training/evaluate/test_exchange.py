"""The recorded exchange: a script becomes a session, its transcript and a stereo recording."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from models.errors import ModelError
from tests.training.evaluate.scripted_talker import tone_voice
from training.evaluate import exchange
from training.evaluate.acts import Appear, Happened, HeardUnit, Played, Say, Show
from training.evaluate.exchange import SCRIPT, draw_exchange, stereo, transcript, write_exchange

TONE = (0.3 * np.sin(np.arange(24_000) / 10)).astype(np.float32)


def unit(text: str = "") -> HeardUnit:
    sound = TONE if text else np.zeros(0, np.float32)
    return HeardUnit(text, sound, bool(text), not text, False, 1.0, False)


@pytest.fixture
def played() -> Played:
    """A session of four acts: a sentence is answered in units 4 and 5, then pictures come."""
    case = draw_exchange(tone_voice, 0, (*SCRIPT[:1], *SCRIPT[3:4], *SCRIPT[6:7]))
    said, shown, appears = case.acts
    units = [unit(), unit(), unit(), unit(), unit("Hello,"), unit(" you."), unit(), unit("I see it.")]
    happened = [Happened(said, 3.2, 3.8, 6), Happened(shown, 6.0, 6.0, 6), Happened(appears, 6.0, 8.0, 8)]
    return Played(case, units, happened)


def test_the_script_says_shows_and_interrupts() -> None:
    acts = draw_exchange(tone_voice, 0).acts
    said = [act for act in acts if isinstance(act, Say)]
    assert [act.text for act in said] == [line for line in SCRIPT if isinstance(line, str)]
    assert [(act.after, act.waits) for act in said[-2:]] == [(0, False), (exchange.STOP_AFTER, True)]
    assert sum(isinstance(act, Show) for act in acts) == sum(isinstance(act, Appear) for act in acts) == 1


def test_the_transcript_has_everything_in_order(played: Played) -> None:
    rows = [line.strip("| ").split(" | ") for line in transcript(played).splitlines()[2:]]
    assert rows == [
        ["3.2", "person", "hello"],
        ["5.0", "talker", "Hello, you."],
        ["6.0", "camera", "a blue star"],
        ["6.0", "camera", "a red circle"],
        ["8.0", "talker", "I see it."],
    ]


def test_the_recording_has_a_side_for_each(played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = stereo(played)
    assert both.shape == (9 * 24_000, 2)
    loud = [[bool(np.abs(second[:, side]).max() > 0.05) for second in both.reshape(9, 24_000, 2)] for side in (0, 1)]
    assert [second for second, is_loud in enumerate(loud[0]) if is_loud] == [3, 4], "expected the person from 3.2 s on"
    assert [second for second, is_loud in enumerate(loud[1]) if is_loud] == [5, 6, 8], "expected units a second later"
    write_exchange(played, tmp_path)
    facts = soundfile.info(tmp_path / "exchange.ogg")
    assert (facts.channels, facts.subtype, round(facts.duration)) == (2, "OPUS", 9)
    assert (tmp_path / "exchange.md").read_text() == transcript(played)
    monkeypatch.setattr(exchange, "MAX_BYTES", 1000)
    with pytest.raises(ModelError, match="expected at most 1,000 bytes"):
        write_exchange(played, tmp_path / "short")
