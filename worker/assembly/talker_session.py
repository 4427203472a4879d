"""Session defaults that suit the talker."""

from typing import Any

from worker.config.embedded import is_talker
from worker.config.session import UNIT_SPEECH_TOKENS, EngineConfig

# Its speech tokens are less certain than those of a large model: at the usual 0.8 an independent recogniser hears 15
# points more wrong words than in the voice that it has learned, at 0.4 7 (69 replies, training/README.md).
SPEECH_TEMPERATURE = 0.4
# It was measured with these (training/README.md). With the usual odds of listening it has more false alarms.
TEXT_TEMPERATURE = 0.3
LISTEN_SCALE = 3.0


def with_talker_session(config: EngineConfig, device_type: str) -> EngineConfig:
    """The settings; those of the talker that they do not name suit it.

    On a CPU a unit's sound is one piece: the vocoder takes nearly as long for a piece as for the whole second, and two
    pieces would make units late.
    """
    if not is_talker(config.model_path):
        return config
    session = config.session
    defaults: dict[str, Any] = {
        "tts_temperature": SPEECH_TEMPERATURE,
        "temperature": TEXT_TEMPERATURE,
    }
    if session.compat != "reference":  # there it scales a logit
        defaults["listen_prob_scale"] = LISTEN_SCALE
    if device_type == "cpu":
        defaults["sound_ramp"] = (UNIT_SPEECH_TOKENS,)
    missing = {name: value for name, value in defaults.items() if name not in session.model_fields_set}
    return config.model_copy(update={"session": session.model_copy(update=missing)})
