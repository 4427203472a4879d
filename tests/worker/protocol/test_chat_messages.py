"""Chat requests: fields, ranges, items that are skipped, recognition of media containers."""

import base64
import json
import math
from typing import Any

import numpy as np
import pytest

from worker.protocol.chat_messages import ReplyChunk, SpokenReplyDone, read_chat
from worker.protocol.codec import write_message
from worker.protocol.codes import ErrorCode
from worker.protocol.content import (
    PIECE_CHARS,
    AudioContent,
    ImageContent,
    TextContent,
    VideoContent,
    container_of,
    raw_samples,
)
from worker.protocol.wire import MAX_PICTURE_BYTES, WireError


def test_items_without_content_and_unknown_items_are_skipped() -> None:
    items: list[Any] = [
        {"type": "text", "text": "a", "name": "extra"},
        {"type": "text", "text": ""},
        {"type": "audio", "data": None, "duration": 3},
        {"type": "hologram", "data": "AAAA"},
        {"type": "video", "data": "AAAA", "stack_frames": 3},
    ]
    emptied: list[Any] = [{"type": "image", "data": ""}]
    request = read_chat(
        {
            "messages": [
                {"role": "system", "content": emptied},
                {"role": "assistant", "content": ""},
                {"role": "user", "content": items, "id": 7},
            ],
            "unknown": 1,
            "tts": {"enabled": True, "ref_audio_data": "", "speed": 2},
        }
    )
    (turn,) = request.messages
    assert turn.content == [TextContent(text="a"), VideoContent(data="AAAA", stack_frames=3)]
    assert request.tts.enabled and request.tts.ref_audio_data is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"messages": "hi"}, "chat.messages: expected a list"),
        ({"messages": [{"role": "robot", "content": "a"}]}, 'messages[0].role: expected "system" or "user" or'),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content: expected text or a list of items, got 5",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "data": "A", "stack_frames": 0}]}]},
            "messages[0].content[0].stack_frames: expected a whole number from 1 to 10, got 0",
        ),
        ({"generation": {"max_new_tokens": 4097}}, "generation.max_new_tokens: expected a whole number from 1 to 4096"),
        ({"generation": {"temperature": 2.1}}, "generation.temperature: expected a number from 0 to 2, got 2.1"),
        ({"generation": {"length_penalty": 0}}, "generation.length_penalty: expected a number from 0.1 to 5, got 0"),
        ({"image": {"max_slice_nums": 17}}, "image.max_slice_nums: expected a whole number from 1 to 16, got 17"),
        ({"tts": {"ref_audio_max_ms": 10}}, "tts.ref_audio_max_ms: expected a whole number, at least 1000, got 10"),
        ({"tts": {"language": "fr"}}, 'tts.language: expected "en" or "zh", got'),
    ],
)
def test_invalid_requests_are_refused_by_field(given: dict[str, Any], text: str) -> None:
    with pytest.raises(WireError) as caught:
        read_chat(given)
    assert caught.value.code is ErrorCode.BAD_MESSAGE
    assert text in str(caught.value)


def test_payloads_are_decoded_with_and_without_prefix_and_line_breaks() -> None:
    data = bytes(range(256)) * (PIECE_CHARS // 128)
    text = base64.b64encode(data).decode()
    broken = "\n".join(text[start : start + 76] for start in range(0, len(text), 76))
    for given in (text, f"data:audio/wav;base64,{text}", broken):
        assert AudioContent(data=given).payload("sound") == data


def test_payloads_above_their_limit_are_refused_before_decoding() -> None:
    with pytest.raises(
        WireError, match=r"messages\[0\]\.content\[1\]\.data: expected at most 20 MiB, got 21 MiB"
    ) as caught:
        ImageContent(data="!" * math.ceil((MAX_PICTURE_BYTES + 2**20) / 3 * 4)).payload("messages[0].content[1]")
    assert caught.value.code is ErrorCode.TOO_LARGE


def test_containers_are_recognised_by_their_first_bytes() -> None:
    for data, expected in (
        (b"\0\0\0\x20ftypisom", "mov"),
        (b"\x1aE\xdf\xa3\x01", "matroska"),
        (b"RIFF\x10\0\0\0WAVEfmt ", "wav"),
        (b"RIFF\x10\0\0\0AVI LIST", "avi"),
        (b"OggS\0", "ogg"),
        (b"fLaC\0", "flac"),
        (b"ID3\x04\0", "mp3"),
        (b"\xff\xfb\x90\x64", "mp3"),
        (b"\xff\xf1\x50\x80", "aac"),
        (b"G" + bytes(187) + b"G", "mpegts"),
        (b"#EXTM3U\n", None),
        (b"ffconcat version 1.0", None),
        (b"", None),
    ):
        assert container_of(data) == expected, f"{data[:8]!r}: expected {expected}, got {container_of(data)}"


def test_float_samples_are_told_from_other_bytes() -> None:
    sound = np.sin(np.arange(1000)).astype("<f4")
    assert np.array_equal(raw_samples(sound.tobytes()), sound)
    random = np.random.default_rng(0).bytes(4000)
    for other in (b"", sound.tobytes()[:-1], random, np.full(8, np.nan, "<f4").tobytes(), b"RIFF" + sound.tobytes()):
        assert raw_samples(other) is None


def test_chunks_leave_out_what_they_lack() -> None:
    assert json.loads(write_message(ReplyChunk(text_delta="a"), "base64")) == {"type": "chunk", "text_delta": "a"}
    done = json.loads(write_message(SpokenReplyDone(text="a", generated_tokens=1, input_tokens=2), "base64"))
    assert done == {
        **{"type": "done", "text": "a", "generated_tokens": 1, "input_tokens": 2},
        **{"stopped": "stop", "audio_data": None},
    }
