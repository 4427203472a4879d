"""The messages that a unit's sound and pictures become: one whole unit, or pieces of it before its second is full.

A worker may run a unit early, at a pause of the user, if it gets the sound in pieces. The piece that does so completes
the unit; all others are answered with `incomplete`. Contains no clock and no rules of when a unit may run.
"""

from collections import deque
from typing import Protocol

from server.doors.live.sound.speech_level import SpeechLevel
from server.doors.live.sound.unit_buffer import MAX_PICTURES, UNIT_SAMPLES, UnitBuffer
from worker.protocol.codec import FromClient
from worker.protocol.messages import AudioChunk, Error, Result, ServerMessage, VideoFrame
from worker.protocol.wire import Sound

PIECE = 1_600  # samples at least
SPOKEN_PIECE = 640  # beside speech and right after it: a pause is found when a piece ends
MAX_OPEN = UNIT_SAMPLES - PIECE  # samples of a unit that are sent in pieces; the rest goes with what it must do
MAX_AHEAD = MAX_PICTURES - 1  # pictures of a unit before its sound; the last place is for the newest one
MAX_AHEAD_BYTES = 2**20  # of such a picture, which is sent as text


class PieceReceiver(Protocol):
    """The session of a worker."""

    def send(self, message: FromClient) -> None:
        """Send a message after all earlier ones."""


class UnitPieces:
    """The pieces of one session. buffer: its sound and pictures."""

    def __init__(self, buffer: UnitBuffer):
        self._buffer = buffer
        self._unanswered: deque[tuple[AudioChunk, int]] = deque()  # with the number of samples
        self._level, self._heard = SpeechLevel(), buffer.newest

    @property
    def oldest(self) -> AudioChunk | None:
        """The piece whose answer comes next; None: all are answered."""
        return self._unanswered[0][0] if self._unanswered else None

    @property
    def newest(self) -> AudioChunk | None:
        """The last piece without an answer; None: all are answered."""
        return self._unanswered[-1][0] if self._unanswered else None

    def clear(self) -> None:
        """The worker's session is another one: what it was sent of the open unit is lost."""
        self._unanswered.clear()
        self._buffer.n_open = self._buffer.n_ahead = 0

    def add_picture(self, data: bytes, max_slices: int, units: PieceReceiver | None) -> None:
        """Add an encoded picture to the unit that is being filled.

        units: get it at once, to work on it while the sound is still missing; None: it waits for its unit.
        """
        buffer = self._buffer
        if units is None or buffer.has_picture or buffer.n_ahead >= MAX_AHEAD or len(data) > MAX_AHEAD_BYTES:
            buffer.add_picture(data, max_slices)
            return
        buffer.n_ahead += 1
        units.send(VideoFrame(frame=data, max_slice_nums=max_slices))

    def send(self, units: PieceReceiver) -> None:
        """Send the sound that waits, if it is enough for a piece. The first pictures of a unit go with a piece."""
        if self._heard is not self._buffer.newest:
            self._heard = self._buffer.newest
            self._level.push(self._heard)
        n = min(self._buffer.n_samples, MAX_OPEN - self._buffer.n_open)
        if n < (SPOKEN_PIECE if self._level.is_near else PIECE):
            return
        pictures = [] if self._buffer.n_ahead else self._buffer.take_pictures()[-MAX_AHEAD:]
        self._buffer.n_ahead += len(pictures)
        piece = _chunk(Sound(self._buffer.take_piece(n)), pictures)
        self._unanswered.append((piece, n))
        units.send(piece)

    def take_unit(self, *, force_listen: bool, force_speak: bool) -> AudioChunk:
        """The rest of the open unit, with silence for missing sound. Expected when all pieces are answered."""
        sound, pictures = self._buffer.take()
        return _chunk(Sound(sound), pictures, force_listen=force_listen, force_speak=force_speak)

    def ends_unit(self, request: FromClient, answer: ServerMessage) -> bool:
        """Take the answer to a message. Returns: whether a unit is over with it.

        It is, if the message is no piece, if the piece has completed its unit early, and if the piece has failed.
        """
        if request is not self.oldest:
            return True
        _, n = self._unanswered.popleft()
        if isinstance(answer, Result) and not answer.incomplete:
            self._buffer.n_open, self._buffer.n_ahead = sum(later for _, later in self._unanswered), 0
            return True
        if isinstance(answer, Error):
            self._buffer.n_open = max(self._buffer.n_open - n, 0)
            return True
        return False


def _chunk(
    sound: Sound, pictures: list[tuple[bytes, int]], *, force_listen: bool = False, force_speak: bool = False
) -> AudioChunk:
    return AudioChunk(
        audio_base64=sound,
        frame_base64_list=[data for data, _ in pictures],
        max_slice_nums=[slices for _, slices in pictures] or None,
        force_listen=force_listen,
        force_speak=force_speak,
    )
