"""Refused messages and their error texts; any input is a message or a WireError."""

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.protocol.message_helpers import FORMS, refused
from worker.protocol.codec import Message
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import CLIENT, SERVER, Spec, read_binary, read_server, read_text
from worker.protocol.wire import WireError


def test_keeps_texts_that_clients_match() -> None:
    for fields in ({}, {"audio_base64": None}, {"audio_base64": ""}, {"audio": "", "frame_base64_list": ["AAAA"]}):
        error = refused(type="audio_chunk", **fields)
        assert str(error) == "Missing audio_base64" and error.code == "missing_audio", fields
    error = refused(type="video_call")
    assert str(error) == "Unknown message type: video_call" and error.code == "unknown_type"
    assert str(refused(type="x" * 10_000)) == f"Unknown message type: {'x' * 60}..."
    assert str(refused(type="result")) == "Unknown message type: result"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "message.type: expected text, got nothing"),
        ({"type": None}, "message.type: expected text, got nothing"),
        ({"type": 3}, "message.type: expected text, got 3"),
        ({"type": ["stop"]}, "message.type: expected text, got ['stop']"),
        ({"type": "prepare", "system_prompt": ["a"]}, "prepare.system_prompt: expected text, got ['a']"),
        ({"type": "prepare", "ref_audio_base64": 1.5}, "prepare.ref_audio_base64: expected base64 text, got 1.5"),
        ({"type": "prepare", "tts_ref_audio_base64": {}}, "prepare.tts_ref_audio_base64: expected base64 text, got {}"),
        ({"type": "prepare", "ref_audio_path": False}, "prepare.ref_audio_path: expected text, got false"),
        ({"type": "prepare", "config": "x" * 999}, f"prepare.config: expected an object, got '{'x' * 27}...x"),
        ({"type": "prepare", "config": [1]}, "prepare.config: expected an object, got [1]"),
        (
            {"type": "prepare", "max_slice_nums": 0},
            "prepare.max_slice_nums: expected a whole number, at least 1, got 0",
        ),
        (
            {"type": "prepare", "max_slice_nums": 1.0},
            "prepare.max_slice_nums: expected a whole number, at least 1, got",
        ),
        (
            {"type": "prepare", "max_slice_nums": True},
            "prepare.max_slice_nums: expected a whole number, at least 1, got",
        ),
        ({"type": "prepare", "deferred_finalize": 1}, "prepare.deferred_finalize: expected true or false, got 1"),
        ({"type": "prepare", "spec": 3}, "prepare.spec: expected an object, got 3"),
        ({"type": "prepare", "spec": {"version": 2}}, "prepare.spec.version: expected 1, got 2"),
        ({"type": "prepare", "spec": {"version": "1"}}, "prepare.spec.version: expected 1, got '1'"),
        ({"type": "prepare", "spec": {"partial_results": 1}}, "prepare.spec.partial_results: expected true or false"),
        (
            {"type": "prepare", "spec": {"sound_out": "opus"}},
            'prepare.spec.sound_out: expected "base64" or "pcm16" or "float32", got \'opus\'',
        ),
        ({"type": "prepare", "spec": {"sound_in": []}}, 'prepare.spec.sound_in: expected "base64" or "pcm16" or'),
        ({"type": "prepare", "spec": {"backlog": "drop"}}, 'prepare.spec.backlog: expected "keep" or "catch_up", got'),
        ({"type": "audio_chunk", "audio_base64": 0}, "audio_chunk.audio_base64: expected base64 text, got 0"),
        ({"type": "audio_chunk", "audio": ["A"]}, "audio_chunk.audio: expected base64 text, got ['A']"),
        (
            {"type": "audio_chunk", "audio": "A", "frame_base64_list": "A"},
            "audio_chunk.frame_base64_list: expected a list, each base64 text, got 'A'",
        ),
        (
            {"type": "audio_chunk", "audio": "A", "video_frames": ["A", None]},
            "audio_chunk.video_frames[1]: expected base64 text, got null",
        ),
        (
            {"type": "audio_chunk", "audio": "A", "force_listen": "yes"},
            "audio_chunk.force_listen: expected true or false",
        ),
        (
            {"type": "audio_chunk", "audio": "A", "max_slice_nums": "two"},
            "audio_chunk.max_slice_nums: expected a whole number or a list, each a whole number, got 'two'",
        ),
        (
            {"type": "audio_chunk", "audio": "A", "max_slice_nums": [1, True]},
            "audio_chunk.max_slice_nums[1]: expected a whole number, got true",
        ),
        ({"type": "video_frame"}, "video_frame.frame: expected base64 text, got nothing"),
        ({"type": "video_frame", "frame": 3}, "video_frame.frame: expected base64 text, got 3"),
        ({"type": "insert_text"}, "insert_text.text: expected text, got nothing"),
        ({"type": "insert_text", "text": ""}, "insert_text.text: expected at least one character, got none"),
        ({"type": "insert_text", "text": ["A"]}, "insert_text.text: expected text, got ['A']"),
        (
            {"type": "insert_text", "text": "A", "role": "assistant"},
            'insert_text.role: expected "system" or "user" or "tool", got \'assistant\'',
        ),
        ({"type": "pause", "timeout": "60"}, "pause.timeout: expected a number from 0 to 86400, got '60'"),
        ({"type": "pause", "timeout": -1}, "pause.timeout: expected a number from 0 to 86400, got -1"),
        (
            {"type": "pause", "timeout": 10**400},
            "pause.timeout: expected a number from 0 to 86400, got a num",
        ),
    ],
)
def test_errors_name_field_and_type(fields: dict[str, Any], text: str) -> None:
    error = refused(**fields)
    assert str(error).startswith(text) and len(str(error)) < 250, f"expected {text}, got {error}"
    assert error.code == ErrorCode.BAD_MESSAGE


