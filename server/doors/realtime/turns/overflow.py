"""The errors about sound that is dropped because too much waits: one a second, with the length of all of it."""

from collections.abc import Callable

from server.doors.live.event_error import EventError

EVERY_S = 1.0


class Overflow:
    """The dropped sound of one session. clock: monotonic s."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._n_samples, self._due_at = 0, 0.0

    def add(self, n_samples: int, max_s: float) -> EventError | None:
        """Count dropped samples at 16 kHz. max_s: of sound that may wait. Returns: the error to send now, if any."""
        self._n_samples += n_samples
        now = self._clock()
        if now < self._due_at:
            return None
        ms, self._n_samples, self._due_at = self._n_samples / 16, 0, now + EVERY_S
        message = f"input audio buffer: expected at most {max_s:g} s that wait, dropped {ms:.0f} ms"
        return EventError("input_audio_buffer_overflow", message)
