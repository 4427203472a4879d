"""When a quiet user is spoken to: `idle_timeout_ms` of the turn detection. Times are passed in, monotonic s."""


class IdleTimeout:
    """The time since anything was heard or said."""

    def __init__(self) -> None:
        self._since: float | None = None  # None until there was a response

    def record_response(self, playback_ends: float) -> None:
        """A response is done. playback_ends: when the client will have played it."""
        self._since = playback_ends

    def record_speech(self) -> None:
        """The user speaks: no timeout until the next response."""
        self._since = None

    def due_at(self, timeout_ms: int | None) -> float | None:
        """When the timeout runs out; None: it does not."""
        if self._since is None or timeout_ms is None:
            return None
        return self._since + timeout_ms / 1000
