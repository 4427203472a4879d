import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.doors.live.event_error import EventRefusedError
from server.doors.realtime.events.client_events import (
    KINDS,
    AppendAudio,
    CreateItem,
    CreateResponse,
    read_event,
)


def refusal(text: str) -> EventRefusedError:
    with pytest.raises(EventRefusedError) as caught:
        read_event(text)
    return caught.value


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "invalid_json"),
        ("[]", "invalid_json"),
        ('{"type": 3}', "unknown_event"),
        ('{"type": "response.listen"}', "unknown_event"),
        ('{"type": "input_audio_buffer.append"}', "missing_required_parameter"),
        ('{"type": "input_audio_buffer.append", "audio": "!"}', "invalid_value"),
        ('{"type": "conversation.item.create"}', "missing_required_parameter"),
        ('{"type": "conversation.item.truncate", "item_id": "a", "audio_end_ms": -1}', "invalid_value"),
        ('{"type": "response.create", "response": {"max_output_tokens": 5000}}', "invalid_value"),
    ],
)
def test_wrong_events_are_refused_by_code(text: str, code: str) -> None:
    assert refusal(text).error.code == code


def test_refusals_name_the_event_and_the_field() -> None:
    found = refusal('{"event_id": "e1", "type": "conversation.item.delete", "item_id": 5}')
    assert found.event_id == "e1" and found.error.param == "item_id"
    assert found.error.fields(found.event_id)["event_id"] == "e1"
    for fields, param in (
        ({"type": "response.create", "response": {"max_output_tokens": 5000}}, "response.max_output_tokens"),
        ({"type": "response.create", "response": {"tool_choice": 5}}, "response.tool_choice"),
        (
            {"type": "conversation.item.create", "item": {"type": "message", "content": [{}, {"type": "text"}]}},
            "item.content[0].type",
        ),
    ):
        assert refusal(json.dumps(fields)).error.param == param


def test_events_of_stock_clients_are_read() -> None:
    append = read_event('{"type": "input_audio_buffer.append", "audio": "AAECAw=="}')
    assert isinstance(append, AppendAudio) and append.sound == bytes([0, 1, 2, 3])
    item = {
        "id": "i",
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "Hi"}],
        "status": 1,
    }
    created = read_event(json.dumps({"type": "conversation.item.create", "item": item, "extra": 1}))
    assert isinstance(created, CreateItem) and created.item.content[0].text == "Hi"
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}", "content": None, "role": None}
    called = read_event(json.dumps({"type": "conversation.item.create", "item": call}))
    assert isinstance(called, CreateItem) and called.item.content == []
    options = {"modalities": ["audio", "text"], "metadata": {"client_event_id": "x"}}
    asked = read_event(json.dumps({"type": "response.create", "response": options}))
    assert isinstance(asked, CreateResponse) and asked.response is not None
    assert asked.response.metadata == {"client_event_id": "x"}
    beta = {"modalities": ["text"], "max_response_output_tokens": 9, "voice": "ash", "output_audio_format": "g711_alaw"}
    asked = read_event(json.dumps({"type": "response.create", "response": beta}))
    assert isinstance(asked, CreateResponse) and asked.response is not None and asked.response.audio is not None
    assert (asked.response.output_modalities, asked.response.max_output_tokens) == (["text"], 9)
    output = asked.response.audio.output
    assert output is not None and output.format is not None
    assert (output.voice, output.format.type) == ("ash", "audio/pcma")


@given(
    st.sampled_from(sorted(KINDS)),
    st.dictionaries(
        st.sampled_from(["session", "item", "item_id", "response", "audio_end_ms", "event_id", "previous_item_id"]),
        st.none() | st.text(max_size=3) | st.integers() | st.just({}) | st.just([]),
    ),
)
def test_any_object_is_an_event_or_refused(kind: str, fields: dict[str, Any]) -> None:
    try:
        assert isinstance(read_event(json.dumps({**fields, "type": kind})), KINDS[kind])
    except EventRefusedError as refused:
        assert refused.error.message
