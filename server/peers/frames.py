"""The messages between the gateway and a process that holds the connections of calls, and their encoding.

A frame is its length, its kind and the number of its call, then its data. Both ends trust each other: the link is a
pair of sockets that the gateway makes for the process.
"""

import asyncio
import struct
from enum import IntEnum
from typing import NamedTuple

HEAD = struct.Struct("<IBI")
NUMBER, POSITION = struct.Struct("<I"), struct.Struct("<Id")
MAX_UNSENT = 32 * 2**20  # bytes that the other end does not read


class FrameKind(IntEnum):
    """What a frame carries; its data in brackets.

    To the process: SETTINGS [JSON], OFFER [SDP], EVENT [text for the data channel], PLAY [number of the response, PCM16
    at 24 kHz], END [number], CLEAR, CLOSE, PING.
    From it: ANSWER [SDP], REFUSED [text], EVENT [text], HEARD [PCM16 at 16 kHz], PICTURE [JPEG], STARTED [number],
    STOPPED [number], CLEARED [number, ms sent], GONE [text], PONG.
    """

    SETTINGS = 1
    OFFER = 2
    EVENT = 3
    PLAY = 4
    END = 5
    CLEAR = 6
    CLOSE = 7
    ANSWER = 8
    REFUSED = 9
    HEARD = 10
    PICTURE = 11
    STARTED = 12
    STOPPED = 13
    CLEARED = 14
    GONE = 15
    PING = 16
    PONG = 17


class LinkFrame(NamedTuple):
    """One message. call: number of the call; 0: all."""

    kind: FrameKind
    call: int
    data: bytes


async def read_frame(reader: asyncio.StreamReader) -> LinkFrame:
    """The next frame. Raises: asyncio.IncompleteReadError at the end of the link; OSError."""
    length, kind, call = HEAD.unpack(await reader.readexactly(HEAD.size))
    return LinkFrame(FrameKind(kind), call, await reader.readexactly(length))


def write_frame(writer: asyncio.StreamWriter, kind: FrameKind, call: int, *parts: bytes) -> bool:
    """Send a frame; returns at once. Returns: false if the other end does not read, so that the frame is dropped."""
    transport = writer.transport
    if transport.is_closing() or transport.get_write_buffer_size() > MAX_UNSENT:
        return False
    writer.writelines((HEAD.pack(sum(map(len, parts)), kind, call), *parts))
    return True
