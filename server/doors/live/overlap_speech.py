"""How long the user has spoken over a reply: a state machine over what the detector hears. Contains no I/O.

The detector follows the sound with a delay, so times are positions in the sound: speech that a client has sent before
the reply began does not count, however late the detector hears it.
"""

from server.doors.live.sound.detector import Heard, SpeechOver


class OverlapSpeech:
    """The user's speech beside replies. Positions are ms from the first sample."""

    def __init__(self) -> None:
        self._begun_ms: float | None = None  # position at which the reply began; None: there is none
        self._before_ms = 0.0  # speech of the user's turn before the reply

    def begin_reply(self, at_ms: float) -> None:
        """A reply begins, if none is open. at_ms: end of the sound that the client has sent."""
        if self._begun_ms is None:
            self._begun_ms = at_ms

    def end_reply(self) -> None:
        self._begun_ms = None

    def hear(self, heard: Heard) -> float:
        """The ms of the user's turn that lie over the open reply so far; 0 without a reply."""
        if isinstance(heard, SpeechOver):
            self._before_ms = 0.0
            return 0.0
        if self._begun_ms is None or heard.at_ms <= self._begun_ms:
            self._before_ms = heard.speech_ms
            return 0.0
        return heard.speech_ms - min(self._before_ms, heard.speech_ms)
