"""When a session ends after the server began to shut down."""

from collections.abc import Callable

MAX_DRAIN_S = 30.0  # for what the model says


class DrainWait:
    """Lets a session finish what it says. clock: monotonic s."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._since: float | None = None

    def is_over(self, *, is_draining: bool, is_speaking: bool) -> bool:
        """Whether the session ends now. is_draining: the server shuts down. is_speaking: an answer is not finished."""
        if not is_draining:
            return False
        now = self._clock()
        if self._since is None:
            self._since = now
        return not is_speaking or now - self._since >= MAX_DRAIN_S
