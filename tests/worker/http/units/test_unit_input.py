"""The pictures of a unit: counted, and measured by their headers."""

import asyncio
import base64
import io
from concurrent.futures import Future

import numpy as np
import pytest
from PIL import Image

from models.errors import ImageError
from models.inputs.image import EncodedImage
from worker.decoding import DecodingThreads
from worker.http.inbox import WaitingFrames, WaitingPicture
from worker.http.units import unit_input
from worker.http.units.unit_input import check_decided, decode_ahead, send_unit, unpacked_unit
from worker.http.units.unsent_sound import UnsentSound
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import MAX_UNIT_PICTURES, AudioChunk, VideoFrame, read_text
from worker.protocol.wire import MAX_PICTURE_BYTES, Sound, WireError

SOUND = Sound(np.zeros(16, np.float32))


def png(width: int = 8, height: int = 5) -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def chunk(*pictures: str) -> AudioChunk:
    return AudioChunk(audio_base64=SOUND, frame_base64_list=list(pictures))


def test_decisions_of_clients_are_not_hidden_from_the_gateway() -> None:
    """Which looks for the type at the start of a text; JSON keeps the last of two fields with the same name."""
    given = '"unit":1,"seed":0,"sampled":[],"remembered":[]'
    own = f'{{"type": "decided",{given}}}'
    check_decided(read_text(own), own)
    for hidden in (f'{{{given},"type":"decided"}}', f'{{"type":"audio_chunk",{given},"type":"decided"}}'):
        with pytest.raises(WireError, match="decided") as error:
            check_decided(read_text(hidden), hidden)
        assert error.value.code == ErrorCode.UNKNOWN_TYPE


def test_pictures_before_a_chunk_come_first() -> None:
    frame = WaitingPicture(VideoFrame(frame=png(7, 5)))
    samples, pictures = unpacked_unit(chunk(png(8, 5), png(9, 5)), [frame])
    assert [picture.size for picture in pictures] == [(7, 5), (8, 5), (9, 5)] and len(samples) == 16


def test_too_many_pictures_and_pixels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [WaitingPicture(VideoFrame(frame=png()))]
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


class Handle:
    """The part of a `SessionHandle` that decodes: it names a picture's slices by its width and their limit."""

    max_early_slices = 2

    def __init__(self) -> None:
        self.ahead: list[str] = []
        self.units: list[list[str]] = []

    def slice_limits(self, n_frames: int, given: int | None) -> list[int]:
        return [given or 3] * n_frames

    def cut(self, picture: EncodedImage, limit: int) -> list[str]:
        return [f"{picture.size[0]} wide, {limit} slices"]

    def send_ahead(self, picture: EncodedImage, limit: int) -> list[str]:
        self.ahead += self.cut(picture, limit)
        return self.ahead[-1:]

    def send(self, samples: np.ndarray, cut: list[list[str]], **given: object) -> Future[None]:
        self.units.append([name for slices in cut for name in slices])
        return Future()


@pytest.mark.parametrize(("limit", "again"), [(None, 1), (3, 1), (5, 3)])
def test_pictures_decoded_ahead_are_not_decoded_again(limit: int | None, again: int) -> None:
    """Two are decoded ahead, as many as the engine takes; again when the chunk wants other slices."""
    handle, decoders, frames, decoded = Handle(), DecodingThreads(), WaitingFrames(10**6), []

    def cut(picture: EncodedImage, limit: int) -> list[str]:
        decoded.append(picture.size[0])
        return Handle.cut(handle, picture, limit)

    async def scenario() -> None:
        for width in (4, 5, 6):
            frame = frames.add(VideoFrame(frame=png(width)), 1)
            await decode_ahead(decoders, handle, frames, frame)
        handle.cut = cut
        given = AudioChunk(audio_base64=SOUND, max_slice_nums=limit)
        await send_unit(decoders, handle, UnsentSound(), given, frames.take(), None, may_hold=False)

    asyncio.run(scenario())
    decoders.close()
    assert handle.ahead == ["4 wide, 3 slices", "5 wide, 3 slices"]
    assert handle.units == [[f"{width} wide, {limit or 3} slices" for width in (4, 5, 6)]]
    assert len(decoded) == again, f"expected {again} decoded with the unit, got {decoded}"


def test_pictures_with_slices_of_their_own_leave_the_chunks_to_the_others() -> None:
    handle, decoders, frames = Handle(), DecodingThreads(), WaitingFrames(10**6)

    async def scenario() -> None:
        for width, limit in ((4, 5), (5, None)):
            frame = frames.add(VideoFrame(frame=png(width), max_slice_nums=limit), 1)
            await decode_ahead(decoders, handle, frames, frame)
        given = AudioChunk(audio_base64=SOUND, frame_base64_list=[png(6)], max_slice_nums=2)
        await send_unit(decoders, handle, UnsentSound(), given, frames.take(), None, may_hold=False)

    asyncio.run(scenario())
    decoders.close()
    assert handle.ahead == ["4 wide, 5 slices", "5 wide, 3 slices"]
    assert handle.units == [["4 wide, 5 slices", "5 wide, 2 slices", "6 wide, 2 slices"]]


@pytest.mark.parametrize("data", ["?", base64.b64encode(b"no picture").decode()])
def test_bad_pictures_are_refused_with_their_chunk(data: str) -> None:
    handle, decoders, frames = Handle(), DecodingThreads(), WaitingFrames(10**6)
    asyncio.run(decode_ahead(decoders, handle, frames, frames.add(VideoFrame(frame=data), 1)))
    decoders.close()
    assert not handle.ahead
    with pytest.raises((WireError, ImageError)):
        unpacked_unit(chunk(), frames.take())
