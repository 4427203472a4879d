"""How much sound and how many pictures messages have, without decoding them."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from worker.protocol.messages import VideoFrame
from worker.protocol.takeover.message_bytes import Data
from worker.protocol.takeover.message_sound import CHARS_PER_SAMPLE, frame_samples
from worker.protocol.wire import WireError, read_header

RATE_IN = 16_000
SOUND_FIELD = re.compile(r'"audio(?:_base64)?"\s*:\s*"')
PICTURES_FIELD = re.compile(r'"(?:frame_base64_list|video_frames)"\s*:\s*\[')
FRAME = re.compile(rf'"type"\s*:\s*"{VideoFrame.kind()}"')


class InputContent(NamedTuple):
    """What a client has sent. sound_s: seconds of sound."""

    sound_s: float
    n_pictures: int

    def __add__(self, other: tuple[object, ...]) -> "InputContent":
        """Both together."""
        assert isinstance(other, InputContent), f"expected InputContent, got {type(other).__name__}"
        return InputContent(self.sound_s + other.sound_s, self.n_pictures + other.n_pictures)


NO_INPUT = InputContent(0.0, 0)


def input_content(messages: Iterable[Data], sound_in: str) -> InputContent:
    """Sound and pictures of messages of a client.

    Args:
        messages: chunks, pictures and others.
        sound_in: encoding of the sound in binary frames.
    """
    total = NO_INPUT
    for data in messages:
        total += _of_frame(data, sound_in) if isinstance(data, bytes) else _of_text(data)
    return total


def _of_frame(data: bytes, sound_in: str) -> InputContent:
    try:
        frames = read_header(data).get("frame_bytes")
    except WireError:
        return NO_INPUT
    return InputContent(frame_samples(data, sound_in) / RATE_IN, len(frames) if isinstance(frames, list) else 0)


def _of_text(data: str) -> InputContent:
    if FRAME.search(data, 0, 100):
        return InputContent(0.0, 1)
    seconds, n_pictures = 0.0, 0
    if found := SOUND_FIELD.search(data):
        seconds = max(0, data.find('"', found.end()) - found.end()) / CHARS_PER_SAMPLE / RATE_IN
    if found := PICTURES_FIELD.search(data):
        n_pictures = data.count('"', found.end(), max(found.end(), data.find("]", found.end()))) // 2
    return InputContent(seconds, n_pictures)
