"""Requests of chat completions: messages and settings as the worker takes them, and refused values."""

import json
from typing import Any

import pytest

from server.doors.chat.request import NEW_TOKENS, AudioOrder, ChatOrder, chat_order
from server.doors.errors import ApiError
from worker.protocol.chat_messages import MAX_NEW_TOKENS, read_chat

HI = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True}}
PNG = "data:image/png;base64,AAAA"
SHARP = {"type": "image_url", "image_url": {"url": PNG, "detail": "sharp"}}
AUDIO = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "mp3"}}


def order(*messages: dict[str, Any], **fields: Any) -> ChatOrder:
    body = {"model": "tiny", "messages": list(messages) or [HI], **fields}
    return chat_order(json.dumps(body).encode(), {"audio_1": "Good day."}.get)


def test_defaults() -> None:
    got = order()
    assert got.messages == [{"role": "user", "content": "Hi"}]
    assert got.generation == {"max_new_tokens": NEW_TOKENS, "stop": []}
    assert (got.audio, got.tools, got.answer_start, got.stream, got.include_usage) == (None, [], "", False, False)


def test_messages_are_those_of_the_worker() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "上海"}'}}
    got = order(
        {"role": "developer", "content": "Be kind."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look"},
                {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
                {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            ],
        },
        {"role": "assistant", "content": None, "audio": {"id": "audio_1"}},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": ""},
    )
    assert got.messages == [
        {"role": "system", "content": "Be kind."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look"},
                {"type": "image", "data": PNG},
                {"type": "audio", "data": "AAAA"},
            ],
        },
        {"role": "assistant", "content": "Good day."},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "weather", "arguments": {"city": "上海"}}]},
        {"role": "tool", "content": ""},
    ]
    assert len(read_chat({"messages": got.messages}).messages) == 5


@pytest.mark.parametrize(
    ("details", "expected"),
    [(["low", "low"], 1), (["low", "auto"], None), (["high"], None), ([None], None), ([], None)],
)
def test_pictures_that_need_no_detail_have_one_slice(details: list[str | None], expected: int | None) -> None:
    parts = [{"type": "image_url", "image_url": {"url": PNG, "detail": detail}} for detail in details]
    got = order({"role": "user", "content": [*parts, {"type": "text", "text": "Look"}]}).max_slices
    assert got == expected, f"{details}: expected {expected}, got {got}"


def test_settings_are_those_of_the_worker() -> None:
    given = {"temperature": 0, "top_p": 0.5, "seed": -2, "stop": "END", "max_tokens": 9}
    got = order(**given, stream=True, stream_options={"include_usage": True}, user="u", metadata={"a": "b"}, store=True)
    assert got.generation == {
        "max_new_tokens": 9,
        "temperature": 0,
        "top_p": 0.5,
        "stop": ["END"],
        "seed": 2**64 - 2,
    }
    assert got.stream and got.include_usage and got.stop == ("END",)
    assert order(max_completion_tokens=7, max_tokens=9).generation["max_new_tokens"] == 7
    assert order(max_tokens=10**6).generation["max_new_tokens"] == MAX_NEW_TOKENS


def test_sound_of_the_answer() -> None:
    assert order(**AUDIO).audio == AudioOrder("alloy", "mp3")
    stream = order(stream=True, modalities=["audio"], audio={"voice": {"id": "alloy"}, "format": "pcm16"})
    assert stream.audio == AudioOrder("alloy", "pcm")
    assert order(audio={"voice": "alloy", "format": "wav"}, modalities=["text"]).audio is None


def test_choice_of_tools() -> None:
    tools = {"tools": [TOOL]}
    described = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    assert order(**tools).tools == [described] and order(**tools).answer_start == ""
    assert order(**tools, tool_choice="none").tools == []
    assert order(**tools, tool_choice="required").answer_start == "<tool_call>\n"
    named = order(**tools, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert named.tools == [described] and named.answer_start == '<tool_call>\n{"name": "weather", "arguments": '


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [HI, {"role": "user", "content": None}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        ({"messages": [{"role": "assistant", "audio": {"id": "audio_2"}}]}, "messages[0].audio.id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"modalities": ["video"]}, "modalities"),
        ({"modalities": ["audio"]}, "audio"),
        ({**AUDIO, "stream": True}, "audio.format"),
        ({**AUDIO, "audio": {"voice": "alloy", "format": "ogg"}}, "audio.format"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"messages": [{"role": "user", "content": [SHARP]}]}, "messages[0].content[0].image_url.detail"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ],
)
def test_impossible_values_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        order(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
