"""The kinds of a socket's messages that have limits of their own, found without parsing the message.

A message may have 128 MiB, so it is scanned piece by piece and the event loop runs in between. The scan is stricter
than a parser: a message that hides its type behind escapes counts as a preparation. No encoder of JSON writes one.
"""

import asyncio
import re

from server.access.limit import Limit
from worker.protocol.wire import MAX_HEADER_BYTES

PIECE = 2**18  # characters
OVERLAP = 512  # longer than a key with its value
HEADER_LENGTH = 4  # bytes before the header of a binary frame
TYPE = re.compile(r'"type"\s{0,100}:\s{0,100}"([^"\\]{0,100})"')
# What no encoder of JSON writes, and what would hide a type from the scan: escaped small letters, escapes in the type,
# and more space around it than the overlap covers.
HIDDEN = re.compile(r'\\u00[67]|"type"\s{0,100}:\s{0,100}"[^"\\]{0,100}\\|"type"\s{0,100}:?\s{101}')
KINDS = {
    **dict.fromkeys(("prepare", "session.update", "session.init", "session.start"), Limit.PREPARES),
    **dict.fromkeys(
        (
            "interrupt",
            "pause",
            "insert_text",
            "response.create",
            "response.cancel",
            "input_audio_buffer.commit",
            "input_audio_buffer.clear",
            "output_audio_buffer.clear",
            "conversation.item.truncate",
            "turn.signal",
        ),
        Limit.INTERRUPTS,
    ),
}


async def limits_of(data: str | bytes) -> set[Limit]:
    """The limits that a message counts against, besides those of all messages."""
    if isinstance(data, bytes):
        n_header = min(int.from_bytes(data[:HEADER_LENGTH], "little"), MAX_HEADER_BYTES)
        data = data[HEADER_LENGTH : HEADER_LENGTH + n_header].decode("latin-1")
    found: set[Limit] = set()
    for start in range(0, len(data), PIECE):
        if start:
            await asyncio.sleep(0)
        found |= _limits_in(data[max(0, start - OVERLAP) : start + PIECE])
    return found


def _limits_in(text: str) -> set[Limit]:
    found = {Limit.PREPARES} if HIDDEN.search(text) else set()
    for match in TYPE.finditer(text):
        if (limit := KINDS.get(match[1])) is not None:
            found.add(limit)
    return found
