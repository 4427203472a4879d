import pytest

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


def test_a_wrong_password_is_not_shown() -> None:
    with pytest.raises(SettingError) as error:
        WebRtcConfig(turn_username="me", turn_credential=7.25)
    assert "7.25" not in str(error.value) and "turn_credential" in str(error.value)
