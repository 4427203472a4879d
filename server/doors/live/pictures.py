"""Pictures of items: from an address to checked bytes. Decoding runs on a thread."""

import binascii
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image, UnidentifiedImageError

from server.access.connection_pace import pace_pixels
from server.access.shares import run_shared
from server.doors.core.picture_urls import MAX_PICTURE_BYTES, PictureUrlError, PictureUrls
from server.doors.live.event_error import invalid_value

MAX_PIXELS = 64_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,20};base64,", re.IGNORECASE)


async def picture_behind(url: str, picture_urls: PictureUrls, param: str = "item.content.image_url") -> bytes:
    """The encoded picture of a data URL, or behind an address of an allowed host. Raises: EventError."""
    if not picture_urls.allows(url):
        data = await run_shared(data_of, url, param)
    else:
        try:
            data = await picture_urls.fetch(url)
        except PictureUrlError as error:
            raise invalid_value(param, expected=error.expected, got=error.got) from None
    await pace_pixels(await run_shared(n_pixels_of, data, param))
    await run_shared(check_picture, data, param)
    return data


def data_of(url: str, param: str) -> bytes:
    """The bytes in a data URL of a picture. Slow. Raises: EventError."""
    found = DATA_URL.match(url[:64])
    if found is None:
        raise invalid_value(param, expected="a data URL of a picture in base64", got=url[:30])
    if len(url) > MAX_PICTURE_BYTES * 4 // 3 + 64:
        raise invalid_value(param, expected=f"at most {MAX_PICTURE_BYTES} bytes", got=f"{len(url)} characters")
    try:
        return binascii.a2b_base64(url[found.end() :])
    except ValueError as error:
        raise invalid_value(param, expected="base64", got=str(error)) from None


def n_pixels_of(data: bytes, param: str) -> int:
    """Pixels of a picture, of its header. Raises: EventError."""
    with _opened(data, param) as image:
        n_pixels = image.width * image.height
        if not 0 < n_pixels <= MAX_PIXELS:
            raise invalid_value(param, expected=f"at most {MAX_PIXELS} pixels", got=f"{image.width} x {image.height}")
        return n_pixels


def check_picture(data: bytes, param: str) -> None:
    """Check that a picture can be decoded. Slow. Raises: EventError."""
    with _opened(data, param) as image:
        image.draft("RGB", (image.width // 8, image.height // 8))  # decodes a JPEG in a fraction of the time
        image.load()


@contextmanager
def _opened(data: bytes, param: str) -> Iterator[Image.Image]:
    """The picture. Raises: EventError, also for what Pillow raises while it is used."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image
    except UnidentifiedImageError:
        raise invalid_value(param, expected="a JPEG, PNG, WEBP or GIF picture", got="another file") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise invalid_value(param, expected="a JPEG, PNG, WEBP or GIF picture", got=str(error)) from None
