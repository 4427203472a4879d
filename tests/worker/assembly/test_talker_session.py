"""Session defaults of the embedded talker: one piece of sound a unit on a CPU, unless the settings name others."""

import pytest

from models.checkpoint.embedded import DEFAULT, TINY
from worker.assembly.talker_session import with_talker_session
from worker.config.service import ROOT
from worker.config.session import EngineConfig, SessionConfig


@pytest.mark.parametrize(
    ("model", "device", "session", "expected"),
    [
        (DEFAULT, "cpu", {}, (25,)),
        (DEFAULT, "cuda", {}, (8,)),
        (TINY, "cpu", {}, (8,)),
        (DEFAULT, "cpu", {"sound_ramp": [5, 10]}, (5, 10)),
    ],
)
def test_pieces_of_sound(model: object, device: str, session: dict[str, object], expected: tuple[int, ...]) -> None:
    config = EngineConfig(model_path=f"{ROOT}/{model}", session=SessionConfig.model_validate(session))
    assert with_talker_session(config, device).session.sound_ramp == expected
