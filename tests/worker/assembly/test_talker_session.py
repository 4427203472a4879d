"""Session defaults of the embedded talker, unless the settings name others."""

from pathlib import Path

import pytest

from models.checkpoint.embedded import DEFAULT, TINY
from worker.assembly.talker_session import LISTEN_SCALE, SPEECH_TEMPERATURE, TEXT_TEMPERATURE, with_talker_session
from worker.config.service import ROOT
from worker.config.session import EngineConfig, SessionConfig

USUAL = SessionConfig()


@pytest.mark.parametrize(
    ("model", "device", "session", "ramp", "speech", "text"),
    [
        (DEFAULT, "cpu", {}, (25,), SPEECH_TEMPERATURE, TEXT_TEMPERATURE),
        (DEFAULT, "cuda", {}, (8,), SPEECH_TEMPERATURE, TEXT_TEMPERATURE),
        (TINY, "cpu", {}, (8,), USUAL.tts_temperature, USUAL.temperature),
        (DEFAULT, "cpu", {"sound_ramp": [5, 10]}, (5, 10), SPEECH_TEMPERATURE, TEXT_TEMPERATURE),
        (DEFAULT, "cpu", {"tts_temperature": 1.1}, (25,), 1.1, TEXT_TEMPERATURE),
        (DEFAULT, "cpu", {"temperature": 0.9}, (25,), SPEECH_TEMPERATURE, 0.9),
    ],
)
def test_defaults(
    model: object, device: str, session: dict[str, object], ramp: tuple[int, ...], speech: float, text: float
) -> None:
    config = EngineConfig(model_path=f"{ROOT}/{model}", session=SessionConfig.model_validate(session))
    got = with_talker_session(config, device).session
    assert (got.sound_ramp, got.tts_temperature, got.temperature) == (ramp, speech, text)
    assert got.listen_prob_scale == (LISTEN_SCALE if model == DEFAULT else USUAL.listen_prob_scale)


def test_a_copy_of_the_talker_is_the_talker(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((ROOT / DEFAULT / "config.json").read_bytes())
    got = with_talker_session(EngineConfig(model_path=tmp_path), "cpu").session
    assert got.tts_temperature == SPEECH_TEMPERATURE


def test_the_odds_of_listening_are_those_that_are_given_or_of_the_public_reference() -> None:
    for given, expected in (({"listen_prob_scale": 1.5}, 1.5), ({"compat": "reference"}, USUAL.listen_prob_scale)):
        config = EngineConfig(model_path=f"{ROOT}/{DEFAULT}", session=SessionConfig.model_validate(given))
        assert with_talker_session(config, "cpu").session.listen_prob_scale == expected, given
