"""Reading the events of GPT-Live clients."""

import json
from typing import Any

import pytest

from server.doors.gpt_live.client_events import AppendText, GptLiveAppendAudio, SessionStart, read_event
from server.doors.live.event_error import EventError, EventRefusedError


def event(kind: str, **fields: Any) -> str:
    return json.dumps({"type": kind, **fields})


def test_events_of_stock_clients_are_read() -> None:
    part = {"type": "input_text", "text": "Hi"}
    started = read_event(
        event(
            "session.start",
            event_id="e1",
            session={
                "model": "gpt-live-1",
                "instructions": "Be brief.",
                "input": [{"type": "message", "role": "developer", "content": [part]}],
                "audio": {"format": {"type": "audio/pcm", "rate": 24000}, "output": {"voice": "marin"}},
                "delegation": {"type": "responses", "responses": {"model": "gpt-5", "tools": []}},
            },
        )
    )
    assert isinstance(started, SessionStart) and started.session.model == "gpt-live-1"
    text = read_event(event("session.commentary.append", content="Say hello.", delegation_id=None))
    assert isinstance(text, AppendText) and text.delegation_id is None


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        ("{", "invalid_json", None),
        ("[]", "invalid_json", None),
        (event("session.fly"), "unknown_event", None),
        (json.dumps({"event_id": "e1"}), "unknown_event", None),
        (event("session.start", session={"model": "m", "temperature": 1}), "unknown_parameter", "session.temperature"),
        (event("session.start", session={}), "missing_required_parameter", "session.model"),
        (event("session.thinking.append", content="x"), "missing_required_parameter", "delegation_id"),
        (event("session.start", session={"model": "m", "store": True}), "invalid_value", "session.store"),
    ],
)
def test_invalid_events_are_refused_by_name(text: str, code: str, param: str | None) -> None:
    with pytest.raises(EventRefusedError) as refused:
        read_event(text)
    assert (refused.value.error.code, refused.value.error.param) == (code, param)


@pytest.mark.parametrize("audio", ["not base64!", "\u00e9"])
def test_sound_must_be_base64(audio: str) -> None:
    found = read_event(event("session.input_audio.append", audio=audio))
    assert isinstance(found, GptLiveAppendAudio)
    with pytest.raises(EventError, match="audio: expected base64"):
        found.sound()
