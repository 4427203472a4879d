"""The pictures of a unit: counted, and measured by their headers."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from models.errors import ImageError
from worker.http import unit_input
from worker.http.unit_input import unpacked_unit
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import MAX_UNIT_PICTURES, AudioChunk, VideoFrame
from worker.protocol.wire import MAX_PICTURE_BYTES, Sound, WireError

SOUND = Sound(np.zeros(16, np.float32))


def png(width: int = 8, height: int = 5) -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def chunk(*pictures: str) -> AudioChunk:
    return AudioChunk(audio_base64=SOUND, frame_base64_list=list(pictures))


def test_pictures_before_a_chunk_come_first() -> None:
    samples, pictures = unpacked_unit(chunk(png(8, 5), png(9, 5)), [VideoFrame(frame=png(7, 5))])
    assert [picture.size for picture in pictures] == [(7, 5), (8, 5), (9, 5)] and len(samples) == 16


def test_too_many_pictures_and_pixels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [VideoFrame(frame=png())]
    assert len(unpacked_unit(chunk(*(MAX_UNIT_PICTURES - 1) * [png()]), frames)[1]) == MAX_UNIT_PICTURES
    with pytest.raises(WireError, match="expected at most 32 pictures in a unit, got 33") as refused:
        unpacked_unit(chunk(*MAX_UNIT_PICTURES * [png()]), frames)
    assert refused.value.code is ErrorCode.TOO_LARGE
    monkeypatch.setattr(unit_input, "MAX_UNIT_PIXELS", 80)
    assert len(unpacked_unit(chunk(png()), frames)[1]) == 2
    with pytest.raises(WireError, match="expected at most 80 pixels in the pictures of a unit, got 81"):
        unpacked_unit(chunk(png(41, 1)), frames)


@pytest.mark.parametrize("picture", ["!" * (4 * MAX_PICTURE_BYTES // 3 + 4), b"x" * (MAX_PICTURE_BYTES + 1)])
def test_large_files_are_refused_before_decoding(picture: str | bytes) -> None:
    with pytest.raises(WireError, match=r"frame_base64_list\[0\]: expected at most 20 MiB, got 20 MiB") as refused:
        unpacked_unit(AudioChunk(audio_base64=SOUND, frame_base64_list=[picture]), [])
    assert refused.value.code is ErrorCode.TOO_LARGE


def test_files_of_another_kind_are_refused_without_addresses() -> None:
    with pytest.raises(ImageError, match=r"expected bytes of JPEG, .*, got a file of another kind$"):
        unpacked_unit(chunk(base64.b64encode(b"no picture").decode()), [])
