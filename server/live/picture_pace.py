"""The pixels of pictures in clients' messages, counted against the connection's rate before a worker decodes them."""

import io
import re

from PIL import Image, UnidentifiedImageError

from server.access.connection_pace import pace_pixels
from server.access.shares import run_shared
from worker.protocol.messages import VideoFrame
from worker.protocol.takeover.message_bytes import Data
from worker.protocol.wire import WireError, picture_bytes, read_header, read_object, unpack_frame

MAX_PIXELS = 2**26  # a worker decodes no larger picture
LISTS = ("frame_base64_list", "video_frames")
# A picture, a list that is not empty, and escapes that may hide them.
PICTURES = re.compile(rf'"{VideoFrame.kind()}"|"(?:{"|".join(LISTS)})"\s*:\s*\[\s*"|\\u00[567]')


async def pace_pictures(data: Data) -> None:
    """Wait until the connection that is served may have the pictures of a message decoded."""
    if _may_have_pictures(data):
        await pace_pixels(await run_shared(pixels_in, data))


def _may_have_pictures(data: Data) -> bool:
    if isinstance(data, str):
        return PICTURES.search(data) is not None
    try:
        return bool(read_header(data).get("frame_bytes"))
    except WireError:
        return False


def pixels_in(data: Data) -> int:
    """Pixels of the pictures in a message. Slow. Invalid pictures, which the worker refuses, have none."""
    try:
        message, _, pictures = (read_object(data), b"", []) if isinstance(data, str) else unpack_frame(data)
    except WireError:
        return 0
    given: list[object] = [message.get("frame"), *pictures]
    for name in LISTS:
        found = message.get(name)
        given += found if isinstance(found, list) else []
    return sum(picture_pixels(one) for one in given if isinstance(one, str | bytes))


def picture_pixels(picture: str | bytes) -> int:
    """Pixels of an encoded picture, of its header. Slow. picture: base64 or bytes."""
    try:
        with Image.open(io.BytesIO(picture_bytes(picture, "picture"))) as image:
            n_pixels = image.width * image.height
    except (WireError, UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError):
        return 0
    return n_pixels if n_pixels <= MAX_PIXELS else 0
