"""Request and response bodies of the HTTP API, from which /openapi.json is generated.

Times are local and without a time zone, as clients of this protocol expect them. Fields that only clients of the public
implementation use are marked.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from server.dispatch.queue import RequestType
from worker.config.service import MAX_S
from worker.status import State
from worker.worker_report import WorkerReport

Seconds = Annotated[float, Field(ge=0, le=MAX_S, allow_inf_nan=False)]


class RequestBody(BaseModel):
    """A request's body: strictly typed; unknown fields are ignored."""

    model_config = ConfigDict(strict=True)


class Problem(BaseModel):
    """The reason why a request was refused."""

    detail: str


# --- gateway and workers --------------------------------------------------------------------------


class Health(BaseModel):
    """workers: as their launcher sees them; empty without one. Reasons are left out for requests without a key."""

    status: Literal["healthy"] = "healthy"
    timestamp: str
    workers: dict[str, WorkerReport] = {}


class Alive(BaseModel):
    alive: bool = True


class Ready(BaseModel):
    """ready: a worker accepts sessions, and the gateway is not shutting down."""

    ready: bool
    free_slots: int
    total_slots: int
    ready_workers: int
    total_workers: int
    queue_length: int
    draining: bool


class Slots(BaseModel):
    """Slots of ready workers. leased: by this gateway."""

    total: int
    free: int
    leased: int


class RunningTask(BaseModel):
    """A session with a slot."""

    worker_id: str
    request_type: RequestType
    started_at: str
    elapsed_s: float
    estimated_remaining_s: float
    session_id: str
    units: int
    paused: bool


class ServiceStatus(BaseModel):
    """idle_workers: with a free slot. busy_workers: ready and full. duplex_workers: with a full-duplex session.
    random_weights: a worker runs a test model, whose output is noise.
    """

    gateway_healthy: bool = True
    total_workers: int
    idle_workers: int
    busy_workers: int
    duplex_workers: int
    loading_workers: int
    error_workers: int
    offline_workers: int
    queue_length: int
    max_queue_size: int
    running_tasks: list[RunningTask]
    draining: bool
    connections: int
    slots: Slots
    random_weights: bool


class Progress(BaseModel):
    """Progress of a worker's start. total: 0 if unknown. seconds: since the start of the stage."""

    what: str = ""
    done: float = 0
    total: float = 0
    seconds: float = 0


class WorkerInfo(BaseModel):
    """status: in the vocabulary of the public implementation. state, error, progress: from the worker's /health."""

    worker_id: str
    host: str
    port: int
    gpu_id: int
    status: str
    current_session_id: str | None
    total_requests: int
    avg_inference_time_ms: float
    last_heartbeat: str | None
    current_request_type: RequestType | None
    task_started_at: str | None
    state: State | None
    error: str | None
    progress: Progress | None
    slots: Slots
    sessions: list[str]


class WorkerList(BaseModel):
    total: int
    workers: list[WorkerInfo]


class WorkerStatus(BaseModel):
    worker_id: str
    status: str


class CacheStatus(BaseModel):
    workers: list[WorkerStatus]


# --- queue and estimates --------------------------------------------------------------------------


class TicketFields(BaseModel):
    """A waiting ticket. position: 1 is next."""

    ticket_id: str
    request_type: RequestType
    session_id: str
    position: int
    estimated_wait_s: float
    enqueued_at: str


class QueueItem(TicketFields):
    """A waiting ticket in the list of the queue. position: 1 is next. wait_elapsed_s: time since it was created."""

    wait_elapsed_s: float


class QueueStatus(BaseModel):
    queue_length: int
    max_queue_size: int
    items: list[QueueItem]
    running_tasks: list[RunningTask]


class TicketStatus(TicketFields):
    cancelled: bool = False


class TicketFound(BaseModel):
    found: Literal[True] = True
    ticket: TicketStatus


class TicketUnknown(BaseModel):
    found: Literal[False] = False
    message: str


class Success(BaseModel):
    success: bool


class EtaRequest(RequestBody):
    """Fields that are left out keep their value."""

    eta_chat_s: Seconds = 0.0
    eta_half_duplex_s: Seconds = 0.0
    eta_audio_duplex_s: Seconds = 0.0
    eta_omni_duplex_s: Seconds = 0.0
    ema_alpha: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None


class EtaSettings(BaseModel):
    """eta_streaming_s, eta_duplex_s: half duplex and omni, under the names that older clients use."""

    eta_chat_s: float
    eta_half_duplex_s: float
    eta_audio_duplex_s: float
    eta_omni_duplex_s: float
    ema_alpha: float
    eta_streaming_s: float
    eta_duplex_s: float


class EtaStatus(BaseModel):
    """config: expected durations. ema_*_s: moving averages of measured durations, null before the first sample."""

    config: EtaSettings
    ema_alpha: float
    ema_chat_s: float | None
    ema_chat_samples: int
    ema_half_duplex_s: float | None
    ema_half_duplex_samples: int
    ema_audio_duplex_s: float | None
    ema_audio_duplex_samples: int
    ema_omni_duplex_s: float | None
    ema_omni_duplex_samples: int
    ema_streaming_s: float | None
    ema_streaming_samples: int
    ema_duplex_s: float | None
    ema_duplex_samples: int


# --- sessions and chat ----------------------------------------------------------------------------


class LiveSessionInfo(BaseModel):
    """A session that is not over. ticket_id, worker_id: null without a ticket, a slot. messages_hash: always empty."""

    session_id: str
    ticket_id: str | None
    kind: str
    worker_id: str | None
    messages_hash: str = ""
    last_active: str


class LiveSessionList(BaseModel):
    total: int
    sessions: list[LiveSessionInfo]


class SessionsEnded(BaseModel):
    """ended: number of sessions with the id."""

    success: Literal[True] = True
    ended: int


class StopBody(RequestBody):
    session_id: str | None = None


class StopAnswer(BaseModel):
    """stopped: ids of the sessions whose answer stops."""

    success: bool
    stopped: list[str]
    message: str


class ChatAnswerBody(BaseModel):
    """A worker's response to a chat with the gateway's fields. Some workers leave fields out."""

    model_config = ConfigDict(extra="allow")

    success: bool
    queue_wait_ms: int
    estimated_queue_wait_s: float


# --- apps -----------------------------------------------------------------------------------------


class AppInfo(BaseModel):
    app_id: str
    name: str
    route: str


class AppSwitch(AppInfo):
    enabled: bool


class AppList(BaseModel):
    apps: list[AppInfo]


class AppSwitches(BaseModel):
    apps: list[AppSwitch]


class Switch(RequestBody):
    enabled: bool


class NamedSwitch(Switch):
    app_id: str


class Switched(BaseModel):
    success: Literal[True] = True
    app: AppSwitch
