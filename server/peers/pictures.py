"""Pictures of a call's video track, a few for each second of it."""

import asyncio
import io
import time
from collections.abc import Callable

from aiortc import MediaStreamTrack
from aiortc.mediastreams import MediaStreamError
from av import VideoFrame
from PIL import Image

MAX_SIDE = 1280  # pixels
QUALITY = 85


async def take_pictures(track: MediaStreamTrack, per_s: float, found: Callable[[bytes], None]) -> None:
    """Take pictures until the track ends. found: gets each as a JPEG."""
    due = time.monotonic()
    while True:
        try:
            frame = await track.recv()  # all frames: aiortc keeps those that are not received
        except MediaStreamError:
            return
        now = time.monotonic()
        if now < due or not isinstance(frame, VideoFrame):
            continue
        due = max(due + 1 / per_s, now)
        found(await asyncio.to_thread(jpeg_of, frame))


def jpeg_of(frame: VideoFrame) -> bytes:
    """The picture as a JPEG with at most `MAX_SIDE` pixels a side. Slow: call it on a thread."""
    scale = min(1.0, MAX_SIDE / max(frame.width, frame.height))
    size = max(2, round(frame.width * scale)), max(2, round(frame.height * scale))
    image = Image.fromarray(frame.reformat(*size, format="rgb24").to_ndarray())
    out = io.BytesIO()
    image.save(out, "JPEG", quality=QUALITY)
    return out.getvalue()
