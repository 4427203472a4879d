"""What a lane needs of the session that it belongs to."""

from typing import Protocol

from server.doors.live.event_error import EventError
from server.doors.realtime.engine_settings import EngineSettings
from server.doors.realtime.responses import RealtimeResponse, ResponseEnd


class LaneHost(Protocol):
    """The session that a lane belongs to."""

    @property
    def response(self) -> RealtimeResponse | None:
        """The open response."""

    def engine_settings(self, listen_scale: float) -> EngineSettings:
        """What the engine must be set to for the next unit. listen_scale: factor on the odds of listening."""

    @property
    def is_playing(self) -> bool:
        """Whether the server plays sound, which may go on after its response is done."""

    def stop_playback(self) -> None:
        """Drop sound that was not played."""

    def begin_response(self) -> RealtimeResponse:
        """Open a response that the model has begun by itself."""

    def add_sound(self, response: RealtimeResponse, pcm16: bytes) -> None:
        """Send sound of the engine."""

    def finish_response(self, end: ResponseEnd) -> None:
        """Close the open response."""

    def report(self, error: EventError) -> None:
        """Send an error to the client."""

    def report_overflow(self, n_samples: int) -> None:
        """Sound was dropped, because too much waits."""
