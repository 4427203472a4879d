"""Fixtures of the speech tests, with the embedded checkpoint."""

import pytest

from models.omni import OmniModel
from tests.models.stages.speech_calls import WholeCallSpeaker
from tests.models.stages.speech_helpers import make_speaker


@pytest.fixture
def speaker(tiny_model: OmniModel) -> WholeCallSpeaker:
    return make_speaker(tiny_model)


@pytest.fixture
def eos(tiny_model: OmniModel) -> int:
    return tiny_model.config.tts_config.speech_eos_id