def test_refuses_infinite_numbers() -> None:
    with pytest.raises(WireError, match=r"pause.timeout: expected a number from .* got inf"):
        read_text('{"type":"pause","timeout":1e999}')
    for text in ('{"type":"pause","timeout":NaN}', '{"type":"prepare","config":{"a":Infinity}}'):
        with pytest.raises(WireError) as caught:
            read_text(text)
        assert caught.value.code == ErrorCode.BAD_JSON


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(
    {name for cls in CLIENT.classes.values() for name in (*cls.model_fields, *sum(cls.aliases.values(), ()))}
    | {"system_content", "version", "sound_in", "data", "text", "audio_bytes", "frame_bytes"}
)
MESSAGES = st.dictionaries(
    st.sampled_from(FIELDS),
    JSON
    | st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3)
    | st.lists(st.dictionaries(st.sampled_from(FIELDS), JSON)),
    max_size=5,
)
TYPES = st.sampled_from(sorted(CLIENT.classes))


def read_or_refused(call, *args: Any) -> None:
    try:
        got = call(*args)
    except WireError as error:
        assert isinstance(error.code, ErrorCode) and len(str(error)) < 1000, error
        return
    assert isinstance(got, Message), got
    for name in ("samples", "pictures", "picture", "ref_audio", "tts_ref_audio"):
        if decode := getattr(got, name, None):
            try:
                decode()
            except WireError as error:
                assert error.code in (ErrorCode.BAD_BASE64, ErrorCode.BAD_AUDIO, ErrorCode.BAD_IMAGE)


@given(text=st.text(st.characters(), max_size=40) | JSON.map(json.dumps))
def test_any_text_is_a_message_or_a_wire_error(text: str) -> None:
    read_or_refused(read_text, text)
    read_or_refused(read_server, text)


@given(name=TYPES, fields=MESSAGES)
def test_any_fields_are_a_message_or_a_wire_error(name: str, fields: dict[str, Any]) -> None:
    read_or_refused(read_text, json.dumps({**fields, "type": name}))


@given(name=TYPES, fields=MESSAGES, payload=st.binary(max_size=12), cuts=st.lists(st.integers(0, 12), max_size=3))
def test_any_frame_is_a_message_or_a_wire_error(name: str, fields: dict, payload: bytes, cuts: list[int]) -> None:
    header = json.dumps({"audio_bytes": len(payload) - sum(cuts), "frame_bytes": cuts, **fields, "type": name}).encode()
    for form in FORMS:
        spec = Spec(sound_in=form, sound_out=form)
        read_or_refused(read_binary, struct.pack("<I", len(header)) + header + payload, spec)
        read_or_refused(read_binary, payload, spec)
        read_or_refused(read_server, payload, spec)


@given(
    name=st.sampled_from(sorted(SERVER.classes)),
    fields=st.dictionaries(st.text(max_size=9), JSON, max_size=4),
    data=st.data(),
)
def test_any_server_message_is_a_message_or_a_wire_error(
    name: str, fields: dict[str, Any], data: st.DataObject
) -> None:
    names = st.sampled_from(list(SERVER.classes[name].model_fields))
    fields |= data.draw(st.dictionaries(names, JSON, max_size=6))
    read_or_refused(read_server, json.dumps({**fields, "type": name}))
