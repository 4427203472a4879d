"""Pictures of items: from an address to checked bytes. Decoding runs on a thread."""

import asyncio
import binascii
import io
import re
from concurrent.futures import ThreadPoolExecutor

from PIL import Image, UnidentifiedImageError

from server.doors.core.picture_urls import MAX_PICTURE_BYTES, PictureUrlError, PictureUrls
from server.doors.live.event_error import invalid_value

MAX_PIXELS = 64_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,20};base64,", re.IGNORECASE)
POOL = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pictures")


async def picture_behind(url: str, picture_urls: PictureUrls, param: str = "item.content.image_url") -> bytes:
    """The encoded picture of a data URL, or behind an address of an allowed host. Raises: EventError."""
    loop = asyncio.get_running_loop()
    if not picture_urls.allows(url):
        return await loop.run_in_executor(POOL, picture_of, url, param)
    try:
        data = await picture_urls.fetch(url)
    except PictureUrlError as error:
        raise invalid_value(param, expected=error.expected, got=error.got) from None
    return await loop.run_in_executor(POOL, checked_picture, data, param)


def picture_of(url: str, param: str = "item.content.image_url") -> bytes:
    """The encoded picture in a data URL, which can be decoded. Slow. Raises: EventError."""
    found = DATA_URL.match(url[:64])
    if found is None:
        raise invalid_value(param, expected="a data URL of a picture in base64", got=url[:30])
    if len(url) > MAX_PICTURE_BYTES * 4 // 3 + 64:
        raise invalid_value(param, expected=f"at most {MAX_PICTURE_BYTES} bytes", got=f"{len(url)} characters")
    try:
        data = binascii.a2b_base64(url[found.end() :])
    except ValueError as error:
        raise invalid_value(param, expected="base64", got=str(error)) from None
    return checked_picture(data, param)


def checked_picture(data: bytes, param: str) -> bytes:
    """The same bytes, if they are a picture that can be decoded. Slow. Raises: EventError."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if not 0 < image.width * image.height <= MAX_PIXELS:
                raise invalid_value(
                    param, expected=f"at most {MAX_PIXELS} pixels", got=f"{image.width} x {image.height}"
                )
            image.draft("RGB", (image.width // 8, image.height // 8))  # decodes a JPEG in a fraction of the time
            image.load()
    except UnidentifiedImageError:
        raise invalid_value(param, expected="a JPEG, PNG, WEBP or GIF picture", got="another file") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise invalid_value(param, expected="a JPEG, PNG, WEBP or GIF picture", got=str(error)) from None
    return data
