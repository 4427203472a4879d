"""What only a gateway sends and reads: its queue, and sessions that go on over another connection. Torch-free."""

from typing import Annotated, Literal

from pydantic import Field, computed_field

from worker.protocol.codec import FieldGroup, FromClient, Message, OneDecimal, Reader, known_fields

MAX_COUNT = 2**53
MAX_SAMPLED = 4096  # tokens of one unit
RESUME_QUERY = "resume"  # of the address of a connection that continues a session; its value is 1

WaitReason = Literal["busy", "loading", "no_worker"]
MoveReason = Literal["worker_lost", "draining", "memory"]


class StartProgress(FieldGroup):
    """How far a worker's start has come."""

    what: str = Field("", description="what it does now")
    done: float = Field(0, description="finished parts of the current stage")
    total: float = Field(0, description="all parts of the current stage; 0: unknown")


class _Waiting(Message):
    left_out = frozenset({"progress"})

    estimated_wait_s: OneDecimal = Field(description="seconds, one decimal")
    position: int = Field(ge=1, description="position in the queue; 1 is next")
    queue_length: int = Field(description="number of waiting tickets")
    reason: WaitReason = Field(
        "busy", description="`busy`: all slots are in use; `loading`: workers start; `no_worker`: none answers"
    )
    progress: Annotated[StartProgress, known_fields(StartProgress)] | None = Field(
        None, description="of the worker that has come furthest; only with `loading`"
    )

    @computed_field(description="the same as `estimated_wait_s`")  # type: ignore[prop-decorator]
    @property
    def eta_seconds(self) -> float:
        return self.estimated_wait_s


class Queued(_Waiting):
    """All slots are in use and the connection waits. From the gateway only."""

    type: Literal["queued"] = "queued"
    ticket_id: str = Field(description="`q_` and 12 hexadecimal digits")


class QueueUpdate(_Waiting):
    """The connection's current position in the queue. From the gateway only."""

    type: Literal["queue_update"] = "queue_update"


class QueueDone(Message):
    """A slot is assigned; also sent if the connection did not wait. From the gateway only."""

    type: Literal["queue_done"] = "queue_done"


class ResumeSession(FromClient):
    """Continue a session: the first message of a connection with `?resume=1`. Answered with `session_resumed`."""

    type: Literal["resume_session"] = "resume_session"
    token: str = Field(max_length=200, description="`resume_token` of the last `prepared` or `session_resumed`")
    received: int = Field(
        ge=0,
        le=MAX_COUNT,
        description="messages that the client has, the first `prepared` being 1; see [Resumption](#resumption)",
    )


class Received(FromClient):
    """Acknowledge messages, which the gateway then no longer keeps. Optional; not answered."""

    type: Literal["received"] = "received"
    count: int = Field(ge=0, le=MAX_COUNT, description="number of messages that the client has, as in `resume_session`")


class Decided(FromClient):
    """The outcome of the next `audio_chunk`, whose unit is rebuilt without a decision of the model and without sound.

    Between gateway and worker only. With `resume` in `spec`, a worker sends it in front of the `result` of each unit.
    When the session moves to another worker, the gateway sends it there in front of the unit's `audio_chunk`, with
    `spoken` and `unvoiced` for the newest unit only. Without tokens it comes in front of a piece that does not fill
    its second.
    """

    type: Literal["decided"] = "decided"
    unit: int = Field(ge=1, le=MAX_COUNT, description="units since `prepare`, including this one")
    seed: int = Field(description="of the session's random numbers")
    sampled: list[int] = Field(max_length=MAX_SAMPLED, description="sampled tokens")
    remembered: list[int] = Field(max_length=MAX_SAMPLED, description="tokens of the repetition penalty's window")
    listens: bool = Field(False, description="the worker has forced the unit to listen")
    is_interrupted: bool = Field(False, description="an interrupt has ended the text")
    is_silenced: bool = Field(False, description="an interrupt has ended the turn after the text")
    close_early: bool = Field(False, description="silence stands for the samples that the unit lacked")
    goes_on: bool = Field(False, description="a turn, or a text of the side lane, goes on with the next unit")
    spoken: list[int] = Field(
        default=[],
        max_length=MAX_SAMPLED,
        description="the unit's speech tokens, if the turn's speech goes on",
    )
    unvoiced: list[int] = Field(
        default=[], max_length=MAX_SAMPLED, description="speech tokens of this turn that have no sound yet"
    )
    drains: bool = Field(False, description="`spoken` are of a turn whose text has ended before the unit")


class SessionMoving(Message):
    """The session waits for another worker. `session_moved` or an error follows. From the gateway only."""

    type: Literal["session_moving"] = "session_moving"
    reason: MoveReason = Field(description="why it leaves its worker, as in `session_moved`")


class SessionMoved(Message):
    """Another worker goes on with the session and the same context. From the gateway only."""

    type: Literal["session_moved"] = "session_moved"
    reason: MoveReason = Field(
        description="`worker_lost`; `draining`: the worker shuts down; `memory`: it is short of memory"
    )
    seconds: OneDecimal = Field(description="without a worker")
    restored: int = Field(description="units that were rebuilt")
    omitted: int = Field(description="earlier units that were not, because too much was to be kept")
    omitted_pictures: int = Field(0, description="pictures of those units")
    repeated: int = Field(description="chunks without a result, which run again")
    dropped: int = Field(0, description="units and other messages at which two workers were lost, since the last move")
    dropped_sound_s: OneDecimal = Field(0.0, description="their sound, seconds")
    dropped_pictures: int = Field(0, description="their pictures")


class MessagesLost(Message):
    """Messages that the gateway had no room to keep. Does not count as a message. From the gateway only."""

    type: Literal["messages_lost"] = "messages_lost"
    lost: int = Field(description="messages before `next` that the client lacks and the gateway no longer has")
    lost_sound_s: OneDecimal = Field(description="their sound, seconds")
    next: int = Field(description="number of the next message")


class SessionResumed(Message):
    """The session goes on over this connection. The messages that the client lacks follow. From the gateway only."""

    type: Literal["session_resumed"] = "session_resumed"
    resume_token: str = Field(description="for the next lost connection; replaces the one before")
    resume_grace_s: float = Field(description="as in `prepared`")
    received: int = Field(description="messages of the client that have arrived, the first of the session being 1")
    next: int = Field(description="number of the next message")
    lost: int = Field(0, description="messages before `next` that the client lacks and the gateway no longer has")
    lost_sound_s: OneDecimal = Field(0.0, description="their sound, seconds")


ResumeMessage = Annotated[ResumeSession | Received, Field(discriminator="type")]
RESUME_CLIENT: Reader[ResumeMessage] = Reader(ResumeMessage)
GatewayMessage = Queued | QueueUpdate | QueueDone | SessionResumed | SessionMoving | SessionMoved | MessagesLost
