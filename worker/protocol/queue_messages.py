"""The gateway's messages about the queue, which a worker never sends. Torch-free."""

from typing import Annotated, Literal

from pydantic import Field, computed_field

from worker.protocol.codec import FieldGroup, Message, OneDecimal, known_fields

WaitReason = Literal["busy", "loading", "no_worker"]


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
