"""Session defaults of the embedded talker, unless the settings name others."""

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


def test_the_odds_of_listening_are_those_that_are_given_or_of_the_public_reference() -> None:
    for given, expected in (({"listen_prob_scale": 1.5}, 1.5), ({"compat": "reference"}, USUAL.listen_prob_scale)):
        config = EngineConfig(model_path=f"{ROOT}/{DEFAULT}", session=SessionConfig.model_validate(given))
        assert with_talker_session(config, "cpu").session.listen_prob_scale == expected, given
