"""What a lane needs of the session that it belongs to."""

from typing import Protocol

from server.doors.live.event_error import EventError
from server.doors.realtime.engine_settings import EngineSettings
from server.doors.realtime.responses import CancelReason, RealtimeResponse, ResponseEnd


class LaneHost(Protocol):
    """The session that a lane belongs to."""

    @property
    def response(self) -> RealtimeResponse | None:
        """The open response."""

    def engine_settings(self, listen_scale: float, has_side_lane: bool) -> EngineSettings:
        """What the engine must be set to for the next unit.

        Args:
            listen_scale: factor on the odds of listening.
            has_side_lane: the model calls functions beside its speech.
        """

    @property
    def is_playing(self) -> bool:
        """Whether the server plays sound, which may go on after its response is done."""

    def stop_playback(self) -> None:
        """Drop sound that was not played."""

    def begin_response(self, *, with_message: bool = True) -> RealtimeResponse:
        """Open a response that the model has begun by itself. with_message: false for a call of a function."""

    def add_sound(self, response: RealtimeResponse, pcm16: bytes) -> None:
        """Send sound of the engine."""

    def cancel_response(self, reason: CancelReason) -> None:
        """End the open response now, if there is one."""

    def finish_response(self, end: ResponseEnd) -> None:
        """Close the open response."""

    def report(self, error: EventError) -> None:
        """Send an error to the client."""

    def report_overflow(self, n_samples: int) -> None:
        """Sound was dropped, because too much waits."""
