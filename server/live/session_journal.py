"""What rebuilds the context of a duplex session on another worker: its messages, and the decisions of its units.

Matches the worker's answers with the client's messages, which are answered in order. Contains no sockets.
"""

from collections import deque
from typing import Any, NamedTuple

from server.live.inbox import ByteBudget, Data, size_of
from server.live.streaming import TYPE_FIRST
from worker.protocol.gateway_messages import Decided
from worker.protocol.messages import AudioChunk, Error, Partial, Prepare, Prepared, Result, VideoFrame
from worker.protocol.wire import WireError, read_header, read_object

MAX_BYTES, MAX_UNITS = 16 * 2**20, 240  # of one session
MAX_BYTES_TOTAL = 512 * 2**20  # of all sessions
MAX_PARSED = 2**18  # a longer text that does not begin with its type is not parsed
DECIDED, CHUNK, FRAME = (one.kind() for one in (Decided, AudioChunk, VideoFrame))
PREPARE, PREPARED, RESULT, PARTIAL, ERROR = (one.kind() for one in (Prepare, Prepared, Result, Partial, Error))
KEPT = frozenset({"adjusted", "text_inserted", "paused", "resumed"})
ANSWERS = KEPT | {PREPARED, RESULT, ERROR, "interrupted", "stopped"}


class OpenMessage(NamedTuple):
    """A message of the client without an answer. n_bytes: of memory."""

    kind: str
    data: Data
    n_bytes: int


class Step(NamedTuple):
    """Messages that are sent again before one answer. is_decided: they end a unit."""

    messages: tuple[Data, ...]
    kind: str
    is_decided: bool
    n_bytes: int


class SessionJournal:
    """The messages of one session since its last `prepare`.

    Args:
        budget: bytes of all journals.

    Attributes:
        n_omitted: units that are not kept any more.
    """

    def __init__(self, budget: ByteBudget):
        self._budget = budget
        self._steps: deque[Step] = deque()
        self._open: deque[OpenMessage] = deque()
        self._decided: Data | None = None
        self._n_bytes = self._n_units = 0
        self._n_parts = self._n_skipped = 0  # partial results of the open unit: sent to the client; not sent again
        self._suspect: Data | None = None  # the chunk that ran when a worker was lost
        self._is_kept, self._is_whole = True, True
        self.n_omitted = 0

    @property
    def steps(self) -> tuple[Step, ...]:
        """What rebuilds the context, in order."""
        return tuple(self._steps)

    @property
    def unanswered(self) -> tuple[Data, ...]:
        """Messages that the next worker has to answer, in order."""
        return tuple(one.data for one in self._open)

    @property
    def n_units(self) -> int:
        """Units that can be rebuilt."""
        return self._n_units

    @property
    def n_chunks(self) -> int:
        """Chunks without an answer."""
        return sum(one.kind == CHUNK for one in self._open)

    @property
    def can_rebuild(self) -> bool:
        """Whether the session can go on with another worker."""
        return self._is_kept and self._is_whole and bool(self._steps)

    # --- messages ------------------------------------------------------------------------------

    def sent(self, data: Data) -> bool:
        """Record a message to the worker. Returns: False for one that no client may send."""
        kind = _kind_of(data)
        if kind == DECIDED:
            return False
        if not self._is_kept and kind != PREPARE:
            return True
        if kind == PREPARE:
            self._is_kept = True
        message = OpenMessage(kind, data, size_of(data))
        self._open.append(message)
        self._hold(message.n_bytes)
        return True

    def answered(self, kind: str, data: Data, header: dict[str, Any]) -> bool:
        """Record a message of the worker. Returns: whether the client must not have it."""
        if kind == DECIDED:
            self._decided = data
            return True
        if kind == PARTIAL:
            is_repeated, self._n_skipped = self._n_skipped > 0, max(0, self._n_skipped - 1)
            self._n_parts += not is_repeated
            return is_repeated
        if kind in ANSWERS and self._is_kept:
            self._close(kind, header)
        return False

    def keep(self, is_kept: bool) -> None:
        """Whether the session that has just been prepared goes on with another worker."""
        self._is_kept = is_kept
        if not is_kept:
            self.clear()

    def _close(self, kind: str, header: dict[str, Any]) -> None:
        """Take the message that an answer belongs to from the open ones."""
        messages: list[Data] = []
        n_bytes = 0
        while self._open:
            message = self._open.popleft()
            n_bytes += message.n_bytes
            if message.kind != FRAME:
                break
            messages.append(message.data)
        else:
            self._hold(-n_bytes)  # an error that refuses a picture
            self._is_whole = self._is_whole and kind == ERROR
            return
        decided, self._decided = self._decided, None
        if kind != ERROR and (kind == RESULT) != (message.kind == CHUNK):
            self._is_whole = False  # an error that refused a picture was taken for that of a chunk
        if message.kind == CHUNK:
            self._n_parts = self._n_skipped = 0
        if kind == PREPARED:
            self._forget_steps()
            self._hold(message.n_bytes - n_bytes)  # pictures that waited are forgotten by the worker too
            messages, n_bytes = [], message.n_bytes
            self._is_whole = True
        elif kind == RESULT:
            if decided is not None:
                messages.append(decided)
                n_bytes += size_of(decided)
                self._hold(size_of(decided))
            elif header.get("incomplete") is not True:
                self._is_whole = False  # a worker that does not tell its decisions
        elif kind not in KEPT:
            self._hold(-n_bytes)
            return
        self._steps.append(Step((*messages, message.data), kind, decided is not None, n_bytes))
        self._n_units += decided is not None
        self._bound()

    def _bound(self) -> None:
        """Drop the oldest units above the bounds. The prompt, texts and changes of settings stay."""
        while self._n_units > MAX_UNITS or self._n_bytes > MAX_BYTES or self._budget.is_exhausted:
            units = [step for step in self._steps if step.kind == RESULT]
            if not units:
                return
            for step in units:  # the pieces of a unit go with it
                self._steps.remove(step)
                self._hold(-step.n_bytes)
                if step.is_decided:
                    self._n_units -= 1
                    self.n_omitted += 1
                    break

    # --- a lost worker -------------------------------------------------------------------------

    def lose_worker(self) -> bool:
        """Prepare for another worker. Returns: whether the oldest chunk is dropped, as it ran at two losses."""
        self._decided = None
        self._n_skipped = self._n_parts
        chunk = next((one for one in self._open if one.kind == CHUNK), None)
        is_second = chunk is not None and chunk.data is self._suspect
        self._suspect = None if chunk is None or is_second else chunk.data
        if chunk is not None and is_second:
            self._n_parts = self._n_skipped = 0
            self._open.remove(chunk)
            self._hold(-chunk.n_bytes)
        return is_second

    def clear(self) -> None:
        """Forget everything and return the memory to the budget."""
        self._forget_steps()
        self._hold(-sum(one.n_bytes for one in self._open))
        self._open.clear()

    def _forget_steps(self) -> None:
        self._hold(-sum(step.n_bytes for step in self._steps))
        self._steps.clear()
        self._n_units = self.n_omitted = 0
        self._suspect = None

    def _hold(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        self._budget.used += n_bytes


def _kind_of(data: Data) -> str:
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
