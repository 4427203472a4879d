"""What of one client waits, bounded by the memory it takes: messages for their answer, pictures for their unit.

For one event loop.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from models.inputs.image import EncodedImage
from worker.loop.session_handle import CutImage
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import MAX_UNIT_PICTURES, VideoFrame
from worker.protocol.wire import WireError

MIN_BYTES = 1024  # memory that any message takes, however short

Incoming = TypeVar("Incoming")


class InboxClosedError(Exception):
    """The inbox is closed."""


class PendingMessage(NamedTuple, Generic[Incoming]):
    """A message that waits. n_bytes: the memory it takes. received: monotonic seconds."""

    message: Incoming
    n_bytes: int
    received: float


class MessageInbox(Generic[Incoming]):
    """The waiting messages, oldest first."""

    def __init__(self, max_bytes: int):
        """max_bytes: `put` waits while the messages take more."""
        self._max_bytes, self._n_bytes = max_bytes, 0
        self._waiting: deque[PendingMessage[Incoming]] = deque()
        self._changed, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[PendingMessage[Incoming]]:
        return iter(self._waiting)

    async def wait_for_room(self) -> None:
        """Wait until `put` accepts a message."""
        await self._has_room.wait()

    def put(self, message: Incoming, n_bytes: int, received: float) -> None:
        """Append a message. n_bytes: its size on the wire. received: time of arrival, monotonic seconds."""
        n_bytes = max(n_bytes, MIN_BYTES)
        self._waiting.append(PendingMessage(message, n_bytes, received))
        self._n_bytes += n_bytes
        if self._n_bytes > self._max_bytes:
            self._has_room.clear()
        self._changed.set()

    async def get(self, deadline: float | None) -> PendingMessage[Incoming]:
        """The oldest message.

        Args:
            deadline: limit of the wait for a message, on the event loop's clock; None: no limit.
        Raises:
            TimeoutError: at the deadline.
            InboxClosedError: after `close`, also while messages wait.
        """
        while not self._waiting or self._is_closed:
            if self._is_closed:
                raise InboxClosedError
            self._changed.clear()
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()
        pending = self._waiting.popleft()
        self._n_bytes -= pending.n_bytes
        if self._n_bytes <= self._max_bytes:
            self._has_room.set()
        return pending

    def close(self) -> None:
        """Give no message from now on."""
        self._is_closed = True
        self._changed.set()


class AheadPicture(NamedTuple):
    """A picture that is decoded before its chunk. opened: the file. limit: most slices of `slices`."""

    opened: EncodedImage
    limit: int
    slices: CutImage


@dataclass(eq=False)
class WaitingPicture:
    """A picture that waits for its chunk. ahead: None if it is decoded with the chunk."""

    message: VideoFrame
    ahead: AheadPicture | None = None


class WaitingFrames:
    """The pictures of `video_frame` messages that wait for the next chunk."""

    def __init__(self, max_bytes: int):
        """max_bytes: they may take together."""
        self._max_bytes, self._n_bytes = max_bytes, 0
        self._frames: list[WaitingPicture] = []

    def add(self, frame: VideoFrame, n_bytes: int) -> WaitingPicture:
        """Keep a picture. n_bytes: its size on the wire. Raises: WireError backlog_full."""
        if len(self._frames) >= MAX_UNIT_PICTURES or self._n_bytes + n_bytes > self._max_bytes:
            expected = f"at most {MAX_UNIT_PICTURES} of {self._max_bytes} bytes in total before a chunk"
            raise WireError(ErrorCode.BACKLOG_FULL, "video_frame", expected=expected, got="one more")
        self._n_bytes += n_bytes
        self._frames.append(picture := WaitingPicture(frame))
        return picture

    @property
    def ahead(self) -> list[AheadPicture]:
        """The pictures that are decoded already."""
        return [one.ahead for one in self._frames if one.ahead is not None]

    def take(self) -> list[WaitingPicture]:
        """Remove all pictures. Returns: them, oldest first."""
        frames, self._frames, self._n_bytes = self._frames, [], 0
        return frames
