"""When the user's voice counts as an interruption: a state machine over what the detector hears. Contains no I/O.

The detector follows the sound with a delay, so times are positions in the sound: speech that a client has sent before a
response was opened does not interrupt it, however late the detector hears it. Nor is speech that the client has
committed reported as a turn; what follows it is another one.
"""

CONFIRM_MS = 200  # of speech while a response is open


class BargeIn:
    """The user's speech beside the responses. Positions are ms from the first sample."""

    def __init__(self) -> None:
        self._opened_ms = -1.0  # position at which the last response was opened
        self._start_ms: int | None = None  # of a turn that is not announced to the client
        self._speech_ms = 0.0  # of the turn so far
        self._ignored_ms = 0.0  # speech of the turn before the response was open
        self._committed_ms = -1.0  # position of the client's last commit
        self._committed_speech_ms = 0.0  # speech of the turn before it

    def begin_response(self, at_ms: float) -> None:
        """A response is opened. at_ms: all sound that the client has sent."""
        self._opened_ms, self._ignored_ms = at_ms, self._speech_ms

    def begin_turn(self, start_ms: int) -> None:
        """The detector hears a turn."""
        self.end_turn()
        self._start_ms = start_ms

    def end_turn(self) -> None:
        self._start_ms, self._speech_ms, self._ignored_ms, self._committed_speech_ms = None, 0.0, 0.0, 0.0

    def is_answered(self, end_ms: float) -> bool:
        """Whether a response was opened after the turn that ended there."""
        return end_ms <= self._opened_ms

    def hear(self, speech_ms: float, at_ms: float, committed_ms: float = -1.0) -> None:
        """More speech. speech_ms: of the turn so far. at_ms: where it ends. committed_ms: the client's last commit."""
        if committed_ms > self._committed_ms:
            self._committed_ms, self._committed_speech_ms = committed_ms, self._speech_ms
            if self._start_ms is None:
                self._start_ms = round(committed_ms)
        if at_ms <= self._committed_ms:
            self._committed_speech_ms = speech_ms
        self._speech_ms = speech_ms
        if at_ms <= self._opened_ms:
            self._ignored_ms = speech_ms

    def due(self, speech_ms: float, at_ms: float, *, is_responding: bool) -> int | None:
        """Where the turn began, once, when it is to be reported.

        Beside a response, and after a commit of the client within the turn, only with enough speech.
        """
        if self._committed_speech_ms and speech_ms - self._committed_speech_ms < CONFIRM_MS:
            return None
        is_beside = is_responding and at_ms > self._opened_ms
        if self._start_ms is None or (is_beside and not self.is_confirmed(speech_ms)):
            return None
        start_ms, self._start_ms = max(self._start_ms, round(self._committed_ms)), None
        return start_ms

    def is_confirmed(self, speech_ms: float) -> bool:
        """Whether there was enough speech since the response was opened."""
        return speech_ms - self._ignored_ms >= CONFIRM_MS
