"""Messages in binary frames: a header, sound and pictures."""

import struct
from typing import Any

import numpy as np
import pytest

from tests.worker.protocol.message_helpers import PICTURE
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import AudioChunk, Spec, read_binary, read_server, read_text, write
from worker.protocol.wire import Form, WireError, pack_frame


@pytest.mark.parametrize("form", ["pcm16", "float32"])
def test_reads_binary_chunks(form: Form) -> None:
    spec = Spec(sound_in=form)
    samples = np.array([0.5, -0.25], np.float32)
    chunk = AudioChunk(audio_base64=samples, frame_base64_list=[PICTURE, PICTURE * 2], max_slice_nums=[1, 2])
    data = write(chunk, spec)
    header = b'{"type":"audio_chunk","force_listen":false,"force_speak":false,"close_early":false,'
    header += b'"max_slice_nums":[1,2],"audio_bytes":'
    header += b'%d,"frame_bytes":[4,8]}' % (4 if form == "pcm16" else 8)
    sound = b"\x00\x40\x00\xe0" if form == "pcm16" else struct.pack("<2f", 0.5, -0.25)
    assert data == struct.pack("<I", len(header)) + header + sound + PICTURE * 3, data
    got = read_binary(data, spec)
    assert got.samples().tolist() == [0.5, -0.25] and got.pictures() == [PICTURE, PICTURE * 2]
    assert got.max_slice_nums == [1, 2] and write(got, spec) == data
    assert read_text(write(got)).pictures() == [PICTURE, PICTURE * 2], "expected base64 where nothing is agreed"


def test_refuses_binary_frames_without_agreement() -> None:
    data = write(AudioChunk(audio_base64=np.zeros(2, np.float32)), Spec(sound_in="pcm16"))
    for read, spec in ((read_binary, Spec(sound_out="pcm16")), (read_server, Spec(sound_in="pcm16"))):
        with pytest.raises(WireError) as caught:
            read(data, spec)
        assert caught.value.code == ErrorCode.BINARY_NOT_AGREED
        assert str(caught.value) == "message: expected a text frame, since base64 is agreed on, got a binary frame"


@pytest.mark.parametrize(
    ("header", "sound", "pictures", "text"),
    [
        ({"type": "prepare"}, b"", [], "binary frame's type: expected audio_chunk, got prepare"),
        ({"type": "hello"}, b"", [], "Unknown message type: hello"),
        ({}, b"ab", [], "message.type: expected text, got nothing"),
        ({"type": "audio_chunk"}, b"", [PICTURE], "Missing audio_base64"),
        (
            {"type": "audio_chunk", "force_listen": 1},
            b"ab",
            [],
            "audio_chunk.force_listen: expected true or false, got",
        ),
    ],
)
def test_refuses_invalid_binary_chunks(header: dict[str, Any], sound: bytes, pictures: list[bytes], text: str) -> None:
    with pytest.raises(WireError) as caught:
        read_binary(pack_frame(header, sound, pictures), Spec(sound_in="pcm16"))
    assert str(caught.value).startswith(text), caught.value


def test_invalid_sound_is_refused_when_decoded() -> None:
    chunk = read_binary(pack_frame({"type": "audio_chunk"}, b"abc", [b""]), Spec(sound_in="pcm16"))
    with pytest.raises(WireError, match=r"audio_chunk.audio_base64: expected 2 bytes a sample, got 3 bytes"):
        chunk.samples()
    with pytest.raises(WireError, match=r"audio_chunk.frame_base64_list\[0\]: expected a picture, got no bytes"):
        chunk.pictures()


def test_refuses_pictures_in_server_frames() -> None:
    data = pack_frame({"type": "partial", "current_time": 1, "part": 1}, b"ab", [PICTURE])
    with pytest.raises(WireError, match="frame_bytes: expected none, got 1"):
        read_server(data, Spec(sound_out="pcm16"))
