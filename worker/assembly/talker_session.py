"""Session defaults that suit the embedded talker on a CPU."""

from worker.config.embedded import is_talker
from worker.config.session import UNIT_SPEECH_TOKENS, EngineConfig


def with_talker_session(config: EngineConfig, device_type: str) -> EngineConfig:
    """The settings; where the talker runs on a CPU, a unit's sound is one piece unless they name other pieces.

    The vocoder takes nearly as long for a piece as for the whole second, and two pieces would make units late.
    """
    session = config.session
    if device_type != "cpu" or not is_talker(config.model_path) or "sound_ramp" in session.model_fields_set:
        return config
    return config.model_copy(update={"session": session.model_copy(update={"sound_ramp": (UNIT_SPEECH_TOKENS,)})})
