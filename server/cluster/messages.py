"""The messages between the authority of a cluster and its gateways: JSON texts over one WebSocket of each gateway.

Unknown fields are ignored, so that gateways of two versions work with one authority during an upgrade.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from models.errors import ModelError
from server.dispatch.dispatcher import Refusal
from server.dispatch.queue import Needs, RequestType

MAX_NAME = 200
TLS_SCHEME = "wss://"  # before the address of a gateway with TLS
Name = Annotated[str, Field(max_length=MAX_NAME)]
Count = Annotated[int, Field(ge=0, le=2**53)]


class ClusterMessageError(ModelError, ValueError):
    """A message of the other side that cannot be read."""


class ClusterFields(BaseModel):
    """Frozen, strictly typed fields."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class Claim(ClusterFields):
    """A ticket with the state that its gateway has of it.

    number: its place in the order of arrival; 0: it has none yet. worker: address of the worker whose slot it has; "":
    it waits. limit: sessions of its owner at the same time; None: any number. moves: ticket of a session that leaves
    its worker for the slot of this one; "": none. labels, voice: what the session needs of its worker.
    """

    ticket: Name
    number: Count
    request_type: RequestType
    session: Name
    owner: Name
    worker: Name = ""
    is_spare: bool = False
    limit: Count | None = None
    moves: Name = ""
    labels: list[Name] = []
    voice: Name = ""

    @property
    def needs(self) -> Needs:
        """What the session needs of its worker."""
        return Needs(frozenset(self.labels), self.voice)


class CountedUse(ClusterFields):
    """Use of one key today. requests: counted ones. session_s: seconds of sessions with a slot."""

    requests: Count = 0
    session_s: float = Field(0.0, ge=0)


class WorkerEntry(ClusterFields):
    """A worker of the cluster. index: stays the same as long as the worker is registered."""

    index: Count
    address: Name
    is_draining: bool = False


# --- from a gateway ----------------------------------------------------------------------------


class Hello(ClusterFields):
    """The first message of a connection: all tickets of the gateway, which replace those from before.

    address: host and port at which other gateways reach it, after `TLS_SCHEME` if it has TLS; "": none.
    """

    type: Literal["hello"] = "hello"
    gateway: Name
    address: Name = ""
    claims: list[Claim] = []


class Submit(ClusterFields):
    """A new ticket."""

    type: Literal["submit"] = "submit"
    claim: Claim


class Requeue(ClusterFields):
    """A ticket's slot is given up, and the ticket waits again. is_worker_unsure: the worker did not accept it."""

    type: Literal["requeue"] = "requeue"
    ticket: Name
    is_worker_unsure: bool = False


class Finish(ClusterFields):
    """A ticket is over. n_units, held_s: results of its session, and seconds for which it has had slots."""

    type: Literal["finish"] = "finish"
    ticket: Name
    n_units: Count = 0
    held_s: float = Field(0.0, ge=0)


class Swap(ClusterFields):
    """A session has moved: its ticket gets the slot of the ticket that moves it, which is over."""

    type: Literal["swap"] = "swap"
    ticket: Name
    by: Name


class Cancel(ClusterFields):
    """Cancel a waiting ticket of any gateway. owner: it has to be theirs; None: any owner's."""

    type: Literal["cancel"] = "cancel"
    ticket: Name
    owner: Name | None = None


class Locate(ClusterFields):
    """Request for the other gateways that have a session with this id. Answered with `Located`."""

    type: Literal["locate"] = "locate"
    session: Name


class Beat(ClusterFields):
    """Renew the leases of the gateway. Answered with the same number."""

    type: Literal["beat"] = "beat"
    number: Count


class ReportUsage(ClusterFields):
    """What this gateway has counted for its keys. day: since 1970-01-01, in UTC. Answered with `UsageOfOthers`."""

    type: Literal["report_usage"] = "report_usage"
    day: int
    keys: dict[Name, CountedUse]


# --- from the authority ------------------------------------------------------------------------


class Welcome(ClusterFields):
    """The answer to `hello`. term: rises with each start of the authority. ttl_s: of leases that are not renewed."""

    type: Literal["welcome"] = "welcome"
    term: Count
    ttl_s: float


class ClusterWorkers(ClusterFields):
    """All workers of the cluster."""

    type: Literal["workers"] = "workers"
    workers: list[WorkerEntry]


class Granted(ClusterFields):
    """A ticket has a slot. number: its place in the order of arrival, for `hello`."""

    type: Literal["granted"] = "granted"
    ticket: Name
    number: Count
    worker: Name


class Numbered(ClusterFields):
    """A new ticket waits. number: its place in the order of arrival, for `hello`."""

    type: Literal["numbered"] = "numbered"
    ticket: Name
    number: Count


class TicketRefused(ClusterFields):
    """A new ticket is refused. busy: there is no other slot for a session that moves."""

    type: Literal["refused"] = "refused"
    ticket: Name
    why: Refusal | Literal["busy"]


class Cancelled(ClusterFields):
    """A waiting ticket is cancelled."""

    type: Literal["cancelled"] = "cancelled"
    ticket: Name


class Reclaim(ClusterFields):
    """A spare slot has to be given back."""

    type: Literal["reclaim"] = "reclaim"
    ticket: Name


class Place(ClusterFields):
    """The place of a waiting ticket. position: 1 is next. wait_s: expected seconds."""

    ticket: Name
    position: Count
    wait_s: float
    queue_length: Count


class Places(ClusterFields):
    """The places of all waiting tickets of the gateway."""

    type: Literal["places"] = "places"
    places: list[Place]


class Located(ClusterFields):
    """Addresses of the other gateways that have a session with this id."""

    type: Literal["located"] = "located"
    session: Name
    addresses: list[Name]


class UsageOfOthers(ClusterFields):
    """What the other gateways have counted for the keys."""

    type: Literal["usage_of_others"] = "usage_of_others"
    day: int
    keys: dict[Name, CountedUse]


FromGateway = Hello | Submit | Requeue | Finish | Swap | Cancel | Locate | Beat | ReportUsage
FromAuthority = (
    Welcome
    | ClusterWorkers
    | Numbered
    | Granted
    | TicketRefused
    | Cancelled
    | Reclaim
    | Places
    | Located
    | Beat
    | UsageOfOthers
)
_GATEWAY: TypeAdapter[FromGateway] = TypeAdapter(Annotated[FromGateway, Field(discriminator="type")])
_AUTHORITY: TypeAdapter[FromAuthority] = TypeAdapter(Annotated[FromAuthority, Field(discriminator="type")])


def read_from_gateway(text: str) -> FromGateway:
    """A message of a gateway. Raises: ClusterMessageError."""
    try:
        return _GATEWAY.validate_json(text)
    except ValidationError as error:
        raise _unread(error) from None


def read_from_authority(text: str) -> FromAuthority:
    """A message of the authority. Raises: ClusterMessageError."""
    try:
        return _AUTHORITY.validate_json(text)
    except ValidationError as error:
        raise _unread(error) from None


def _unread(error: ValidationError) -> ClusterMessageError:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "message"
    return ClusterMessageError(where, expected=first["msg"], got="another value")
