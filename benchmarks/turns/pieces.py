"""Where a client cuts its sound into messages. Torch-free."""

import numpy as np

from benchmarks.turns.questions import RATE
from server.doors.live.sound.speech_level import FRAME, SpeechLevel


class PieceEnds:
    """The ends of a client's messages, from what it has recorded so far.

    Args:
        samples: [n] float32 at 16 kHz.
        piece_ms: length of a message.
        spoken_piece_ms: the same while the user speaks and right after that, as the gateway's doors find it.
    """

    def __init__(self, samples: np.ndarray, piece_ms: int, spoken_piece_ms: int):
        self._lengths = {True: spoken_piece_ms * RATE // 1000, False: piece_ms * RATE // 1000}
        level, self._is_near = SpeechLevel(), list[bool]()  # after each frame
        for at in range(FRAME, len(samples) + 1, FRAME):
            level.push(samples[at - FRAME : at])
            self._is_near.append(level.is_near)

    def next(self, begin: int, rest: int | None = None) -> int | None:
        """The end of the message that begins at `begin`, in samples; None: the sound ends before it.

        rest: samples from `begin` to the end of the server's unit, which no message crosses; None: not known.
        """
        for frame in range(begin // FRAME, len(self._is_near)):
            end = (frame + 1) * FRAME
            left = None if rest is None else begin + rest - end
            is_long = end - begin >= self._lengths[self._is_near[frame]]
            if left == 0 or (is_long and (left is None or left >= self._lengths[True])):
                return end
        return None
