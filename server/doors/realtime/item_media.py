"""The pictures and the sound of an item that a client creates. Decoding runs on threads."""

from dataclasses import dataclass, field

import numpy as np

from server.access.shares import run_shared
from server.doors.core.picture_urls import PictureUrls
from server.doors.live.pictures import picture_behind
from server.doors.live.sound.wire_sound import SoundInput, WireFormat
from server.doors.realtime.events.client_events import GivenItem, decoded_sound


@dataclass
class ItemMedia:
    """Media of an item. pictures: encoded, with their slices. sound: [n] float32 at 16 kHz."""

    pictures: list[tuple[bytes, int]] = field(default_factory=list)
    sound: np.ndarray | None = None


async def media_of(given: GivenItem, form: WireFormat, max_slices: int, picture_urls: PictureUrls) -> ItemMedia:
    """The media of an item.

    Args:
        given: as the client has sent it.
        form: of the sound.
        max_slices: of a picture with the detail `high`.
        picture_urls: fetches pictures from allowed hosts.
    Raises: EventError.
    """
    media = ItemMedia()
    for part in given.content:
        if part.type == "input_image":
            data = await picture_behind(part.image_url or "", picture_urls)
            media.pictures.append((data, max_slices if part.detail == "high" else 1))
    sounds = [decoded_sound(part.audio, "item.content.audio") for part in given.content if part.audio]
    if sounds:
        media.sound = await run_shared(SoundInput(form).push, b"".join(sounds))
    return media
