"""Messages as they are on the wire: their size in memory, a bound of it, and their type. Torch-free."""

import re
import sys
from dataclasses import dataclass

from worker.protocol.wire import WireError, read_header, read_object

Data = str | bytes
OVERHEAD = 256  # bytes of memory counted for each message on top of its own size, so that empty ones count too
TYPE_FIRST = re.compile(r'\s*\{\s*"type"\s*:\s*"([a-z_]{1,40})"')
MAX_PARSED = 2**18  # a longer text that does not begin with its type is not parsed


@dataclass
class ByteBudget:
    """Memory limit shared by all inboxes or journals, in bytes. Each may hold one message even if it is used up.

    n_journals: journals that hold bytes.
    """

    max_bytes: int
    used: int = 0
    n_journals: int = 0

    @property
    def is_exhausted(self) -> bool:
        return self.used >= self.max_bytes

    @property
    def journal_share(self) -> int:
        """Bytes that a journal may hold while the limit is used up, so that others do not cost it its units."""
        return self.max_bytes // max(1, self.n_journals)


def size_of(data: Data) -> int:
    """Bytes of memory that a message takes. A character of text takes up to four."""
    return sys.getsizeof(data) + OVERHEAD


def type_of(data: Data) -> str:
    """The type of a client's message; "" if it is not known."""
    try:
        if isinstance(data, bytes):
            kind = read_header(data).get("type")
        elif found := TYPE_FIRST.match(data):
            return found[1]
        else:
            kind = read_object(data).get("type") if len(data) <= MAX_PARSED else None
    except WireError:
        return ""
    return kind if isinstance(kind, str) else ""
