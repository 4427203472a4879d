"""The parts of a session journal: messages with answers, and the journal as a gateway receives it. Torch-free."""

from typing import Literal, NamedTuple

from pydantic import Field

from worker.protocol.codec import FromServer, Reader
from worker.protocol.codes import ErrorCode
from worker.protocol.gateway_messages import Decided
from worker.protocol.messages import (
    AudioChunk,
    Error,
    Interrupted,
    Partial,
    Paused,
    Prepare,
    Prepared,
    Result,
    Resumed,
    VideoFrame,
    write,
)
from worker.protocol.takeover.message_bytes import Data
from worker.protocol.takeover.message_content import NO_INPUT, InputContent
from worker.protocol.takeover.slot_messages import KeepSlot

DECIDED, CHUNK, FRAME, KEEP = (one.kind() for one in (Decided, AudioChunk, VideoFrame, KeepSlot))
PREPARE, PREPARED, RESULT, PARTIAL, ERROR = (one.kind() for one in (Prepare, Prepared, Result, Partial, Error))
PAUSED, RESUMED, INTERRUPTED = (one.kind() for one in (Paused, Resumed, Interrupted))
MAX_DEATHS = 2  # workers lost while a message was the next to be answered, after which it is dropped
STEPS = frozenset({RESULT, "adjusted", "text_inserted", PAUSED, INTERRUPTED})  # their messages affect later units
ANSWERS = STEPS | {PREPARED, ERROR, RESUMED, "stopped"}
# Errors of a picture as well as of the chunk after it: which one was refused is not known.
OF_PICTURES = frozenset(
    {
        ErrorCode.BAD_JSON,
        ErrorCode.BAD_MESSAGE,
        ErrorCode.BACKLOG_FULL,
        ErrorCode.TOO_LARGE,
        ErrorCode.BINARY_NOT_AGREED,
    }
)
# In front of a piece of a unit that is sent again, so that the piece is not run early.
UNDECIDED = write(Decided(unit=1, seed=0, sampled=[], remembered=[]))


class OpenMessage(NamedTuple):
    """A message of the client without an answer. n_bytes: of memory. n_deaths: workers lost while it was next."""

    kind: str
    data: Data
    n_bytes: int
    n_deaths: int = 0


class Step(NamedTuple):
    """Messages that are sent again before one answer.

    is_decided: they end a unit. goes_on: its turn goes on. n_deaths: workers lost while the answer was next.
    """

    messages: tuple[Data, ...]
    kind: str
    is_decided: bool
    n_bytes: int
    goes_on: bool = False
    n_deaths: int = 0


class DroppedInput(NamedTuple):
    """Messages at which workers were lost and which are dropped. n_units: number of units and of other messages."""

    n_units: int = 0
    content: InputContent = NO_INPUT


class KeptStep(NamedTuple):
    """A `Step` without its messages. n: their number."""

    kind: str
    is_decided: bool
    goes_on: bool
    n: int


class KeptJournal(FromServer):
    """A session journal without its messages, which follow: those of the steps, the decisions, the open messages.

    From the worker to a gateway that takes its session over.
    """

    type: Literal["kept_journal"] = "kept_journal"
    steps: list[KeptStep] = Field(description="messages that rebuild the context")
    decided: bool = Field(description="the decisions of the next unit are known")
    goes_on: bool = Field(description="the turn of that unit goes on")
    n_open: int = Field(description="messages without an answer")
    n_parts: int = Field(description="partial results of the first of them")
    n_omitted: int = Field(description="units that are no longer kept")
    n_omitted_pictures: int = Field(description="pictures of these units")
    is_speaking: bool = Field(description="a turn, or its sound, goes on after the newest unit")
    lacks_turn: bool = Field(description="the newest unit that is not kept has a turn that goes on")
    sound_in: str = Field(description="encoding of the sound in binary messages of the client")
    is_one_by_one: bool = Field(description="chunks that wait may run as one unit")
    n_after_suspect: int | None = Field(
        None,
        ge=0,
        description="messages without an answer after the one at whose answer a worker was lost; null: there is none",
    )


KEPT_JOURNAL: Reader[KeptJournal] = Reader(KeptJournal)
