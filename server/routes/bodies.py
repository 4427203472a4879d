"""What the HTTP API answers and takes, field by field. Its schema at /openapi.json is made of these.

Times are local, without a zone, as clients of this protocol read them; names that only other clients know say so.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from server.dispatch.queue import RequestType
from worker.config.service import MAX_S
from worker.status import State

Seconds = Annotated[float, Field(ge=0, le=MAX_S, allow_inf_nan=False)]


class Asked(BaseModel):
    """A request's body: strictly typed; what is not known is passed over."""

    model_config = ConfigDict(strict=True)


class Problem(BaseModel):
    """Why a request was refused."""

    detail: str


# --- workers and the whole ------------------------------------------------------------------------


class Health(BaseModel):
    status: Literal["healthy"] = "healthy"
    timestamp: str


class Alive(BaseModel):
    alive: bool = True


class Ready(BaseModel):
    """ready: a worker takes sessions, and the gateway is not shutting down."""

    ready: bool
    free_slots: int
    total_slots: int
    ready_workers: int
    total_workers: int
    queue_length: int
    draining: bool


class Slots(BaseModel):
    """Of workers that are ready. leased: by this gateway."""

    total: int
    free: int
    leased: int


class RunningTask(BaseModel):
    """A session that has a slot."""

    worker_id: str
    request_type: RequestType
    started_at: str
    elapsed_s: float
    estimated_remaining_s: float
    session_id: str
    units: int
    paused: bool


class ServiceStatus(BaseModel):
    """idle_workers: with a free slot. busy_workers: ready and full. duplex_workers: with a session."""

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


class Progress(BaseModel):
    """How far a worker's start is. total: 0 if nobody knows. seconds: in this stage."""

    what: str = ""
    done: float = 0
    total: float = 0
    seconds: float = 0


class WorkerInfo(BaseModel):
    """status: as other gateways name it. state, error, progress: the worker's own words, if it says any."""

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


class QueueItem(BaseModel):
    """A ticket that waits. position: 1 is next."""

    ticket_id: str
    request_type: RequestType
    session_id: str
    position: int
    estimated_wait_s: float
    enqueued_at: str
    wait_elapsed_s: float


class QueueStatus(BaseModel):
    queue_length: int
    max_queue_size: int
    items: list[QueueItem]
    running_tasks: list[RunningTask]


class TicketStatus(BaseModel):
    ticket_id: str
    request_type: RequestType
    session_id: str
    position: int
    estimated_wait_s: float
    enqueued_at: str
    cancelled: bool = False


class TicketFound(BaseModel):
    found: Literal[True] = True
    ticket: TicketStatus


class TicketUnknown(BaseModel):
    found: Literal[False] = False
    message: str


class Success(BaseModel):
    success: bool


class EtaRequest(Asked):
    """What is left out stays as it is."""

    eta_chat_s: Seconds = 0.0
    eta_half_duplex_s: Seconds = 0.0
    eta_audio_duplex_s: Seconds = 0.0
    eta_omni_duplex_s: Seconds = 0.0
    ema_alpha: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None


class EtaSettings(BaseModel):
    """eta_streaming_s, eta_duplex_s: half duplex and omni, by the names that older clients know."""

    eta_chat_s: float
    eta_half_duplex_s: float
    eta_audio_duplex_s: float
    eta_omni_duplex_s: float
    ema_alpha: float
    eta_streaming_s: float
    eta_duplex_s: float


class EtaStatus(BaseModel):
    """config: guesses. ema_*_s: the moving average of what was measured, null before the first sample."""

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


class Switch(Asked):
    enabled: bool


class NamedSwitch(Switch):
    app_id: str


class Switched(BaseModel):
    success: Literal[True] = True
    app: AppSwitch


# --- presets and sounds ---------------------------------------------------------------------------


class FrontendDefaults(BaseModel):
    """default_lang: only if the gateway was told one."""

    playback_delay_ms: int
    chat_vocoder: str
    default_lang: str | None = None


class DefaultSound(BaseModel):
    """duration: s. base64: float32, little endian."""

    name: str
    duration: float
    sample_rate: int
    samples: int
    base64: str


class VoiceInfo(BaseModel):
    """data: always null here; its own route brings it. duration: s."""

    data: None = None
    path: str
    name: str
    duration: float


class TextPart(BaseModel):
    type: Literal["text"] = "text"
    text: str


class AudioPart(VoiceInfo):
    type: Literal["audio"] = "audio"


class PresetInfo(BaseModel):
    """Has either system_prompt or system_content."""

    id: str
    order: int
    name: str
    description: str
    lang: str | None = None
    system_prompt: str | None = None
    system_content: list[TextPart | AudioPart] | None = None
    ref_audio: VoiceInfo | None = None


class PresetSound(BaseModel):
    """data: float32 at 16 kHz, little endian, base64; null if the file has gone. duration: s."""

    data: str | None
    name: str
    duration: float


class PresetSounds(BaseModel):
    """Only what the preset has."""

    system_content_audio: list[PresetSound] | None = None
    ref_audio: PresetSound | None = None
