import base64
import json

from hypothesis import given
from hypothesis import strategies as st

from server.doors.core.event_writer import Base64Text, event_text


@given(st.binary(max_size=50), st.text(max_size=8))
def test_sound_in_an_event_is_the_json_of_its_base64(sound: bytes, item_id: str) -> None:
    event = {"type": "response.output_audio.delta", "delta": Base64Text.of(sound), "item_id": item_id}
    expected = {**event, "delta": base64.b64encode(sound).decode()}
    assert json.loads(event_text(event)) == expected


def test_text_in_an_event_is_escaped() -> None:
    event = {"type": "response.output_text.delta", "delta": 'a "word"\n'}
    assert json.loads(event_text(event)) == event
