"""Where in the second a session's units are full: where its worker has a place for them. Contains no I/O.

Clients of the OpenAI API begin whenever they like, so silence before their first sound moves the edges. No sound waits
longer because of it: a unit is full with a message of the client, as without the silence.
"""

from server.doors.live.sound.unit_buffer import UNIT_SAMPLES, UnitBuffer
from worker.protocol.messages import Prepared, ServerMessage

QUIET_S = 1.5  # without sound, after which a client begins anew


class UnitEdges:
    """The edges of one session. buffer: its sound. All clock readings are monotonic s."""

    def __init__(self, buffer: UnitBuffer):
        self._buffer = buffer
        self._edge: float | None = None  # one of them; None: the worker has no preference
        self._sound_at: float | None = None  # when the client last sent sound
        self._n_sent = self._n_run = 0  # samples of its last message, and of all since it began

    def record_sound(self, n: int, now: float) -> None:
        """The client has sent `n` samples, which are in the buffer."""
        begins = self._sound_at is None or now - self._sound_at > QUIET_S
        self._sound_at, self._n_sent, self._n_run = now, n, n if begins else self._n_run + n
        if begins:
            self._place()

    def on_answer(self, answer: ServerMessage, now: float) -> float | None:
        """Take the place in the second that a `prepared` of the worker names; other answers change nothing.

        Returns: the first edge, at most a second from now; None without a place.
        """
        if not isinstance(answer, Prepared):
            return None
        self._edge = now + answer.start_after_ms / 1000 if answer.start_after_ms else None
        self._place()
        return self._edge

    def _place(self) -> None:
        """Begin the unit with silence, so that it is full at an edge, together with a message like the last one."""
        size, n_samples = self._n_sent, self._buffer.n_samples
        if self._edge is None or self._sound_at is None or not size or n_samples < self._n_run:
            return  # some of the sound is taken already: silence would come in the middle of it
        n_messages = round((self._edge - self._sound_at) % 1 * UNIT_SAMPLES / size)  # up to the edge
        self._buffer.begin_with_silence(-(n_samples + n_messages * size) % UNIT_SAMPLES)
