"""What a lane needs of the session that it belongs to."""

from typing import Protocol

from server.doors.realtime.engine_settings import EngineSettings
from server.doors.realtime.responses import RealtimeResponse, ResponseEnd


class LaneHost(Protocol):
    """The session that a lane belongs to."""

    @property
    def response(self) -> RealtimeResponse | None:
        """The open response."""

    def engine_settings(self) -> EngineSettings:
        """What the engine must be set to for the next unit."""

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

    def report_overflow(self, n_samples: int) -> None:
        """Sound was dropped, because too much waits."""
