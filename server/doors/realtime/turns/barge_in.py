"""When the user's voice counts as an interruption: a state machine over what the detector hears. Contains no I/O."""

CONFIRM_MS = 200  # of speech while a response is open


class BargeIn:
    """The user's speech beside the responses."""

    def __init__(self) -> None:
        self._start_ms: int | None = None  # of a turn that is not announced to the client
        self._speech_ms = 0.0  # of the turn so far
        self._ignored_ms = 0.0  # speech of the turn before the response was open

    def begin_response(self) -> None:
        """A response is opened: speech before it does not interrupt it."""
        self._ignored_ms = self._speech_ms

    def begin_turn(self, start_ms: int) -> None:
        """The detector hears a turn. start_ms: from the first sample."""
        self._start_ms, self._speech_ms, self._ignored_ms = start_ms, 0.0, 0.0

    def end_turn(self) -> None:
        self._start_ms, self._speech_ms, self._ignored_ms = None, 0.0, 0.0

    def due(self, speech_ms: float, *, is_responding: bool) -> int | None:
        """Where the turn began, once, when the client must learn of it: beside a response only if it is no noise."""
        self._speech_ms = speech_ms
        if self._start_ms is None or (is_responding and not self.is_confirmed(speech_ms)):
            return None
        start_ms, self._start_ms = self._start_ms, None
        return start_ms

    def is_confirmed(self, speech_ms: float) -> bool:
        """Whether there was enough speech since the response was opened."""
        return speech_ms - self._ignored_ms >= CONFIRM_MS
