"""Values from workers' reports, which may have any type."""

from datetime import datetime
from typing import Any

from server.dispatch.queue import RequestType
from worker.protocol.gateway_messages import StartProgress
from worker.protocol.wire import clean
from worker.status import START, State

MAX_WORDS = 200  # characters of the progress of a start
MAX_NUMBER = 2**53
OFFLINE = "offline"
# Values of `worker_status` from workers of the public implementation, whose /health has no `state`.
READY_NAMES = frozenset({"idle", "busy_chat", "busy_half_duplex", "busy_streaming", "duplex_active", "duplex_paused"})
KNOWN_NAMES = READY_NAMES | {"loading", "error"}
OPEN_NAMES = READY_NAMES - {"duplex_paused"}
BUSY_NAMES: dict[RequestType, str] = {
    "chat": "busy_chat",
    "half_duplex_audio": "busy_half_duplex",
    "transcription": "busy_chat",
    "speech": "busy_chat",
    "conversion": "busy_chat",
}


def slots_of(health: dict[str, Any]) -> dict[str, Any]:
    """The slots that a worker or one of its models reports; {} without them."""
    given = health.get("slots")
    return given if isinstance(given, dict) else {}


def number_of(value: object) -> float:
    """The value as a float; 0 for anything but a number of limited size."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
        return 0.0
    return float(value)


def iso(seconds: float) -> str:
    """Unix seconds as local time in ISO 8601 without a time zone, as clients of this protocol expect it."""
    return datetime.fromtimestamp(seconds).isoformat()


def progress_of(health: dict[str, Any]) -> tuple[tuple[int, float], StartProgress]:
    """The progress of a worker's start, and a key that orders it: stage and share of the stage."""
    given = health.get("progress")
    given = given if isinstance(given, dict) else {}
    done, total = number_of(given.get("done")), number_of(given.get("total"))
    what = given.get("what")
    state = health.get("state")
    stage = START.index(State(state)) if state in START else 0
    progress = StartProgress(what=clean(str(what))[:MAX_WORDS] if what else "", done=done, total=total)
    return (stage, done / total if total else 0.0), progress
