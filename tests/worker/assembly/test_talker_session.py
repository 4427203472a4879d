"""Session defaults of the embedded talker, unless the settings name others."""

import pytest

from models.checkpoint.embedded import DEFAULT, TINY
from worker.assembly.talker_session import SPEECH_TEMPERATURE, with_talker_session
from worker.config.service import ROOT
from worker.config.session import EngineConfig, SessionConfig

USUAL = SessionConfig()


@pytest.mark.parametrize(
    ("model", "device", "session", "ramp", "temperature"),
    [
        (DEFAULT, "cpu", {}, (25,), SPEECH_TEMPERATURE),
        (DEFAULT, "cuda", {}, (8,), SPEECH_TEMPERATURE),
        (TINY, "cpu", {}, (8,), USUAL.tts_temperature),
        (DEFAULT, "cpu", {"sound_ramp": [5, 10]}, (5, 10), SPEECH_TEMPERATURE),
        (DEFAULT, "cpu", {"tts_temperature": 1.1}, (25,), 1.1),
    ],
)
def test_defaults(
    model: object, device: str, session: dict[str, object], ramp: tuple[int, ...], temperature: float
) -> None:
    config = EngineConfig(model_path=f"{ROOT}/{model}", session=SessionConfig.model_validate(session))
    got = with_talker_session(config, device).session
    assert (got.sound_ramp, got.tts_temperature) == (ramp, temperature)
