"""The units of a vLLM-Omni session: as those of GPT-Live, with pictures, ends of input and decisions."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from server.doors.live.sound.unit_buffer import UNIT_SAMPLES
from server.doors.live.sound.wire_sound import without_padding
from server.doors.live.unit_lane import LiveHost, LiveLane
from worker.protocol.codec import FromClient
from worker.protocol.messages import AudioChunk, Error, Result, ServerMessage


class OmniHost(LiveHost, Protocol):
    """The session that a lane belongs to."""

    def on_decision(self, result: Result, text: str, pcm16: bytes) -> None:
        """A unit's outcome. text, pcm16: what of it was not reported by `on_speech`."""

    def on_failure(self, error: Error) -> None:
        """A unit has no result."""


class OmniLane(LiveLane):
    """One session's units.

    Args:
        host: the session.
        clock: monotonic s.
    Attributes:
        is_user_speaking: units listen.
        speaks_unasked: a unit may speak that the client has not asked for.
    """

    def __init__(self, host: OmniHost, clock: Callable[[], float]):
        super().__init__(host, clock)
        self._omni_host = host
        self.is_user_speaking, self.speaks_unasked = False, True

    def add_picture(self, data: bytes, max_slices: int) -> None:
        """Add an encoded picture for the next unit."""
        self._buffer.add_picture(data, max_slices)

    def end_input(self, *, is_speech_due: bool) -> None:
        """Run the unit that is being filled now. is_speech_due: it must speak."""
        self._must_speak = self._must_speak or (is_speech_due and not self._is_speaking)
        n_missing = -self._buffer.n_samples % UNIT_SAMPLES or (0 if self._buffer.n_samples else UNIT_SAMPLES)
        self.append(np.zeros(n_missing, np.float32))

    def listen_next(self) -> None:
        """Listen in the next unit."""
        self._must_listen = True

    def clear_input(self) -> None:
        """Drop the sound that no unit has yet."""
        self._buffer.clear_sound()

    def on_answer(self, request: FromClient, answer: ServerMessage) -> None:
        """Handle the answer to a message."""
        if isinstance(request, AudioChunk) and isinstance(answer, Error):
            self._omni_host.on_failure(answer)
        super().on_answer(request, answer)

    def _on_result(self, result: Result) -> None:
        sound = b""
        if result.audio_data is not None and not result.is_listen:
            sound = without_padding(result.audio_data.packed("pcm16"))
        text = result.text[len(self._text_sent) :]
        if text or sound:
            self._active_at = self._clock()
        self._omni_host.on_decision(result, text, sound)

    @property
    def _may_run_early(self) -> bool:
        return False  # the client says when its input ends, and which units listen

    def _decided(self) -> tuple[bool, bool]:
        if self.is_user_speaking:
            return True, False
        force_listen, force_speak = super()._decided()
        return force_listen or not (force_speak or self._is_speaking or self.speaks_unasked), force_speak
