import json

import pytest

from worker.config.service import load_config
from worker.config.settings import SettingError
from worker.config.webrtc import WebRtcConfig


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"min_port": 40_000}, "max_port"),
        ({"min_port": 40_000, "max_port": 39_999}, "at least min_port"),
        ({"turn_username": "me"}, "turn_credential"),
        ({"turn_url": "http://turn.example.org"}, "turn_url"),
        ({"stun_url": "turn:turn.example.org"}, "stun_url"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given: dict[str, object], expected: str) -> None:
    with pytest.raises(SettingError, match=expected):
        WebRtcConfig(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"turn_username": "me", "turn_credential": "s3cret" * 100},
        {"turn_password": "s3cret"},
        {"turn_url": "turn:me:s3cret@turn.example.org"},
    ],
)
def test_a_password_is_not_shown(given: dict[str, object]) -> None:
    environment = {f"DUOLOGUE_SERVICE_WEBRTC_{key.upper()}": json.dumps(value) for key, value in given.items()}
    for make in (lambda: WebRtcConfig(**given), lambda: load_config(flags={}, environ=environment)):
        with pytest.raises(SettingError) as error:
            make()
        assert "s3cret" not in str(error.value) and [*given][-1] in str(error.value).lower(), error.value
    assert "s3cret" not in repr(WebRtcConfig(turn_username="me", turn_credential="s3cret"))


def test_a_misspelt_setting_of_keys_is_not_shown() -> None:
    with pytest.raises(SettingError) as error:
        load_config(flags={}, environ={"DUOLOGUE_SERVICE_API_KEY": "s3cret"})
    assert "s3cret" not in str(error.value) and "DUOLOGUE_SERVICE_API_KEYS" in str(error.value)
