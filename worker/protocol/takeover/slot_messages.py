"""What gateways and workers agree on so that a session outlives its gateway: the worker keeps its slot for a while.

Between gateway and worker only; clients cannot send these messages. Torch-free.
"""

from typing import Annotated, Literal

from pydantic import Field

from worker.protocol.codec import FromClient, FromServer, OneDecimal, Reader
from worker.protocol.gateway_messages import MAX_COUNT

TAKE_QUERY = "take"  # of the address of a connection that takes a kept session over; its value is 1
KEEP_FIRST = '{"type":"keep_slot"'  # how a gateway begins `keep_slot`; it forwards no message of a client of this type
KEPT_FIELD = "kept_sessions"  # of a worker's /health: sessions without a connection that wait for a gateway
MAX_GRACE_S = 600.0

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class KeepSlot(FromClient):
    """Keep the session, its slot and its messages if this connection is lost. Replaces the message before.

    Not answered. The gateway sends it after `prepared`, and again when one of its fields changes in another way than by
    one for each message that it forwards.
    """

    type: Literal["keep_slot"] = "keep_slot"
    grace_s: float = Field(gt=0, le=MAX_GRACE_S, description="seconds for which the session is kept")
    tokens: list[Digest] = Field(max_length=2, description="SHA-256 of the resume tokens that continue it")
    owner: str = Field("", description="whose key began the session; empty: it began without a key")
    received: Count = Field(description="messages of the client before the next message of this connection")
    n_frames: Count = Field(description="messages of the worker that the gateway has, without `decided`")
    number: Count = Field(description="number of the last of them, counted for the client")
    acknowledged: Count = Field(description="messages that the client has acknowledged")
    n_after_suspect: Count | None = Field(
        None,
        description="messages of this connection after the one at whose answer a worker was lost; null: there is none",
    )


class TakeSlot(FromClient):
    """Take a kept session over: the first message of a connection with `?take=1`. Answered with `slot_taken`."""

    type: Literal["take_slot"] = "take_slot"
    token: Digest = Field(description="SHA-256 of the token that the client has presented")
    owner: str = Field(description="whose key the client has; an address without a key")
    received: Count = Field(description="messages that the client has")
    tokens: list[Digest] = Field(max_length=2, description="SHA-256 of the tokens that are valid from now on")


class SlotTaken(FromServer):
    """The session goes on over this connection. The journal follows, then the messages that the client lacks."""

    type: Literal["slot_taken"] = "slot_taken"
    received: int = Field(description="messages of the client that have arrived")
    next: int = Field(description="number of the next message")
    lost: int = Field(description="messages before it that the client lacks and the worker no longer has")
    lost_sound_s: OneDecimal = Field(description="their sound, seconds")
    sound_out: str = Field(description="encoding of the sound in binary messages to the client")
    paused: bool = Field(description="whether the session is paused")
    n_journal: int = Field(0, description="messages of the journal, `kept_journal` first; 0: there is none")
    n_repeated: int = Field(0, description="messages after them that the gateway before may have received")


KEEP_SLOT: Reader[KeepSlot] = Reader(KeepSlot)
TAKE_SLOT: Reader[TakeSlot] = Reader(TakeSlot)
SLOT_TAKEN: Reader[SlotTaken] = Reader(SlotTaken)
