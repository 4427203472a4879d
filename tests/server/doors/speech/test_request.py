"""Requests of speech: defaults and refused values."""

import json
from typing import Any

import pytest

from server.doors.errors import ApiError
from server.doors.speech.request import SpeechOrder, speech_order

LEAST = {"model": "tts-1", "input": "Hi"}


def order(**fields: Any) -> SpeechOrder:
    return speech_order(json.dumps({**LEAST, **fields}).encode())


def test_defaults_are_those_of_the_api() -> None:
    assert order() == SpeechOrder("tts-1", "Hi", "default", "mp3", 1.0, "audio")
    assert order(voice=None, speed=None, response_format=None, unknown=[1]) == order()


def test_voice_is_text_or_an_object_with_an_id() -> None:
    assert order(voice="alloy").voice == order(voice={"id": "alloy"}).voice == "alloy"


def test_negative_seed_is_accepted() -> None:
    assert order(seed=-1).seed == 2**64 - 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": " \n"}, "input"),
        ({"input": "x" * 4097}, "input"),
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"model": None}, "model"),
        ({"voice": 3}, "voice"),
        ({"voice": ""}, "voice"),
        ({"response_format": "ogg"}, "response_format"),
        ({"speed": 0.2}, "speed"),
        ({"speed": 4.1}, "speed"),
        ({"speed": True}, "speed"),
        ({"stream_format": "both"}, "stream_format"),
        ({"seed": 1.5}, "seed"),
        ({"ref_audio": 1}, "ref_audio"),
        ({"speaker_embedding": [1e39]}, "speaker_embedding"),
        ({"speaker_embedding": [0] * 8193}, "speaker_embedding"),
        ({"speaker_embedding": [0, 10**400]}, "speaker_embedding"),
    ],
)
def test_impossible_values_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        order(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert param in refused.value.message


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": NaN}'])
def test_bodies_that_are_no_object_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        speech_order(body)
    assert refused.value.status == 400 and refused.value.message.startswith("body: expected")
