"""Sound and pictures of one unit, from the client's messages; their limits. Slow: call on a thread."""

from collections.abc import Sequence

import numpy as np

from models.inputs.image import EncodedImage
from worker.loop.audio_buffer import checked
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import MAX_UNIT_PICTURES, MAX_UNIT_PIXELS, AudioChunk, VideoFrame
from worker.protocol.wire import WireError


def unpacked_unit(chunk: AudioChunk, frames: Sequence[VideoFrame]) -> tuple[np.ndarray, list[EncodedImage]]:
    """The sound, [n] float32 at 16 kHz, and the pictures, whose headers are valid and whose pixels are not decoded.

    Args:
        chunk: the unit.
        frames: pictures that came before it.
    Raises: WireError bad_base64, bad_audio, bad_image, too_large; AudioError; ImageError.
    """
    n_pictures = len(frames) + len(chunk.frame_base64_list)
    if n_pictures > MAX_UNIT_PICTURES:
        raise _too_large(f"at most {MAX_UNIT_PICTURES} pictures in a unit", n_pictures)
    encoded, samples = [*(frame.picture() for frame in frames), *chunk.pictures()], checked(chunk.samples())
    pictures = [EncodedImage.of(data) for data in encoded]
    n_pixels = sum(picture.n_pixels for picture in pictures)
    if n_pixels > MAX_UNIT_PIXELS:
        raise _too_large(f"at most {MAX_UNIT_PIXELS} pixels in the pictures of a unit", n_pixels)
    return samples, pictures


def _too_large(expected: str, got: int) -> WireError:
    return WireError(ErrorCode.TOO_LARGE, "audio_chunk.frame_base64_list", expected=expected, got=got)
